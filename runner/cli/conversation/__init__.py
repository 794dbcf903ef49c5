"""The conversation of `tamis chat`: its input line by line, its commands and its state."""
