"""Unigram, T5's tokens: the segmentation of a text with the highest sum of scores."""

from tamis.formats.vocab import TokenType, Vocab
from tamis.text.charsmap import CharacterMap
from tamis.text.token_lookup import TokenLookup

_MATCHED = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
_UNKNOWN_PENALTY = 10.0  # SentencePiece's, below the lowest score of a piece
_SPACE = "\u2581"


class UnigramEncoder:
    """Encodes text without special tokens; ValueError for a broken map of characters."""

    def __init__(self, vocab: Vocab):
        kinds = vocab.token_types.tolist()
        scores = [0.0] * len(vocab) if vocab.scores is None else vocab.scores.tolist()
        normal = [s for s, kind in zip(scores, kinds, strict=True) if kind == TokenType.NORMAL]
        self._unknown_score = min(normal, default=0.0) - _UNKNOWN_PENALTY
        self._unk = vocab.unk
        self._merge_spaces = vocab.normalizer.merge_spaces
        self._space_prefix = vocab.add_space_prefix
        charsmap = vocab.normalizer.charsmap
        self._map = CharacterMap(charsmap) if charsmap else None
        self._scores = [
            0.0 if kind == TokenType.USER_DEFINED else score
            for score, kind in zip(scores, kinds, strict=True)
        ]
        self._pieces = TokenLookup(
            (text, i)
            for i, (text, kind) in enumerate(zip(vocab.tokens, kinds, strict=True))
            if kind in _MATCHED and text
        )

    def encode(self, text: str) -> list[int]:
        """Return the ids of the tokens of ``text``; adjacent unknown characters are one."""
        text = self._normalized(text)
        starts, tokens = self._best(text)
        ids: list[int] = []
        end = len(text)
        while end:
            token = tokens[end]
            if token >= 0:
                ids.append(token)
            elif self._unk is not None and (not ids or ids[-1] != self._unk):
                ids.append(self._unk)
            end = starts[end]
        return ids[::-1]

    def _normalized(self, text: str) -> str:
        if self._map is not None:
            text = self._map.apply(text)
        out, prefixed = [], not self._space_prefix
        for i, word in enumerate(text.split(" ")):
            if i and not self._merge_spaces:
                out.append(_SPACE)
            if word:
                if self._merge_spaces or not prefixed:
                    out.append(_SPACE)
                prefixed = True
                out.append(word)
        return "".join(out)

    def _best(self, text: str) -> tuple[list[int], list[int]]:
        """The start and token (-1: unknown) of the best segmentation's last piece, by its end."""
        n = len(text)
        lowest = float("-inf")
        sums, starts, tokens = [lowest] * (n + 1), [0] * (n + 1), [-1] * (n + 1)
        sums[0] = 0.0
        scores = self._scores
        for start in range(n):
            base = sums[start]
            alone = False
            for end, token in self._pieces.at(text, start):
                alone |= end == start + 1
                total = base + scores[token]
                if total > sums[end]:
                    sums[end], starts[end], tokens[end] = total, start, token
            if not alone and base + self._unknown_score > sums[start + 1]:
                sums[start + 1], starts[start + 1] = base + self._unknown_score, start
                tokens[start + 1] = -1
        return starts, tokens
