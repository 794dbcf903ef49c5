"""Selectors: which cached positions take part in attention; one method a file."""
