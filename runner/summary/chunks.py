"""Splits a long text into parts of limited tokens; joined, they are the text again.

A text is cut at its strongest borders: before a section's heading, between paragraphs, lines,
sentences, words, and inside a word only if that alone is too long.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

Count = Callable[[str], int]  # the tokens of a text

# The patterns of borders, the strongest first.
_BORDERS = tuple(
    re.compile(pattern, re.M)
    for pattern in (
        r"(?=^#{1,6}[ \t]\S)|(?<=\n)(?=[^\n]+\n[=\-~^]{3,}[ \t]*$)|\f",  # a heading; a new page
        r"(?<=\n)(?:[ \t]*\n)++",  # a blank line
        r"(?<=\n)(?=[^\n])",
        r"(?<=[.!?])(?=[ \t])|(?<=[。!?])",
        r"(?<=\s)(?=\S)",
    )
)


def split(text: str, count: Count, n_max: int) -> list[str]:
    """The text in as few parts as its borders allow, of similar length, each at most n_max tokens.

    Raises ValueError if a single character takes more than n_max.
    """
    units = list(_units(text, count, n_max, 0))
    room = n_max
    while True:
        groups = pack([size for _, size in units], room)
        parts = ["".join(unit for unit, _ in units[i:j]) for i, j in groups]
        over = max(map(count, parts), default=0) - n_max
        if over <= 0:
            return parts
        room -= over  # some units take more tokens together than each alone


def pack(sizes: Sequence[int], n_max: int) -> list[tuple[int, int]]:
    """Consecutive groups, as few as possible, whose sizes sum to at most n_max: (first, end) each.

    They are as even as possible: a short last group would weigh as much as a long one in the end.
    An item larger than n_max is a group of its own.
    """
    n_group = len(_greedy(sizes, n_max))
    even = bisect_left(range(n_max), True, key=lambda n: len(_greedy(sizes, n)) <= n_group)
    return _greedy(sizes, even)


def _greedy(sizes: Sequence[int], n_max: int) -> list[tuple[int, int]]:
    groups, first, total = [], 0, 0
    for i, size in enumerate(sizes):
        if total + size > n_max and i > first:
            groups.append((first, i))
            first, total = i, 0
        total += size
    return [*groups, (first, len(sizes))] if sizes else []


def _units(text: str, count: Count, n_max: int, level: int) -> Iterator[tuple[str, int]]:
    """Yield pieces of at most n_max tokens that parts are made of, each with its tokens.

    They are cut at the strongest borders that make them short enough.
    """
    for piece in _pieces(text, level):
        size = count(piece)
        if size <= n_max:
            yield piece, size
        elif level + 1 < len(_BORDERS):
            yield from _units(piece, count, n_max, level + 1)
        else:
            yield from _halves(piece, size, count, n_max)


def _pieces(text: str, level: int) -> Iterator[str]:
    start = 0
    for match in _BORDERS[level].finditer(text):
        if match.end() > start:
            yield text[start : match.end()]
            start = match.end()
    if start < len(text):
        yield text[start:]


def _halves(word: str, size: int, count: Count, n_max: int) -> Iterator[tuple[str, int]]:
    """Yield a word of too many tokens in pieces, halved repeatedly."""
    if size <= n_max:
        yield word, size
        return
    if len(word) == 1:
        raise ValueError(f"{word!r} takes {size} tokens, a part has room for {n_max}: raise n_ctx")
    for half in (word[: len(word) // 2], word[len(word) // 2 :]):
        yield from _halves(half, count(half), count, n_max)
