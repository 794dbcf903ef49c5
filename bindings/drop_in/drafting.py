"""Draft tokens for speculative decoding: prompt lookup, a smaller model, or sparse attention.

Prompt lookup decoding (Saxena 2023) needs no second model, and gains much if an answer repeats
parts of its prompt. A draft is only a proposal: a token is accepted if the model itself would
choose it.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from tamis.engine.drafting import AttentionDraft, Draft, ModelDraft
from tamis.engine.engine import Engine
from tamis.engine.session import Session


class LlamaDraftModel(ABC):
    """A base class of what proposes the next tokens."""

    @abstractmethod
    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        """Token ids int32 that may follow input_ids; empty if there is no proposal."""


class LlamaPromptLookupDecoding(LlamaDraftModel):
    """Proposes the tokens after the first earlier occurrence of the longest matching suffix n-gram.

    max_ngram_size: the most tokens of the suffix. num_pred_tokens: the most tokens to propose.
    """

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.max_ngram_size, self.num_pred_tokens = max_ngram_size, num_pred_tokens

    @staticmethod
    def find_candidate_pred_tokens(
        input_ids: np.ndarray, max_ngram_size: int, num_pred_tokens: int
    ) -> np.ndarray:
        """Token ids int32 that may follow input_ids; empty if there is no proposal."""
        ids = np.asarray(input_ids, np.int32)
        for n in range(min(max_ngram_size, len(ids) - 1), 0, -1):
            places = np.flatnonzero(ids[: len(ids) - n] == ids[-n])
            for back in range(1, n):
                places = places[ids[places + back] == ids[back - n]]
            if len(places):
                first = int(places[0]) + n
                return ids[first : first + num_pred_tokens]
        return np.empty(0, np.int32)

    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        """Token ids int32 that may follow input_ids; empty if there is no proposal."""
        return self.find_candidate_pred_tokens(input_ids, self.max_ngram_size, self.num_pred_tokens)


class _Opened(LlamaDraftModel):
    """A drafter that is opened by the Llama it is passed to."""

    num_pred_tokens: int
    _draft: Draft | None = None

    def __call__(self, input_ids: np.ndarray, /, **kwargs: Any) -> np.ndarray:
        """Token ids int32 that may follow input_ids; empty if there is no proposal."""
        if self._draft is None:
            raise RuntimeError("nothing is open: give this to Llama(draft_model=...)")
        found = self._draft.propose(np.asarray(input_ids).tolist(), self.num_pred_tokens)
        return np.array(found, np.int32)


class LlamaModelDrafting(_Opened):
    """Proposes the likeliest tokens of a smaller model with the same vocabulary.

    model_path: a GGUF file. num_pred_tokens: the most tokens to propose. The Llama that it is
    passed to opens it, and raises ValueError if the vocabularies differ.
    """

    def __init__(
        self, model_path: str, num_pred_tokens: int = 8, n_threads: int | None = None
    ) -> None:
        self.model_path, self.num_pred_tokens, self.n_threads = (
            model_path,
            num_pred_tokens,
            n_threads,
        )

    def open_for(self, engine: Engine, n_ctx: int) -> None:
        """Load the model, to draft for another engine with a context of n_ctx tokens."""
        small = Engine.load(self.model_path, n_threads=self.n_threads)
        self._draft = ModelDraft(small, engine, n_ctx)


class LlamaAttentionDrafting(_Opened):
    """Proposes the model's likeliest tokens under sparse attention; dense attention verifies them.

    attn: the method, such as "hip". num_pred_tokens: the most tokens to propose. The Llama that it
    is passed to reads prompts densely and has no attn of its own; otherwise it raises ValueError.
    """

    def __init__(self, attn: str, num_pred_tokens: int = 8) -> None:
        self.attn, self.num_pred_tokens = attn, num_pred_tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.attn, self.num_pred_tokens)

    def open_for(self, session: Session) -> None:
        """Draft for a session whose decode steps use the method."""
        self._draft = AttentionDraft(session)
