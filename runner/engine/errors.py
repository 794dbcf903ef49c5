"""Errors of sessions, in a module that is cheap to import."""


class ContextError(ValueError):
    """The tokens do not fit the context; the message has both numbers and the remedy."""
