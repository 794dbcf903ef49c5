"""A context that never fills: the oldest tokens are dropped as a prompt is read or answered.

This is llama.cpp's context shift: remaining tokens keep what they have read of dropped ones.
"""

from collections.abc import Sequence

import numpy as np

from tamis.engine.errors import ContextError
from tamis.engine.generate import Generating, TokenProgress
from tamis.engine.session import Session
from tamis.graph.topk_logits import Best
from tamis.text.tokenizer import Tokenizer


class Shifting(Generating):
    """A session that drops its oldest tokens once it is full, except the first n_keep."""

    def __init__(self, session: Session, n_keep: int) -> None:
        if not 0 <= n_keep <= session.n_ctx // 2:
            raise ContextError(
                f"n_keep is {n_keep}, expected at most half of n_ctx, {session.n_ctx // 2}: raise "
                "n_ctx or shorten what is kept"
            )
        self._session, self._n_keep = session, n_keep
        self.n_dropped = 0  # tokens, so far

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._session.tokenizer

    @property
    def tokens(self) -> list[int]:
        """The tokens that it holds."""
        return self._session.tokens

    @property
    def n_free(self) -> int:
        """A very large number: only the model ends the answer."""
        return 1 << 62

    def prefill(self, ids: Sequence[int], progress: TokenProgress | None = None) -> np.ndarray:
        """Append any number of tokens; returns the logits f32 [n_vocab] of the last one."""
        done, logits = 0, None
        while done < len(ids):
            room = self._session.n_ctx - self._session.n_past
            if room == 0:
                room = self._make_room()
            part = ids[done : done + min(room, self._session.n_ubatch)]
            logits = self._session.prefill(part)
            done += len(part)
            if progress is not None:
                progress(done, len(ids))
        assert logits is not None
        return logits

    def decode_best(self, token_id: int, n: int | None) -> Best | np.ndarray:
        """Do what Session.decode_best does, after making room if there is none."""
        if self._session.n_past == self._session.n_ctx:
            self._make_room()
        return self._session.decode_best(token_id, n)

    def _make_room(self) -> int:
        """Drop the oldest half of the tokens that may be dropped; returns how many fit now."""
        n = max(1, (self._session.n_past - self._n_keep) // 2)
        self._session.remove(self._n_keep, self._n_keep + n)
        self.n_dropped += n
        return self._session.n_ctx - self._session.n_past
