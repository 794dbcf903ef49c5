"""The `tamis` command."""
