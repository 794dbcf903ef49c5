"""PLaMo-2's tokens: the segmentation of a text with the highest sum of rounded scores."""

import math

from tamis.formats.vocab import TokenType, Vocab, byte_of_token
from tamis.text.token_lookup import TokenLookup

# of a character that is written as its bytes; the unit of scores is 1e-4
_UNKNOWN_SCORE = -10_000_000
_LOWEST_SCORE = -20_000_000  # scores below are those of unused tokens


def _rounded(score: float) -> int | None:
    if not math.isfinite(score):
        return None
    rounded = int(math.copysign(math.floor(abs(score) * 1e4 + 0.5), score))
    return rounded if rounded > _LOWEST_SCORE else None


class PlamoEncoder:
    """Encodes text without special tokens; ValueError unless there is a token for each byte."""

    def __init__(self, vocab: Vocab):
        kinds = vocab.token_types.tolist()
        scores = [0.0] * len(vocab) if vocab.scores is None else vocab.scores.tolist()
        self._scores = [_rounded(score) for score in scores]
        self._bytes: dict[int, int] = {}
        texts: list[tuple[str, int]] = []
        for i, (text, kind) in enumerate(zip(vocab.tokens, kinds, strict=True)):
            byte = byte_of_token(text) if kind == TokenType.BYTE else None
            if byte is not None:
                self._bytes[byte] = i
            elif text and kind not in (TokenType.CONTROL, TokenType.UNKNOWN):
                texts.append((text, i))
        if missing := [byte for byte in range(256) if byte not in self._bytes]:
            raise ValueError(f"no token for the byte {missing[0]:#04x}: PLaMo-2 needs all 256")
        self._pieces = TokenLookup(texts)

    def encode(self, text: str) -> list[int]:
        """Return the ids of the tokens of ``text``, without a byte order mark before it."""
        text = text.removeprefix("\ufeff")
        ends, tokens = self._best(text)
        ids: list[int] = []
        at = 0
        while at < len(text):
            token = tokens[at]
            ids += [self._bytes[byte] for byte in text[at].encode()] if token is None else [token]
            at = ends[at]
        return ids

    def _best(self, text: str) -> tuple[list[int], list[int | None]]:
        """End and token (None: unknown) of the first piece of the best cut, by where it starts."""
        n = len(text)
        costs, ends = [0] * (n + 1), [0] * (n + 1)
        tokens: list[int | None] = [None] * (n + 1)
        for start in range(n - 1, -1, -1):
            best = costs[start + 1] - _UNKNOWN_SCORE
            ends[start] = start + 1
            for end, token in self._pieces.at(text, start):
                score = self._scores[token]
                # Of equal sums the longest piece wins, and the unknown character loses.
                if score is not None and costs[end] - score <= best:
                    best, ends[start], tokens[start] = costs[end] - score, end, token
            costs[start] = best
        return ends, tokens
