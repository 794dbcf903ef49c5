"""Unicode's normal forms, in time that grows with a text's length alone."""

import unicodedata
from itertools import pairwise
from typing import Literal

import regex

# Marks behind a letter are sorted in time that grows with the square of their number: of a text of
# nothing else, 40,000 take 5 s. Text has a few (Unicode's stream-safe format allows 30); longer
# runs are normalized in parts.
_MOST_MARKS = 256
_LONG_RUN = regex.compile(rf"\P{{ccc=0}}{{{_MOST_MARKS}}}")


def normalized(form: Literal["NFC", "NFD"], text: str) -> str:
    """Return ``text`` in a normal form; runs of more than 256 marks only in parts of so many."""
    if text.isascii():
        return text
    cuts = [match.end() for match in _LONG_RUN.finditer(text)]
    if not cuts:
        return unicodedata.normalize(form, text)
    parts = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    return "".join(unicodedata.normalize(form, part) for part in parts)
