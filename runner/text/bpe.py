"""BPE: the words of a text, merged by rank, from bytes or from characters."""

from heapq import heapify, heappop, heappush
from itertools import pairwise

import regex

from tamis.formats.strings import Strings
from tamis.text import pretokenize

_CACHE_WORDS = 1 << 18  # distinct words remembered
_CACHE_CHARS = 64  # longer words are not cached
_SPACE = "\u2581"  # stands for a space in vocabularies of characters


def byte_alphabet() -> list[str]:
    """Return GPT-2's letter for each byte: printable ones for themselves, others from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [letters[byte] for byte in range(256)]


class BytePairEncoder:
    """Encodes text without special tokens; the vocabulary and the merges as the file has them.

    Tokens in ``hidden`` (ids) are never made from text, even if it spells them.
    """

    def __init__(
        self, tokens: Strings, merges: Strings, pre: str, hidden: frozenset[int] = frozenset()
    ):
        self._pre = pre
        # In UTF-8, as the file has them: decoding 300,000 texts takes a tenth of a second.
        self._ids = {text: i for i, text in enumerate(tokens.raws())}
        for text in [tokens.raw(i) for i in hidden]:
            self._ids.pop(text, None)
        ranked = list(merges.raws())
        # A merge is two parts separated by a space, which no part contains; of equal ones the first
        # counts.
        self._ranks = dict(zip(reversed(ranked), range(len(ranked) - 1, -1, -1), strict=True))
        self._whole_words = pre in pretokenize.IGNORES_MERGES
        self._letters = [letter.encode() for letter in byte_alphabet()]
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of the tokens of ``text``."""
        cache = self._cache
        out: list[int] = []
        for word in self._words(text):
            ids = cache.get(word)
            if ids is None:
                ids = self._encode_word(word)
                if len(word) <= _CACHE_CHARS:
                    if len(cache) >= _CACHE_WORDS:
                        cache.clear()
                    cache[word] = ids
            out += ids
        return out

    def _words(self, text: str) -> list[str]:
        return pretokenize.split_words(text, self._pre)

    def _symbols(self, word: str) -> list[bytes]:
        """The letters that merging starts from."""
        return [self._letters[byte] for byte in word.encode()]

    def _is_whole(self, word: str) -> bool:
        """Whether a word is a token regardless of the merges."""
        return self._whole_words

    def _encode_word(self, word: str) -> tuple[int, ...]:
        symbols = self._symbols(word)
        if self._is_whole(word) and (whole := self._ids.get(b"".join(symbols))) is not None:
            return (whole,)
        ids: list[int] = []
        for part in self._merge(symbols):
            token = self._ids.get(part)
            ids += self._spelled(part) if token is None else [token]
        return tuple(ids)

    def _spelled(self, part: bytes) -> list[int]:
        """The tokens of a merge's result that is no token: its letters, those that exist."""
        letters = (letter.encode() for letter in part.decode())
        return [self._ids[letter] for letter in letters if letter in self._ids]

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
                continue  # one of the two has been merged with another meanwhile
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


class CharacterPairEncoder(BytePairEncoder):
    """BPE that starts from characters; those without a token are the tokens of their bytes.

    Spaces are U+2581, unless ``pre`` is "whitespace": then words are what is between them.
    """

    def __init__(
        self,
        tokens: Strings,
        merges: Strings,
        pre: str,
        hidden: frozenset[int] = frozenset(),
        *,
        lowercase: bool = False,
    ):
        super().__init__(tokens, merges, pre, hidden)
        self._lowercase = lowercase
        self._drops_spaces = pre == "whitespace"
        # Lines are words. Splitting them before each space as well changes only the time, if no
        # merge has a space after another character: that is so for almost all.
        letters = "".join(_before_spaces(merges)) if not self._drops_spaces else ""
        self._cuts = regex.compile(rf"(?<=[^{_SPACE}{regex.escape(letters)}])(?={_SPACE})")

    def _words(self, text: str) -> list[str]:
        if self._drops_spaces:
            words = pretokenize.words_between_spaces(text)
            return ["".join(map(str.lower, w)) for w in words] if self._lowercase else words
        lines = pretokenize.split_words(text.replace(" ", _SPACE), self._pre)
        return [word for line in lines for word in self._cuts.splititer(line)]

    def _symbols(self, word: str) -> list[bytes]:
        return [c.encode() for c in word]

    def _is_whole(self, word: str) -> bool:
        return self._whole_words or (self._pre in pretokenize.WHOLE_LINE_ENDS and word[0] == "\n")

    def _spelled(self, part: bytes) -> list[int]:
        names = (f"<0x{byte:02X}>".encode() for byte in part)
        return [self._ids[name] for name in names if name in self._ids]


def _before_spaces(merges: Strings) -> set[str]:
    """The characters that precede a space in a merge."""
    space, found = _SPACE.encode(), set()
    for raw in merges.raws():
        if raw.find(space, 1) > 0:
            text = raw.replace(b" ", b"", 1).decode("utf-8", "replace")
            found |= {a for a, b in pairwise(text) if b == _SPACE != a}
    return found


class DnaEncoder:
    """Byte-level BPE in which the letters between <dna> and </dna> are tokens of six.

    Such tokens end with U+E000 in the file. The last one is filled up with A.
    """

    MARK = "\ue000"
    _K = 6

    def __init__(self, tokens: Strings, text_encoder: BytePairEncoder):
        self._text = text_encoder
        names = tokens.places(["<dna>", "</dna>", "<oov>"])
        self._names = names if len(names) == 3 else None
        self._kmers = {text: i for i, text in enumerate(tokens) if text.endswith(self.MARK)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of the tokens of ``text``."""
        if self._names is None:
            return self._text.encode(text)
        before, *rest = text.split("<dna>", 1)
        ids = self._text.encode(before)
        while rest:
            letters, *after = rest[0].split("</dna>", 1)
            ids.append(self._names["<dna>"])
            ids += self._six_by_six(letters)
            if not after:
                break
            ids.append(self._names["</dna>"])
            before, *rest = after[0].split("<dna>", 1)
            ids += self._text.encode(before)
        return ids

    def _six_by_six(self, letters: str) -> list[int]:
        assert self._names is not None
        data = letters.encode().upper()  # by bytes, as in the model's training
        data += b"A" * (-len(data) % self._K)
        kmers = (data[i : i + self._K].decode("latin-1") for i in range(0, len(data), self._K))
        return [self._kmers.get(kmer + self.MARK, self._names["<oov>"]) for kmer in kmers]
