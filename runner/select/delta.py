"""Delta attention: exact rows correct their sparse neighbours (Willette et al. 2025, 2505.11254).

Decides nothing itself: over any prefill method, every `gamma`-th row of a prompt is also attended
densely, and what that changes is added to the rows up to the next one:

    out_i = sparse_i + (dense_g - sparse_g),  g = floor(i / gamma) * gamma        (Eq. 6-7, Alg. 1)

The difference stands for what the method dropped: |Delta - sum of dropped a_i v_i| is at most
H / (H + T) * max |v| of the kept, with H and T the dropped and kept sums of exponentials (Lemma 1),
and changes slowly from row to row. The last `gamma` rows of a prompt are dense (appendix C), for
decoding reads them most. `mode="recompute"` (Eq. 5) replaces the exact rows and corrects no other.

Rows are counted from the first of the prompt, however it is cut into chunks; the dense rows of a
chunk are one pass over the keys. Layers in which the inner method reads everything stay as they
are, and a layer's own sliding window bounds its dense rows too.
State: the last difference of each layer, for the next chunk.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.select.base import (
    PREFILL,
    Attended,
    Recording,
    Selector,
    SelectorShape,
    SelectorState,
    check,
    full_selection,
)

MODES = ("delta", "recompute")
N_SPLIT = 16  # the parts that the keys of exact rows are split into


@dataclass(frozen=True, slots=True)
class Delta:
    """inner: the method to correct. gamma: rows from one exact row to the next."""

    roles: ClassVar[tuple[str, ...]] = (PREFILL,)

    inner: Selector
    gamma: int = 64
    mode: str = "delta"

    def __post_init__(self) -> None:
        check(
            self,
            "gamma >= 1",
            f"mode in {MODES}",
        )

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def corrected(p: Delta, sparse: np.ndarray, dense: np.ndarray) -> np.ndarray:
    """The output of a prompt's rows, f64 [n, ..]: Alg. 1 and appendix C, from both attentions."""
    out, n = sparse.astype(float), len(sparse)
    for i in range(n):
        g = i // p.gamma * p.gamma  # the last exact row
        if i == g or i >= n - p.gamma:
            out[i] = dense[i]
        elif p.mode == "delta":
            out[i] = sparse[i] + (dense[g] - sparse[g])  # Eq. 6 and 7
    return out


class _State(SelectorState):
    def __init__(self, params: Delta, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params = params
        self._inner = params.inner.open(shape)
        self.freezing = self._inner.freezing
        row = (shape.n_head, shape.head_dim)
        self._delta = np.zeros((shape.n_layer, *row), np.float32)
        self._delta_pos = np.full((shape.n_layer, shape.n_head), -1, np.int64)
        self.counters = (self._delta_pos, *self._inner.counters)
        # Scratch of one layer, shared by all.
        self._apart, self._last = np.zeros((2, ops.STEP_SIZE), np.int64)
        self._apart_out = np.zeros((-(-shape.n_ubatch // params.gamma), *row), np.float32)
        self._last_out = np.zeros((min(params.gamma, shape.n_ubatch), *row), np.float32)
        n_row = max(len(self._apart_out), len(self._last_out))
        self._partial = zeros((n_row, shape.n_head, N_SPLIT, shape.head_dim + 2), np.float32)
        # the Program that has the op which finds a chunk's rows
        self._program: Program | None = None

    def select_prefill(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        return self._inner.select_prefill(rec, layer, q, kv)

    def also_attend(self, rec: Recording, layer: int, rows: Attended) -> list[Attended]:
        if self._inner.reads_all(rec, layer, rows.sel):
            return []
        if self._program is not rec.program:
            self._program = rec.program
            rec.program.add(
                ops.DELTA_ROWS,
                step=rec.step,
                apart=self._apart,
                last=self._last,
                gamma=self._params.gamma,
            )
        return [
            Attended(
                step, stride, full_selection(self.shape, len(out), rec.q_block), out, self._partial
            )
            for step, stride, out in (
                (self._apart, self._params.gamma, self._apart_out),
                (self._last, 1, self._last_out),
            )
        ]

    def correct(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection, out: np.ndarray
    ) -> None:
        self._inner.correct(rec, layer, q, kv, sel, out)
        if self._inner.reads_all(rec, layer, sel):
            return
        rec.program.add(
            ops.DELTA_ADD,
            (self.shape.head_dim,),
            step=rec.step,
            apart=self._apart,
            last=self._last,
            apart_out=self._apart_out,
            last_out=self._last_out,
            delta=self._delta[layer],
            delta_pos=self._delta_pos[layer],
            out=out,
            gamma=self._params.gamma,
            recompute=MODES.index(self._params.mode),
        )

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        self._inner.observe(rec, layer, q, kv, sel)

    def frozen(self, layer: int, n_prompt: int) -> range:
        return self._inner.frozen(layer, n_prompt)

    def prompt_phase(self, pos: int) -> str:
        return self._inner.prompt_phase(pos)

    def truncate(self, n_tokens: int) -> None:
        self._inner.truncate(n_tokens)
        self._delta_pos[...] = -1


METHOD = Delta
