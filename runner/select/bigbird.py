"""BigBird: global tokens, a window and random blocks (Zaheer et al. 2020, arXiv 2007.14062).

Decides: the blocks of the first `sink` positions, those of the last `recent` before each query, and
`random` positions in whole blocks of those between (the paper's section 2: global, window and
random attention), drawn by `seed`, layer, KV head and the query's own block: the queries of a block
read the same. It reads no keys to decide.

Departures. Attention is causal: global tokens are read by all later queries, and do not attend to
later tokens themselves. If a prompt's row of queries straddles blocks, its first query determines
the draw. Defaults are the paper's: blocks of 64, of which 2 are global, 3 in the window and 3
random. No state. Layers with a sliding window of their own are not changed.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    DECODE,
    PREFILL,
    Recording,
    SelectorShape,
    SelectorState,
    check,
    new_selection,
)


@dataclass(frozen=True, slots=True)
class BigBird:
    """sink, recent, random: tokens of each kind that a query reads, in blocks of `block`."""

    roles: ClassVar[tuple[str, ...]] = (DECODE, PREFILL)

    block: int = 64
    sink: int = 128
    recent: int = 192
    random: int = 192
    seed: int = 0

    def __post_init__(self) -> None:
        check(
            self,
            "block >= 1",
            "recent >= 1",
            "sink >= 0",
            "random >= 0",
        )

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def following(state: int) -> int:
    """The next state of Knuth's 64-bit linear congruential generator (MMIX)."""
    return (state * 6364136223846793005 + 1442695040888963407) % 2**64


def draw(n: int, population: range, key: int) -> list[int]:
    """A uniform sample of n of a range, ascending: Knuth's algorithm S."""
    drawn: list[int] = []
    state = following(following(key))  # neighbouring keys differ little, their states do
    for i in population:
        state = following(state)
        if (state >> 33) % (population.stop - i) < n - len(drawn):
            drawn.append(i)
    return drawn


def draw_key(seed: int, n_head_kv: int, head: int, at: int) -> int:
    """The key of a KV head's draw at `at`, a block or position; seed: one of the layer."""
    return (seed * n_head_kv + head) * 1048583 + at


def chosen(p: BigBird, queries: range, seed: int, n_head_kv: int, head: int) -> list[int]:
    """The blocks that neighbouring queries read: global ones, random ones, a window (section 2)."""
    low = max(0, queries[0] - p.recent + 1) // p.block  # the first block of the window
    n_sink = min(low, -(-p.sink // p.block))
    n_random = min(-(-p.random // p.block), low - n_sink)
    key = draw_key(seed, n_head_kv, head, queries[0] // p.block)
    random = draw(n_random, range(n_sink, low), key)
    return [*range(n_sink), *random, *range(low, queries[-1] // p.block + 1)]


class _State(SelectorState):
    def __init__(self, params: BigBird, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params = params

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        p, shape = self._params, self.shape
        if shape.window[layer]:
            return super().select_decode(rec, layer, q, kv)
        sel = new_selection(shape, rec, n_row=shape.n_head_kv, block=p.block)
        rec.program.add(
            ops.BIGBIRD_SELECT,
            step=rec.step,
            indptr=sel.indptr,
            indices=sel.indices,
            n_row=shape.n_head_kv,
            q_block=rec.q_block,
            block=p.block,
            n_sink=-(-p.sink // p.block),
            n_recent=p.recent,
            n_random=-(-p.random // p.block),
            seed=p.seed * shape.n_layer + layer,
        )
        return sel

    select_prefill = select_decode


METHOD = BigBird
