"""A decode method as one function of NumPy arrays: slow, but enough to try an idea.

Before each layer's attention the interpreter stops the Program, gathers the layer's keys from their
pages and calls the function. That costs as much as reading all keys, in Python; a kernel of the
method would read only what it needs. It runs on the CPU with f16 keys; several sequences are not
batched.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import PAGE, KVView, Selection
from tamis.select.base import BLOCK, DECODE, Recording, SelectorShape, SelectorState, new_selection

Choose = Callable[[np.ndarray, np.ndarray], Any]


class NumpySelector:
    """A method given by a function `scores(q, k) -> indices`.

    scores receives f32 q [n_head, head_dim], rotated, and f32 k [n_kv, n_head_kv, head_dim], the
    keys of all positions so far; the query's own is the last. It returns the positions to attend
    to, integers [n] for all heads, or a sequence of n_head_kv or n_head such arrays; in any order.
    What it raises becomes a ValueError that names its line and the shapes.
    Pass it to `Engine.session(attn=...)`. Layers with a sliding window of their own are left to
    that.
    """

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    def __init__(self, scores: Choose) -> None:
        if not callable(scores):
            raise TypeError(f"scores is {scores!r}, expected a function of q and k: see the class")
        self.scores = scores

    def __repr__(self) -> str:
        name = getattr(self.scores, "__qualname__", type(self.scores).__qualname__)
        return f"NumpySelector({name})"

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self.scores, shape)


class _State(SelectorState):
    def __init__(self, scores: Choose, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._scores = scores

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        if self.shape.window[layer]:
            return super().select_decode(rec, layer, q, kv)
        if kv.types[0] != "f16":
            raise ValueError(f"NumpySelector reads f16 keys, this cache has {kv.types[0]}")
        sel = new_selection(self.shape, rec, n_row=self.shape.n_head, block=1)

        def choose() -> None:
            n_kv = int(rec.step[1]) + 1
            rows = self._rows(self._called(q[0].copy(), _keys(kv, n_kv)), n_kv)
            sel.indptr[1:] = np.cumsum([len(row) for row in rows])
            sel.indices[: sel.indptr[-1]] = np.concatenate(rows)

        rec.program.pause(choose)
        self._count(rec, kv)
        return sel

    def _count(self, rec: Recording, kv: KVView) -> None:
        """Record an op that does next to nothing, to which the function is counted.

        Its part of a pass is the selection's, and its cost all keys, which the function gets.
        """
        n_head_kv, n_head, head_dim = kv.k.shape[1], self.shape.n_head, kv.k.shape[3]
        row_bytes, row_products = 2 * n_head_kv * head_dim, 2 * n_head * head_dim
        spare = new_selection(self.shape, rec, n_row=1, block=BLOCK)
        rec.program.add(
            ops.SELECT_WINDOW,
            label="numpy",
            cost=lambda n_tok, pos: ((pos + 1) * row_bytes, (pos + 1) * row_products),
            step=rec.step,
            indptr=spare.indptr,
            indices=spare.indices,
            n_row=1,
            q_block=rec.q_block,
            block=BLOCK,
            n_sink=0,
            n_recent=1,
        )

    def _called(self, q: np.ndarray, k: np.ndarray) -> Any:
        """What the function gives. Raises ValueError with the place of an error in it."""
        try:
            return self._scores(q, k)
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)[1:]
            inside = [frame for frame in frames if frame.filename == frames[0].filename]
            where = f"{inside[-1].filename}:{inside[-1].lineno}" if inside else repr(self._scores)
            raise ValueError(
                f"{where}: {type(error).__name__}: {error}; it was called with q {list(q.shape)} "
                f"[n_head, head_dim] and k {list(k.shape)} [n_kv, n_head_kv, head_dim]"
            ) from error

    def _rows(self, result: Any, n_kv: int) -> list[np.ndarray]:
        """Positions of each query head, ascending. Raises ValueError for a malformed result."""
        n_head, n_head_kv = self.shape.n_head, self.shape.n_head_kv
        one = isinstance(result, np.ndarray) and result.ndim == 1
        sets = [result] if one or _is_numbers(result) else list(result)
        if len(sets) not in (1, n_head_kv, n_head):
            raise ValueError(
                f"scores gave {len(sets)} sets of positions, expected one, {n_head_kv} (KV heads) "
                f"or {n_head} (heads)"
            )
        rows = [np.unique(np.asarray(row)) for row in sets]
        for row in rows:
            if not len(row) or row.dtype.kind not in "iu" or row[0] < 0 or row[-1] >= n_kv:
                raise ValueError(
                    f"scores gave {row[:8].tolist()}, expected whole numbers from 0 to {n_kv - 1}, "
                    "at least one"
                )
        return [rows[i * len(rows) // n_head].astype(np.int32) for i in range(n_head)]


def _is_numbers(result: Any) -> bool:
    return isinstance(result, Sequence) and all(isinstance(i, int | np.integer) for i in result)


def _keys(kv: KVView, n_kv: int) -> np.ndarray:
    """Keys of positions 0 .. n_kv - 1, f32 [n_kv, n_head_kv, head_dim]."""
    pages = kv.k[kv.k_table[: -(-n_kv // PAGE)]]  # [n_page, n_head_kv, PAGE, head_dim]
    keys: np.ndarray = pages.swapaxes(1, 2).reshape(-1, pages.shape[1], pages.shape[3])[:n_kv]
    return keys.astype(np.float32)
