"""Byte-level BPE: the words of a text, merged by rank."""

from heapq import heapify, heappop, heappush
from itertools import pairwise

from tamis.formats.strings import Strings
from tamis.text import pretokenize

_CACHE_WORDS = 1 << 18  # distinct words remembered
_CACHE_CHARS = 64  # longer words are not worth remembering


def byte_alphabet() -> list[str]:
    """Return GPT-2's letter for each byte: printable ones for themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [letters[byte] for byte in range(256)]


class BytePairEncoder:
    """Encodes text without special tokens; the vocabulary and the merges as the file has them."""

    def __init__(self, tokens: Strings, merges: Strings, pre: str):
        self._pre = pre
        # In UTF-8, as the file has them: to decode 300,000 texts takes a tenth of a second.
        self._ids = {text: i for i, text in enumerate(tokens.raws())}
        ranked = list(merges.raws())
        # A merge is two parts with a space between, which no part has; the first of equals counts.
        self._ranks = dict(zip(reversed(ranked), range(len(ranked) - 1, -1, -1), strict=True))
        self._whole_words = pre in pretokenize.IGNORES_MERGES
        self._letters = [letter.encode() for letter in byte_alphabet()]
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of the tokens of ``text``."""
        cache = self._cache
        out: list[int] = []
        for word in pretokenize.split_words(text, self._pre):
            ids = cache.get(word)
            if ids is None:
                ids = self._encode_word(word)
                if len(word) <= _CACHE_CHARS:
                    if len(cache) >= _CACHE_WORDS:
                        cache.clear()
                    cache[word] = ids
            out += ids
        return out

    def _encode_word(self, word: str) -> tuple[int, ...]:
        letters = [self._letters[byte] for byte in word.encode()]
        if self._whole_words and (whole := self._ids.get(b"".join(letters))) is not None:
            return (whole,)
        ids: list[int] = []
        for part in self._merge(letters):
            if part in self._ids:
                ids.append(self._ids[part])
            else:  # a merge that makes no token: its letters, those that there are
                alone = (letter.encode() for letter in part.decode())
                ids += [self._ids[letter] for letter in alone if letter in self._ids]
        return tuple(ids)

    def _merge(self, letters: list[bytes]) -> list[bytes]:
        """Merge neighbours, lowest rank first and then leftmost, until no merge is left."""
        ranks = self._ranks
        parts = list(letters)
        n = len(parts)
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))
        heap = []
        for i, (left, right) in enumerate(pairwise(letters)):
            rank = ranks.get(b"%b %b" % (left, right))
            if rank is not None:
                heap.append((rank, i, left, right))
        heapify(heap)
        while heap:
            _, i, left, right = heappop(heap)
            j = after[i]
            if parts[i] != left or j >= n or parts[j] != right:
                continue  # one of the two has been merged with another since
            parts[i], parts[j] = left + right, b""
            after[i] = k = after[j]
            if k < n:
                before[k] = i
                self._push(heap, parts, i, k)
            if before[i] >= 0:
                self._push(heap, parts, before[i], i)
        return [part for part in parts if part]

    def _push(
        self, heap: list[tuple[int, int, bytes, bytes]], parts: list[bytes], i: int, j: int
    ) -> None:
        rank = self._ranks.get(b"%b %b" % (parts[i], parts[j]))
        if rank is not None:
            heappush(heap, (rank, i, parts[i], parts[j]))
