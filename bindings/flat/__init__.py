"""The functions of `tamis.bindings.llama`, by subject."""
