"""What `tamis eval` measures, how its results are kept and what the report makes of them."""
