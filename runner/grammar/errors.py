"""The error of a grammar."""


class GrammarError(ValueError):
    """A grammar or schema is invalid, cannot be satisfied, or is too large."""
