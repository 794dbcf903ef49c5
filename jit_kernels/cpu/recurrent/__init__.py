"""Recurrent layers: convolutions, scans of a state, their gates and norms."""
