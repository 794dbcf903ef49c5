"""The sampler of infill: end the gap's text, or keep few likely tokens."""

from collections.abc import Callable, Collection

import numpy as np

from tamis.sampling.base import Candidates, Step

_LEAST = 0.2  # the least probability of a kept token, before few ones are compared


class Infill(Step):
    """Chooses whether the gap is filled, else drops unlikely tokens; llama.cpp's infill.

    It belongs after top-k: its time grows with the square of the candidates.
    """

    def __init__(self, piece: Callable[[int], bytes], eog: Collection[int], eot: int) -> None:
        """Make the step; piece: returns a token's bytes.

        eog: tokens that end a text. eot: the token chosen if no other is left.
        """
        self._piece, self._eog, self._eot = piece, frozenset(eog), eot

    def apply(self, c: Candidates) -> Candidates:
        """The remaining tokens: those that end the text, or likely ones, or eot alone."""
        probs = c.probs().astype(np.float64)
        ends = np.array([int(i) in self._eog for i in c.ids])
        if 3 * probs[ends].sum() * len(c) > probs[~ends].sum():
            return c.take(ends, c.sorted)
        self._join(c, probs)
        kept = ends | (probs >= _LEAST)
        probs /= probs[kept].sum() or 1
        kept &= ends | (probs >= 1 / (np.count_nonzero(kept & ~ends) + 1))
        if not (kept & ~ends).any():
            return Candidates(np.array([self._eot], np.int32), np.ones(1, np.float32), True)
        logits = np.log(np.maximum(probs[kept], 1e-30)).astype(np.float32)
        return Candidates(c.ids[kept], logits, False)

    def _join(self, c: Candidates, probs: np.ndarray) -> None:
        """Give the likelier of two tokens both probabilities, if one's text begins the other's."""
        texts = [self._piece(int(i)) for i in c.ids]
        for i, one in enumerate(texts):
            for j, other in enumerate(texts):
                if i != j and one and probs[i] > 0 and probs[j] > 0 and other.startswith(one):
                    to, of = (j, i) if probs[j] > probs[i] else (i, j)
                    probs[to], probs[of] = probs[to] + probs[of], 0.0
