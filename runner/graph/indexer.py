"""The indexer of models that are sparse by design (DeepSeek-V3.2, 2025, arXiv 2512.02556, 2.1).

Its keys are the end of each row of the KV cache, where queries of attention have zeros: what tiers,
saved sessions and forks do with keys holds for them too. What it chooses is a Selection like any
method's, of each token's own positions, or of blocks of them, whose keys are their last positions'.
"""

import numpy as np

from tamis.graph.context import Index
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.model.hparams import Indexer
from tamis.select.base import Recording, SelectorShape, SelectorState


class IndexerState(SelectorState):
    """Chooses what the layer's indexer scores best; a layer without one, what the last one did."""

    def __init__(self, shape: SelectorShape, indexer: Indexer) -> None:
        super().__init__(shape)
        self._indexer = indexer
        self._scores = zeros((shape.n_ubatch, shape.n_ctx), np.float32)  # resident as it is used
        self._selections: dict[int, Selection] = {}  # of Programs of up to so many tokens
        self.index: Index | None = None  # of the layer that is being recorded

    def prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        """Record the choice for each token of a chunk; layers with a window need none."""
        if self.shape.window[layer]:
            return super().prefill(rec, layer, q, kv)
        block, n_row = self._indexer.block, self.shape.n_head_kv
        most = min(self._indexer.top_k, self.shape.n_ctx) // block
        if rec.n_tok not in self._selections:
            self._selections[rec.n_tok] = Selection(
                indptr=np.zeros(rec.n_tok * n_row + 1, np.int32),
                indices=zeros(rec.n_tok * n_row * (most + 1), np.int32),
                block=block,
                q_block=1,
                n_row=n_row,
            )
        selection, index = self._selections[rec.n_tok], self.index
        if index is None:
            return selection
        rec.program.add(
            ops.INDEX_SCORE,
            (self.shape.head_dim, self._indexer.n_key, kv.types[0]),
            step=rec.step,
            q=index.q.x,
            weights=index.weights,
            k_pages=kv.k,
            k_table=kv.k_table,
            scores=self._scores,
            n_head=self._indexer.n_head,
            n_head_kv=n_row,
            block=block,
            capacity=self.shape.n_ctx,
            scratch=index.scratch,
        )
        rec.program.add(
            ops.INDEX_CHOOSE,
            step=rec.step,
            scores=self._scores,
            indptr=selection.indptr,
            indices=selection.indices,
            block=block,
            n_row=n_row,
            capacity=self.shape.n_ctx,
            top_k=most,
        )
        return selection

    decode = prefill  # and in layers with a window all that a step sees
