"""The indexer of natively sparse models (DeepSeek-V3.2, 2025, arXiv 2512.02556, 2.1).

Its keys are the end of each row of the KV cache, where attention's queries have zeros: tiers, saved
sessions and forks treat them like keys. Its choice is a Selection like any method's, of single
positions for each token, or of blocks, whose key is that of their last position.
"""

import numpy as np

from tamis.graph.context import Index
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.model.hparams import Indexer
from tamis.select.base import Recording, SelectorShape, SelectorState


class IndexerState(SelectorState):
    """Selects what the layer's indexer scores best; layers without one reuse the last choice."""

    def __init__(self, shape: SelectorShape, indexer: Indexer) -> None:
        super().__init__(shape)
        self._indexer = indexer
        # Of blocks; its memory becomes resident as it is used.
        n_score = -(-shape.n_ctx // indexer.block) * (indexer.n_head if indexer.n_local else 1)
        self._scores = zeros((shape.n_ubatch, n_score), np.float32)
        # by the most tokens of the Programs that use them
        self._selections: dict[int, Selection] = {}
        self.index: Index | None = None  # of the layer being recorded

    def select_prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        """Record the selection of each token of a chunk; layers with a window need none."""
        if self.shape.window[layer] or layer < self._indexer.first:
            return super().select_prefill(rec, layer, q, kv)
        selection = self._selection(rec)
        if self.index is not None:
            of_heads = self.index.weights is None
            record = self._record_heads if of_heads else self._record
            record(rec, self.index, selection, kv)
        return selection

    select_decode = select_prefill  # in layers with a window it has all that a step sees

    @property
    def _most(self) -> int:
        """The most blocks that a row selects."""
        indexer = self._indexer
        top_k = indexer.top_k if indexer.n_local else indexer.top_k // indexer.block
        return min(top_k, -(-self.shape.n_ctx // indexer.block))

    def _selection(self, rec: Recording) -> Selection:
        """The Selection shared by all layers of Programs of so many tokens."""
        if rec.n_tok not in self._selections:
            n = rec.n_tok * self.shape.n_head_kv
            self._selections[rec.n_tok] = Selection(
                indptr=np.zeros(n + 1, np.int32),
                indices=zeros(n * (self._most + 1), np.int32),
                block=self._indexer.block,
                q_block=1,
                n_row=self.shape.n_head_kv,
            )
        return self._selections[rec.n_tok]

    def _record_scores(
        self, rec: Recording, index: Index, selection: Selection, kv: KVView
    ) -> None:
        """Record each block's score, shared by all KV heads."""
        indexer = self._indexer
        rec.program.add(
            ops.INDEX_SCORE,
            (self.shape.head_dim, indexer.n_key, kv.types[0]),
            step=rec.step,
            q=index.q.x,
            weights=index.weights,
            k_pages=kv.k,
            k_table=kv.k_table,
            scores=self._scores,
            n_head=indexer.n_head,
            n_head_kv=selection.n_row,
            block=indexer.block,
            capacity=self._scores.shape[1],
            scratch=index.scratch,
        )

    def _record(self, rec: Recording, index: Index, selection: Selection, kv: KVView) -> None:
        """Record one choice per token for all KV heads."""
        self._record_scores(rec, index, selection, kv)
        rec.program.add(
            ops.INDEX_CHOOSE,
            step=rec.step,
            scores=self._scores,
            indptr=selection.indptr,
            indices=selection.indices,
            block=self._indexer.block,
            n_row=selection.n_row,
            capacity=self._scores.shape[1],
            top_k=self._most,
        )

    def _record_heads(self, rec: Recording, index: Index, selection: Selection, kv: KVView) -> None:
        """Record a choice per token for each KV head except the last one, which is the index's."""
        indexer, capacity = self._indexer, self._scores.shape[1] // self._indexer.n_head
        rec.program.add(
            ops.HEAD_SCORE,
            (self.shape.head_dim, indexer.n_key, kv.types[0]),
            step=rec.step,
            q=index.q.x,
            k_pages=kv.k,
            k_table=kv.k_table,
            scores=self._scores,
            n_head=indexer.n_head,
            n_head_kv=selection.n_row,
            block=indexer.block,
            n_local=indexer.n_local,
            capacity=capacity,
            scratch=index.scratch,
        )
        rec.program.add(
            ops.HEAD_CHOOSE,
            step=rec.step,
            scores=self._scores,
            indptr=selection.indptr,
            indices=selection.indices,
            block=indexer.block,
            n_head=indexer.n_head,
            n_row=selection.n_row,
            capacity=capacity,
            top_k=self._most,
        )
