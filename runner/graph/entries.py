"""Selections of attention to compressed entries: a window, and entries that an indexer selects.

Entries are rows of a separate KV head, at the last position of the block that each stands for.
"""

import numpy as np

from tamis.graph.indexer import IndexerState
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.model.hparams import HParams
from tamis.select.base import Recording, SelectorShape


class EntryState(IndexerState):
    """Two rows per token: its window's positions, and its entries' (all without an indexer)."""

    def __init__(self, shape: SelectorShape, hp: HParams) -> None:
        super().__init__(shape, hp.indexer)
        self._window, self._ratios = hp.sliding_window, hp.compressed.ratios
        indexed = hp.indexer.block
        most = [
            min(hp.indexer.top_k if every == indexed else shape.n_ctx, shape.n_ctx // every)
            for every in self._ratios
            if every
        ]
        self._capacity = min(hp.sliding_window, shape.n_ctx) + max(most, default=0)

    def select_prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        """Record the selection of each token of a chunk."""
        selection, index = self._selection(rec), self.index
        if index is not None:
            self._record_scores(rec, index, selection, kv)
        rec.program.add(
            ops.ENTRY_CHOOSE,
            step=rec.step,
            scores=None if index is None else self._scores,
            indptr=selection.indptr,
            indices=selection.indices,
            n_window=self._window,
            every=self._ratios[layer],
            capacity=self._scores.shape[1],
            top_k=self.shape.n_ctx if index is None else self._indexer.top_k,
        )
        return selection

    select_decode = select_prefill

    def _selection(self, rec: Recording) -> Selection:
        """The Selection shared by all layers of Programs of so many tokens."""
        if rec.n_tok not in self._selections:
            self._selections[rec.n_tok] = Selection(
                indptr=np.zeros(2 * rec.n_tok + 1, np.int32),
                indices=zeros(rec.n_tok * self._capacity, np.int32),
                block=1,
                q_block=1,
                n_row=2,
            )
        return self._selections[rec.n_tok]


def indexer_state(shape: SelectorShape, hp: HParams) -> IndexerState:
    """The state of a model's built-in selection of keys."""
    return EntryState(shape, hp) if hp.compressed.n_head else IndexerState(shape, hp.indexer)
