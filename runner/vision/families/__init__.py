"""One file for each projector type, found by its name."""
