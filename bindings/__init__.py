"""Interfaces for programs that embed tamis."""
