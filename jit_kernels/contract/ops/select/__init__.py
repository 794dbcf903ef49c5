"""The ops of selection methods, one file a method."""
