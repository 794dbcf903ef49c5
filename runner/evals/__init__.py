"""The measurements of `tamis eval`, the storage of its results, and its report."""
