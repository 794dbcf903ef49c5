"""Families of models, a file each: their classes' names, tensors' names, sizes and vocabulary."""
