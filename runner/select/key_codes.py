"""Scores of all keys by an int8 copy of them, where the device has kernels for it.

The copy belongs to the state: codes of 16 keys interleaved, minus a centre, with one step size per
key (see contract/ops/select/key_codes.py). A decode step codes the keys that are missing, at first
all of a prompt's, so that a copied, loaded, truncated or re-rotated sequence needs nothing else.
"""

from typing import Any

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops import AUDIT
from tamis.jit_kernels.contract.program import Cost
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.select.base import SPAN, Bound, Recording, SelectorShape

ROUNDING = 1e-3  # the error of a mass: float32 logits of float16 keys


class KeyCodes:
    """The int8 copy of all layers' keys, and the queries of one layer in the same form."""

    def __init__(self, shape: SelectorShape) -> None:
        self._shape, self._n_ctx = shape, -(-shape.n_ctx // SPAN) * SPAN
        n_kv, head_dim, n_layer = shape.n_head_kv, shape.head_dim, shape.n_layer
        self._coded: dict[int, dict[str, Any]] = {}  # by layer, made when first recorded
        self.filled = np.zeros((n_layer, n_kv), np.int64)  # positions that are coded
        self._line = zeros((ops.CODE_WORKERS, head_dim), np.float32)
        self._left_out = np.zeros((n_layer, shape.n_head, 2), np.float64)
        self._work: np.ndarray | None = None  # of audited steps
        self._queries = {
            "q_codes": zeros((shape.n_head, head_dim), np.int8),
            "q_sums": np.zeros(shape.n_head, np.int32),
            "q_steps": np.zeros(shape.n_head, np.float32),
            "q_centre": np.zeros(shape.n_head, np.float32),
        }

    @property
    def n_bytes(self) -> int:
        """Bytes of the codes and their step sizes at n_ctx tokens, for layers that may read all."""
        shape, n_full = self._shape, sum(not window for window in self._shape.window)
        return n_full * shape.n_head_kv * (shape.head_dim + 4) * self._n_ctx

    def _of(self, layer: int) -> dict[str, Any]:
        n_kv, head_dim, n_ctx = self._shape.n_head_kv, self._shape.head_dim, self._n_ctx
        if layer not in self._coded:
            self._coded[layer] = {
                "codes": zeros((n_kv, n_ctx // ops.KEYS, head_dim // 4, ops.KEYS, 4), np.uint8),
                "steps": zeros((n_kv, n_ctx), np.float32),
                "centre": zeros((n_kv, head_dim), np.float32),
            }
        return self._coded[layer]

    def record(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> dict[str, Any]:
        """Record the coding of missing keys and of q f32 [n_head, head_dim].

        Returns the fields of an op that multiplies them.
        """
        shape = self._shape
        keys: dict[str, Any] = {"step": rec.step, "k_pages": kv.k, "k_table": kv.k_table}
        keys |= {"filled": self.filled[layer], "n_head_kv": shape.n_head_kv}
        constants, coded = (shape.head_dim, kv.types[0]), dict(self._of(layer))
        centre = coded.pop("centre")
        coded |= {"capacity": self._n_ctx, **self._queries}
        rec.program.add(ops.KEY_CENTRE, constants, centre=centre, **keys)
        rec.program.add(
            ops.KEY_CODES,
            constants,
            q=q,
            centre=centre,
            line=self._line,
            n_head=shape.n_head,
            **keys,
            **coded,
        )
        return {"filled": self.filled[layer], **coded}

    def bracket(self, rec: Recording, layer: int, q: np.ndarray, sel: Selection) -> None:
        """Record lower and upper bounds of the mass that a Selection leaves out."""
        shape, capacity = self._shape, self._n_ctx
        if self._work is None:
            self._work = zeros((shape.n_head, 2 * capacity), np.float32)
        rec.program.add(
            ops.MASS_BRACKET,
            (shape.head_dim,),
            step=rec.step,
            q=q,
            **self._of(layer),
            indptr=sel.indptr,
            indices=sel.indices,
            found=self._left_out[layer],
            work=self._work,
            block=sel.block,
            n_row=sel.n_row,
            heads_per_kv=shape.group,
            n_head=shape.n_head,
            capacity=capacity,
            scale=shape.scale,
        )

    def bounds(self, layer: int, report: np.ndarray) -> list[Bound]:
        """The bound that an audited step's omitted mass lies within the recorded bracket."""
        left, (least, most) = 1 - report[:, AUDIT.mass], self._left_out[layer].T
        return [
            Bound("mass left out, at most (int8 keys)", left, most, rounding=ROUNDING),
            Bound("mass left out, at least (int8 keys)", least, left, rounding=ROUNDING),
        ]

    def truncate(self, n_tokens: int) -> None:
        """Drop the codes from n_tokens on."""
        np.minimum(self.filled, n_tokens, out=self.filled)


class KeyScores:
    """Records scores of all keys, f32 [n_head, capacity], and their maxima: see ops.SCORE_KEYS.

    The score of `group` heads is their maximum. The best n_top of a row are selected by exact
    scores, in nearly all cases: see ops.RESCORE_KEYS.
    """

    def __init__(
        self,
        shape: SelectorShape,
        scores: np.ndarray,
        maxima: np.ndarray,
        *,
        group: int,
        n_top: int,
    ) -> None:
        self._shape, self._group, self._n_top = shape, group, n_top
        self._scores, self._maxima, n_ctx = scores, maxima, scores.shape[1]
        self.codes = KeyCodes(shape) if shape.int8_keys else None
        if self.codes is not None:
            n_work = ops.rescore_work(n_ctx, group)
            self._work = zeros((shape.n_head // group, n_work), np.int32)

    @property
    def n_bytes(self) -> int:
        """See SelectorState."""
        return 0 if self.codes is None else self.codes.n_bytes

    @property
    def counters(self) -> tuple[np.ndarray, ...]:
        """See SelectorState."""
        return () if self.codes is None else (self.codes.filled,)

    def record(
        self,
        rec: Recording,
        layer: int,
        q: np.ndarray,
        kv: KVView,
        *,
        cost: Cost,
        middle: dict[str, Any],
        counts: np.ndarray | None = None,
    ) -> None:
        """Record the scores of q f32 [n_head, head_dim]; middle: SCORE_KEYS's n_sink to drop.

        counts int32 [n_head_kv]: the number of first heads of each KV head that are scored; None:
        all. cost: of the keys.
        """
        shape, add = self._shape, rec.program.add
        heads = (shape.head_dim, shape.group, self._group)
        rest: dict[str, Any] = {
            "step": rec.step,
            "counts": counts,
            "scores": self._scores,
            "maxima": self._maxima,
            "n_head_kv": shape.n_head_kv,
            "capacity": self._scores.shape[1],
            **middle,
        }
        pages: dict[str, Any] = {"q": q, "k_pages": kv.k, "k_table": kv.k_table}
        if self.codes is None:
            add(ops.SCORE_KEYS, (*heads, kv.types[0]), cost=cost, **pages, **rest)
            return
        coded = self.codes.record(rec, layer, q, kv)
        add(ops.SCORE_CODES, heads, cost=_halved(cost), **rest | coded)
        add(
            ops.RESCORE_KEYS,
            (*heads, kv.types[0]),
            work=self._work,
            n_top=self._n_top,
            **pages,
            **rest,
        )

    def bracket(self, rec: Recording, layer: int, q: np.ndarray, sel: Selection) -> None:
        """See SelectorState."""
        if self.codes is not None and not self._shape.window[layer]:
            self.codes.bracket(rec, layer, q, sel)

    def bounds(self, layer: int, report: np.ndarray) -> list[Bound]:
        """See SelectorState."""
        if self.codes is None or self._shape.window[layer]:
            return []
        return self.codes.bounds(layer, report)

    def truncate(self, n_tokens: int) -> None:
        """Drop the state of positions from n_tokens on."""
        if self.codes is not None:
            self.codes.truncate(n_tokens)


def _halved(cost: Cost) -> Cost:
    """The cost with bytes instead of float16s."""

    def halved(n_tok: int, pos: int) -> tuple[int, int]:
        n_bytes, n_product = cost(n_tok, pos)
        return n_bytes // 2, n_product

    return halved
