"""Errors of sessions that callers catch before they have one."""


class ContextError(ValueError):
    """The tokens do not fit the context; the message has both numbers and the remedy."""
