"""The error of a grammar."""


class GrammarError(ValueError):
    """A grammar or schema that is wrong, that nothing satisfies, or that is too large."""
