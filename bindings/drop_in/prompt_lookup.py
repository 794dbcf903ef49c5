"""Prompt-lookup drafts for speculative decoding: what followed the last n-gram earlier in the text.

Prompt lookup decoding (Saxena 2023): no second model, and much gain where an answer repeats parts
of its prompt. Drafts are only a proposal: a token is taken where it is what the model chooses.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np


class LlamaDraftModel(ABC):
    """Proposes tokens that may follow."""

    @abstractmethod
    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        """Token ids int32 that may follow input_ids; empty for no idea."""


class LlamaPromptLookupDecoding(LlamaDraftModel):
    """The tokens after the first earlier occurrence of the longest matching suffix n-gram.

    max_ngram_size: tokens of the suffix, at most. num_pred_tokens: tokens to propose, at most.
    """

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.max_ngram_size, self.num_pred_tokens = max_ngram_size, num_pred_tokens

    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        """Token ids int32 that may follow input_ids; empty for no idea."""
        ids = np.asarray(input_ids, np.int32)
        for n in range(min(self.max_ngram_size, len(ids) - 1), 0, -1):
            places = np.flatnonzero(ids[: len(ids) - n] == ids[-n])
            for back in range(1, n):
                places = places[ids[places + back] == ids[back - n]]
            if len(places):
                first = int(places[0]) + n
                return ids[first : first + self.num_pred_tokens]
        return np.empty(0, np.int32)
