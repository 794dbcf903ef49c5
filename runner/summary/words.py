"""The words that two texts share: stems, numbers, and the rarity of each.

Neither a model nor a language's word list is needed, except for question words. A word's weight is
its rarity in the document, so that "the" hardly counts in any language.
"""

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

# Chinese, Japanese and Korean have no spaces between words: two characters count as a word.
_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]+|\d+(?:[.,:]\d+)*|[^\W\d_{_CJK}]+")
_CJK_WORD = re.compile(f"[{_CJK}]")
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
_TENS = "thirty forty fifty sixty seventy eighty ninety hundred"
_NUMBER = {word: str(i) for i, word in enumerate(_ONES.split())} | {
    word: str(10 * i) for i, word in enumerate(_TENS.split(), 3)
}
_INFLECTIONS = ("ies", "es", "s", "ing", "ed", "ly", "e")
_DERIVATIONS = ("ations", "ation", "ions", "ion", "ance", "ence", "ers", "ors", "er", "or")
# A sentence ends at its mark, at a blank line, or before a list item or a heading.
_BORDER = re.compile(r"(?<=[.!?])(?=\s)|(?<=[。！？])|\n(?=[ \t]*(?:\n|[-*#•]|\d+[.)]\s))")
# characters of a sentence; text without full stops, such as a table, is cut at its lines
LONGEST = 400


@dataclass(frozen=True, slots=True)
class Span:
    """A range of characters of a text, without surrounding white space."""

    start: int
    end: int


def words(text: str) -> list[str]:
    """The stems of a text's words in their order; numbers are digits."""
    found: list[str] = []
    for match in _WORD.finditer(text.lower()):
        word = match[0]
        if word[0].isdigit():
            found.append(word.replace(",", ""))
        elif _CJK_WORD.match(word):
            found += [word[i : i + 2] for i in range(max(1, len(word) - 1))]
        else:
            found.append(_NUMBER.get(word) or stem(word))
    return found


def stem(word: str) -> str:
    """A word without its English ending; other words are stemmed consistently."""
    for ending in _DERIVATIONS:
        if word.endswith(ending) and len(word) - len(ending) >= 4:
            return _ended(word[: -len(ending)])
    for ending in _INFLECTIONS:
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            rest = word[: -len(ending)]
            return rest + "y" if ending == "ies" else _ended(rest)
    return word


def _ended(rest: str) -> str:
    """The stem after removing an ending: "stop" for "stopp" of "stopped", "rais" for "raising".

    The latter equals the stem of "raise".
    """
    doubled = len(rest) > 3 and rest[-1] == rest[-2] and rest[-1] not in "aeiouls"
    return rest[:-1] if doubled else rest.removesuffix("e") if len(rest) > 3 else rest


def sentences(text: str) -> list[Span]:
    """The sentences of a text; each has at least one word."""
    borders = [0, *(match.end() for match in _BORDER.finditer(text)), len(text)]
    found: list[Span] = []
    for start, end in pairwise(borders):
        pieces = [(start, end)] if end - start <= LONGEST else _lines(text, start, end)
        for first, last in pieces:
            piece = text[first:last]
            if _WORD.search(piece):
                lead = len(piece) - len(piece.lstrip())
                found.append(Span(first + lead, first + len(piece.rstrip())))
    return found


def _lines(text: str, start: int, end: int) -> list[tuple[int, int]]:
    """Lines of a long piece, grouped up to LONGEST characters; a longer line is cut."""
    pieces: list[tuple[int, int]] = []
    first = start
    while first < end:
        last = min(first + LONGEST, end)
        if last < end:
            border = max(text.rfind("\n", first, last), -1)
            border = border if border > first else text.rfind(" ", first, last)
            last = border + 1 if border > first else last
        pieces.append((first, last))
        first = last
    return pieces


class Index:
    """The sentences of a text and the words of each."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.spans = sentences(text)
        self.words = [frozenset(words(text[span.start : span.end])) for span in self.spans]
        self._count = Counter(word for each in self.words for word in each)
        self._where: dict[str, list[int]] = {}
        for i, each in enumerate(self.words):
            for word in each:
                self._where.setdefault(word, []).append(i)

    def weight(self, word: str) -> float:
        """The weight of a word: its rarity; the largest for a word that the text lacks."""
        return math.log(1 + len(self.spans) / (self._count[word] or 0.5))

    def share(self, wanted: Iterable[str], found: Iterable[str]) -> float:
        """The share, by weight, of wanted words among the found ones; 1 if none is wanted."""
        wanted, found = frozenset(wanted), frozenset(found)
        total = sum(map(self.weight, wanted))
        return sum(map(self.weight, wanted & found)) / total if total else 1.0

    def having(self, wanted: Iterable[str]) -> list[int]:
        """The sentences with any of these words, in order."""
        return sorted({i for word in wanted for i in self._where.get(word, ())})

    def around(self, first: int, last: int) -> frozenset[str]:
        """The words of the sentences first to last (included), clipped to the text."""
        return frozenset().union(*self.words[max(0, first) : last + 1])

    def quote(self, first: int, last: int) -> Span:
        """The sentences first to last, as one span."""
        return Span(self.spans[first].start, self.spans[last].end)


def find(text: str, needle: str, share: float = 0.02) -> Span | None:
    """The needle's span in a text: equal up to white space, or within share of its length.

    The distance is in edits; the nearest end is taken. Time grows with the text's length times the
    needle's / 64 (Myers, A fast bit-vector algorithm, 1999; Hyyrö's variant for a search).
    """
    plain, where = _plain(text)
    wanted, _ = _plain(needle)
    if not wanted:
        return None
    start = plain.find(wanted)
    if start >= 0:
        return Span(where[start], where[start + len(wanted) - 1] + 1)
    most = int(len(wanted) * share)
    end = _nearest(plain, wanted, most) if most else None
    if end is None:
        return None
    # The same search backwards from the end finds the start.
    back = plain[max(0, end - len(wanted) - most) : end][::-1]
    length = _nearest(back, wanted[::-1], most, first=True)
    assert length is not None
    return Span(where[end - length], where[end - 1] + 1)


def _plain(text: str) -> tuple[str, Sequence[int]]:
    """The text with single spaces for white space, and the origin of each character."""
    where: list[int] = []
    pieces: list[str] = []
    for match in re.finditer(r"\S+", text):
        if pieces:
            pieces.append(" ")
            where.append(match.start() - 1)
        pieces.append(match[0])
        where.extend(range(match.start(), match.end()))
    return "".join(pieces), where


def _nearest(text: str, needle: str, most: int, *, first: bool = False) -> int | None:
    """The end of the best match within `most` edits; None if there is none.

    first: whether the match must begin at the start of the text.
    """
    size = len(needle)
    masks: dict[str, int] = {}
    for i, letter in enumerate(needle):
        masks[letter] = masks.get(letter, 0) | 1 << i
    ones, top = (1 << size) - 1, 1 << size - 1
    plus, minus, distance = ones, 0, size
    best, end = most + 1, None
    for at, letter in enumerate(text, 1):
        equal = masks.get(letter, 0)
        vertical = equal | minus
        horizontal = (((equal & plus) + plus) ^ plus) | equal
        up, down = minus | (ones & ~(horizontal | plus)), plus & horizontal
        distance += bool(up & top) - bool(down & top)
        up, down = up << 1 | first, down << 1
        plus, minus = (down | ~(vertical | up)) & ones, up & vertical & ones
        if distance < best:
            best, end = distance, at
    return end


def line_of(starts: Sequence[int], at: int) -> int:
    """The piece, from 1, that a character is in; starts: of the pieces, ascending from 0."""
    return bisect_right(starts, at)
