"""Select."""
