"""WordPiece, BERT's tokens: words split into the longest pieces of the vocabulary."""

import unicodedata
from collections.abc import Iterator

from tamis.formats.vocab import TokenType, Vocab
from tamis.text.pretokenize import WHITE_SPACE, normalized

# Each character is a word of its own, as in Hugging Face's normalizer.
_IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)
_WORD_START = "\u2581"
_LONGEST_WORD = 100  # in characters: BERT's own tokenizer gives up on longer ones
_CACHE_WORDS = 1 << 16


class WordPieceEncoder:
    """Encodes text without special tokens; pieces that start a word begin with U+2581.

    A word that cannot be split into pieces is one unknown token.
    """

    def __init__(self, vocab: Vocab):
        hidden = (TokenType.CONTROL, TokenType.UNKNOWN)
        kinds = vocab.token_types.tolist()
        self._ids = {
            text: i
            for i, (text, kind) in enumerate(zip(vocab.tokens, kinds, strict=True))
            if text and kind not in hidden
        }
        self._max_chars = max(map(len, self._ids), default=0)
        self._unk = vocab.unk
        self._normalizer = vocab.normalizer
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the ids of the tokens of ``text``."""
        out: list[int] = []
        for word in self._words(text):
            ids = self._cache.get(word)
            if ids is None:
                if len(self._cache) >= _CACHE_WORDS:
                    self._cache.clear()
                ids = self._cache[word] = self._pieces(_WORD_START + word)
            out += ids
        return out

    def _words(self, text: str) -> Iterator[str]:
        options = self._normalizer
        word: list[str] = []
        for c in normalized("NFD", text) if options.strip_accents else text:
            kind = unicodedata.category(c)
            space = c in WHITE_SPACE
            alone = kind[0] == "P" or (kind[0] == "S" and c < "\x7f") or _is_ideograph(ord(c))
            if (space or alone) and word:
                yield "".join(word)
                word = []
            if alone:
                yield c
            elif kind == "Mn" and options.strip_accents:
                continue  # an accent; vowel signs with width (Mc) are letters, as in BERT
            elif not space and kind[0] != "C" and c != "\ufffd":
                word.append(c.lower() if options.lowercase else c)
        if word:
            yield "".join(word)

    def _pieces(self, word: str) -> list[int]:
        ids, start = [], 0
        if len(word) > len(_WORD_START) + _LONGEST_WORD:
            return [] if self._unk is None else [self._unk]
        while start < len(word):
            for end in range(min(len(word), start + self._max_chars), start, -1):
                token = self._ids.get(word[start:end])
                if token is not None:
                    break
            else:
                return [] if self._unk is None else [self._unk]
            ids.append(token)
            start = end
        return ids


def _is_ideograph(code: int) -> bool:
    return code >= 0x3400 and any(first <= code <= last for first, last in _IDEOGRAPHS)
