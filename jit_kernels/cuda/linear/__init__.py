"""Products with weights on a GPU, and the ops over rows around them."""
