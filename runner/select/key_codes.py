"""Scores of all keys by a copy of them in fewer bits, where a method's state keeps one.

On a CPU these are int8 codes of 16 keys interleaved, minus a centre, with one step size per key
(contract/ops/select/key_codes.py); on a GPU codes of 4 or 8 bits, a key after the other
(key_copy.py there). A decode step codes the keys that are missing, at first all of a prompt's, so
that a copied, loaded, truncated or re-rotated sequence needs nothing else.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops import AUDIT
from tamis.jit_kernels.contract.program import Cost
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.select.base import ALL_KEYS, SPAN, Bound, Recording, SelectorShape

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


class KeyCopy:
    """A GPU's copy of all layers' keys, in shape.key_copy bits, and each row's candidates by it."""

    def __init__(self, shape: SelectorShape, n_row: int) -> None:
        self._shape, self._n_ctx = shape, -(-shape.n_ctx // SPAN) * SPAN
        self._coded: dict[int, dict[str, Any]] = {}  # by layer, made when first recorded
        self.filled = np.zeros((shape.n_layer, shape.n_head_kv), np.int64)  # positions copied
        self.candidates: dict[str, Any] = {
            "found": zeros((n_row, self._n_ctx), np.int32),
            "exact": zeros((n_row, self._n_ctx), np.float32),
            "n_found": np.zeros(n_row, np.int32),
        }

    @property
    def key_bytes(self) -> int:
        """Bytes of a key's codes and its step size."""
        return ops.copy_bytes(self._shape.head_dim, self._shape.key_copy) + 2

    @property
    def n_bytes(self) -> int:
        """Bytes of the copy at n_ctx tokens, for layers that may read all."""
        n_full = sum(not window for window in self._shape.window)
        return n_full * self._shape.n_head_kv * self.key_bytes * self._n_ctx

    def _of(self, layer: int) -> dict[str, Any]:
        n_kv, head_dim, n_ctx = self._shape.n_head_kv, self._shape.head_dim, self._n_ctx
        if layer not in self._coded:
            self._coded[layer] = {
                "codes": zeros((n_kv, n_ctx, self.key_bytes - 2), np.uint8),
                "steps": zeros((n_kv, n_ctx), np.float16),
                "centre": zeros((n_kv, head_dim), np.float32),
                "spread": zeros((n_kv, head_dim), np.float32),
            }
        return self._coded[layer]

    def record(
        self, rec: Recording, layer: int, heads: tuple[int, ...], cost: Cost, fields: dict[str, Any]
    ) -> None:
        """Record the scores, with the copy of missing keys, and the candidates.

        heads: head_dim, group, and the heads of a row; fields: q, counts, pages, scores, maxima and
        the middle; n_top only of the candidates. cost: of keys of float16.
        """
        n_top, type_k = fields.pop("n_top"), fields.pop("type_k")
        fields = {"step": rec.step, "filled": self.filled[layer], **fields}
        rec.program.add(
            ops.SCORE_COPY,
            (*heads, type_k, self._shape.key_copy),
            cost=_scaled(cost, self.key_bytes / (2 * self._shape.head_dim)),
            n_found=self.candidates["n_found"],
            **fields,
            **self._of(layer),
        )
        rec.program.add(
            ops.COPY_CANDIDATES, (*heads, type_k), n_top=n_top, **fields, **self.candidates
        )


class KeyScores:
    """Records scores of all keys, f32 [n_head, capacity], and their maxima: see ops.SCORE_KEYS.

    The score of `group` heads is their maximum. The best n_top of a row are selected by exact
    scores, in nearly all cases: see ops.RESCORE_KEYS, and ops.COPY_CANDIDATES for a GPU.
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
        self.codes = KeyCodes(shape) if shape.key_copy and not shape.on_gpu else None
        self.copy = None
        if shape.key_copy and shape.on_gpu:
            self.copy = KeyCopy(shape, shape.n_head // group)
        if self.codes is not None:
            n_work = ops.rescore_work(n_ctx, group)
            self._work = zeros((shape.n_head // group, n_work), np.int32)

    @property
    def _kept(self) -> KeyCodes | KeyCopy | None:
        return self.codes or self.copy

    @property
    def n_bytes(self) -> int:
        """See SelectorState."""
        return 0 if self._kept is None else self._kept.n_bytes

    @property
    def counters(self) -> tuple[np.ndarray, ...]:
        """See SelectorState."""
        return () if self._kept is None else (self._kept.filled,)

    @property
    def candidates(self) -> Mapping[str, Any]:
        """The fields of an op that chooses the best: positions with exact scores, None for all."""
        return ALL_KEYS if self.copy is None else self.copy.candidates

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
        if self.copy is not None:
            pages["q"] = q if q.ndim == 2 else q[:1]  # a chunk's buffer has room for more rows
            given = {"n_top": self._n_top, "type_k": kv.types[0], **pages, **rest}
            self.copy.record(rec, layer, heads, cost, given)
            return
        if self.codes is None:
            add(ops.SCORE_KEYS, (*heads, kv.types[0]), cost=cost, **pages, **rest)
            return
        coded = self.codes.record(rec, layer, q, kv)
        add(ops.SCORE_CODES, heads, cost=_scaled(cost, 1 / 2), **rest | coded)
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
        if self._kept is not None:
            np.minimum(self._kept.filled, n_tokens, out=self._kept.filled)


def _scaled(cost: Cost, part: float) -> Cost:
    """The cost with so much of the bytes, as of keys of fewer bits."""

    def scaled(n_tok: int, pos: int) -> tuple[int, int]:
        n_bytes, n_product = cost(n_tok, pos)
        return int(n_bytes * part), n_product

    return scaled
