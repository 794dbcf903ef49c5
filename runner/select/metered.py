"""Metered attention: any method at decode, with an estimate of what it left out, and a floor.

Decides: whether what `inner` chose is enough. Of each row of its Selection, `samples` positions are
drawn from those that it left out; their exact logits give, without bias, the sum of exponentials
that was dropped, and with the log-sum-exp of attention the share of attention that each head holds.
Where the estimate of a head is below `mass`, its row reads again: what was chosen, and units of
neighbouring positions from the best score on, as many as the samples ask for; every position where
that would be more than half of them. `mass=0` measures only.

The proposal is the same for every method: the scores of mean keys, of units of 16 positions or, in
long contexts, of as many that there are at most MOST_UNITS units; `even` of the chance is
equal shares, so that no sample stands for more than 1 / `even` of what a uniform one would. Random
numbers are a function of seed, position, layer and row: a run repeats to the bit.
Layers in which `inner` reads everything are left alone. Where it weighs samples itself (log
weights), its choice is attended once more without them.
State: mean keys, (d + 8) / unit bytes a key; `inner`'s.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection, zeros
from tamis.select.base import (
    BLOCK,
    DECODE,
    Attended,
    Recording,
    Selector,
    SelectorShape,
    SelectorState,
    WrapperState,
    check,
)
from tamis.select.meter import Meter

UNIT = 16
EVEN = 0.3  # what samples estimate best: see docs/methods/metered.md


@dataclass(frozen=True, slots=True)
class Metered:
    """inner: the method that selects. mass: the least retained mass of each head, by estimate."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)
    promise: ClassVar[tuple[str, ...]] = ("estimate", "mass")
    all_layers: ClassVar[bool] = True  # it cannot serve some layers only: see per_layer
    has_floor: ClassVar[bool] = True  # `mass`

    inner: Selector
    mass: float = 0.95
    samples: int = 128
    even: float = EVEN
    seed: int = 0

    def __post_init__(self) -> None:
        check(
            self,
            "0 <= mass <= 1",
            "16 <= samples <= 4096",
            "samples % 16 == 0",
            "0 < even <= 1",
        )

    def open(self, shape: SelectorShape) -> "_State":
        """The state of one sequence."""
        return _State(self, shape, self.inner.open(shape))


def drawn(
    left_out: np.ndarray, scores: np.ndarray, unit: int, uniforms: np.ndarray, share: float = EVEN
) -> tuple[np.ndarray, np.ndarray]:
    """Sampled positions of a row, and how many positions each stands for.

    left_out bool [n]: what the row's Selection lacks. scores f [n_unit]: of mean keys, in units of
    `unit` positions. uniforms f64 [n_sample]: random numbers below 1, one a sample; samples are
    drawn at even distances of the sums of the probabilities. share: `even`. If no more positions
    than samples are left out, all are taken, and the samples that remain stand for none.
    """
    positions, n_sample = np.flatnonzero(left_out), len(uniforms)
    n = len(positions)
    if n <= n_sample:
        last = positions[-1:] if n else np.zeros(1, np.int64)
        factors = np.repeat([1.0, 0.0], [n, n_sample - n])
        return np.concatenate([positions, np.repeat(last, n_sample - n)]), factors
    proposal = scores[positions // unit].astype(float)
    even = share if 0 < proposal.sum() < 1e30 else 1.0
    chance = np.full(n, even / n)
    if even < 1:
        chance += (1 - even) * proposal / proposal.sum()
    points = (np.arange(n_sample) + uniforms) / n_sample
    at = np.minimum(np.searchsorted(chance.cumsum(), points, side="right"), n - 1)
    return positions[at], 1 / (n_sample * chance[at])


def dropped(logits: np.ndarray, factors: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """What each sample says of the dropped mass, by the kept one, f64 [heads, n_sample].

    logits f64 [heads, n_sample]: exact ones of the samples; lse f64 [heads]: the log-sum-exp of
    attention. Of their sum x a head holds the share 1 / (1 + x).
    """
    weights: np.ndarray = np.exp(np.minimum(logits - lse[:, None], 60)) * factors
    return weights


def needed(mass: float, weights: np.ndarray, scores: np.ndarray, units: np.ndarray) -> float | None:
    """The bar that a row's units must reach to be read in addition; None if it needs none.

    weights: see `dropped`. scores f [n_unit]; units int [n_sample]: of the samples. Units
    are taken best first, until every head holds at least `mass` of its attention.
    """
    total = weights.sum(axis=1)
    if (1 / (1 + total) >= mass).all():
        return None
    order = np.argsort(-scores[units], kind="stable")
    for count in range(1, len(order) + 1):
        rest = total - weights[:, order[:count]].sum(axis=1)
        if (rest <= (1 - mass) * (1 + total) + 1e-9).all():
            break
    return float(scores[units[order[count - 1]]])


def reads_all(bar: float, scores: np.ndarray, left: np.ndarray, n: int) -> bool:
    """Whether a row reads all n positions: with the units that reach the bar, more than half.

    left int [n_unit]: the positions of each unit that the row's Selection lacks.
    """
    return bar <= 0 or bool(2 * (n - left.sum() + left[scores >= bar].sum()) > n)


class _State(WrapperState):
    """The inner state, and the ops that estimate what it left out."""

    def __init__(self, params: Metered, shape: SelectorShape, inner: SelectorState) -> None:
        super().__init__(shape, inner)
        self._params = params
        self.meter = Meter(shape.n_layer, shape.n_head)
        self.lse = np.zeros((1, shape.n_head), np.float32)
        self.unit = UNIT
        while shape.n_ctx > ops.MOST_UNITS * self.unit:
            self.unit *= 2
        self.n_unit = -(-shape.n_ctx // self.unit)
        self._room, _ = ops.hip_room(self.n_unit, self.n_unit)
        self._filled = np.zeros((shape.n_layer, shape.n_head_kv), np.int64)
        self.counters = (self._filled, *inner.counters)
        self._means: dict[int, dict[str, Any]] = {}  # by layer, made when first recorded
        self._sums = np.zeros((shape.n_head_kv, shape.head_dim), np.float32)
        # Scratch of one layer, shared by all with equally many rows and equal blocks.
        self._scratch: dict[int, dict[str, Any]] = {}
        self._wider: dict[tuple[int, int], Selection] = {}
        row = (1, shape.n_head, shape.head_dim)
        self._again = {name: np.zeros(row, np.float32) for name in ("wider", "dense", "plain")}
        self._again_lse = {name: np.zeros((1, shape.n_head), np.float32) for name in self._again}
        n_all = -(-shape.n_ctx // BLOCK)
        self._all = Selection(
            indptr=np.zeros(shape.n_head_kv + 1, np.int32),
            indices=np.tile(np.arange(n_all, dtype=np.int32), shape.n_head_kv),
            block=BLOCK,
            q_block=1,
            n_row=shape.n_head_kv,
        )
        self._asked: tuple[np.ndarray, KVView] | None = None  # of the layer being recorded

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        self._asked = q, kv
        return super().select_decode(rec, layer, q, kv)

    def also_attend(self, rec: Recording, layer: int, rows: Attended) -> Iterable[Attended]:
        yield from super().also_attend(rec, layer, rows)
        if not self.measures(rec, layer, rows.sel):
            return
        assert self._asked is not None
        assert rows.lse is not None
        q, kv = self._asked
        sel, lse = rows.sel, rows.lse
        if sel.log_weight is not None:
            sel, lse = sel._replace(log_weight=None), self._again_lse["plain"]
            yield Attended(rec.step, 1, sel, self._again["plain"], lse=lse)
        self._record_means(rec, layer, kv)
        self._record_samples(rec, layer, q, kv, sel, lse)
        if self._params.mass == 0:
            return
        wider = self._record_wider(rec, sel)
        for name, again in (("wider", wider), ("dense", self._all)):
            yield Attended(rec.step, 1, again, self._again[name], lse=self._again_lse[name])
        self._lse = rows.lse

    def correct(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection, out: np.ndarray
    ) -> None:
        super().correct(rec, layer, q, kv, sel, out)
        if self._params.mass == 0 or not self.measures(rec, layer, sel):
            return
        assert self.meter is not None
        rec.program.add(
            ops.METER_TAKE,
            (self.shape.head_dim,),
            needs=self._scratch[sel.n_row]["needs"],
            whole=self._all.indptr,
            wider=self._again["wider"],
            wider_lse=self._again_lse["wider"],
            dense=self._again["dense"],
            dense_lse=self._again_lse["dense"],
            out=out,
            lse=self._lse,
            report=self.meter.report[layer],
            n_row=sel.n_row,
            n_head=self.shape.n_head,
            n_head_kv=self.shape.n_head_kv,
        )

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        super().observe(rec, layer, q, kv, sel)
        if rec.n_tok > 1 and not self.shape.window[layer]:
            self._record_means(rec, layer, kv)

    def truncate(self, n_tokens: int) -> None:
        super().truncate(n_tokens)
        np.minimum(self._filled, n_tokens // self.unit, out=self._filled)

    def measures(self, rec: Recording, layer: int, sel: Selection) -> bool:
        """Whether a layer leaves anything out."""
        window = self.shape.window[layer]
        return rec.n_tok == 1 and not window and not self.reads_all(rec, layer, sel)

    def _record_means(self, rec: Recording, layer: int, kv: KVView) -> None:
        shape = self.shape
        if layer not in self._means:
            size = (shape.n_head_kv, self._room, shape.head_dim)
            self._means[layer] = {
                "means": zeros(size, np.uint8),
                "extents": zeros((shape.n_head_kv, self._room // 4, 2, 4), np.float32),
            }
        rec.program.add(
            ops.HIP_MEANS,
            (shape.head_dim, kv.types[0]),
            step=rec.step,
            k_pages=kv.k,
            k_table=kv.k_table,
            filled=self._filled[layer],
            sums=self._sums,
            n_head_kv=shape.n_head_kv,
            room=self._room,
            top=0,
            block=self.unit,
            **self._means[layer],
        )

    def sampled(self, n_row: int) -> dict[str, Any]:
        """The buffers of layers with n_row rows: of METER_SAMPLE, METER_WEIGH and what follows."""
        if n_row not in self._scratch:
            shape, n, n_unit = self.shape, self._params.samples, self.n_unit
            group = shape.n_head // n_row
            work = ops.meter_work(shape.head_dim, group, self._room)
            self._scratch[n_row] = {
                "left": np.zeros((n_row, n_unit), np.int32),
                "scores": np.zeros((n_row, n_unit), np.float32),
                "indptr": np.arange(n_row + 1, dtype=np.int32) * n,
                "indices": np.zeros((n_row, n), np.int32),
                "factors": np.zeros((n_row, n), np.float32),
                "work": zeros((n_row, work), np.float32),
                "weights": np.zeros((n_row, group, n + 1), np.float32),
                "rows": np.zeros((n_row, n + ops.LIST_PAD), np.int32),
                "tile": zeros((n_row, group, ops.TILE), np.float32),
                "units": np.zeros((n_row, n), np.int32),
                "order": np.zeros((n_row, n), np.int32),
                "needs": np.zeros(n_row, np.int32),
                "bars": np.zeros(n_row, np.float32),
            }
        return self._scratch[n_row]

    def _record_samples(
        self,
        rec: Recording,
        layer: int,
        q: np.ndarray,
        kv: KVView,
        sel: Selection,
        lse: np.ndarray,
    ) -> None:
        assert self.meter is not None
        p, shape, buffers = self._params, self.shape, self.sampled(sel.n_row)
        group, of_mean = shape.n_head // sel.n_row, shape.head_dim + 8
        both: dict[str, Any] = {
            "step": rec.step,
            "q": q,
            "lse": lse,
            "n_row": sel.n_row,
            "heads_per_kv": shape.group,
            "n_head_kv": shape.n_head_kv,
            "unit": self.unit,
            "n_unit": self.n_unit,
            "n_sample": p.samples,
            "scale": shape.scale,
        }
        names = ("left", "scores", "indices", "factors")
        both |= {name: buffers[name] for name in names}
        rec.program.add(
            ops.METER_SAMPLE,
            (shape.head_dim, group),
            cost=lambda n_tok, pos: (sel.n_row * of_mean * (pos // self.unit), 0),
            chosen=sel.indptr,
            blocks=sel.indices,
            block=sel.block,
            work=buffers["work"],
            room=self._room,
            layer=layer,
            seed=p.seed,
            even=p.even,
            **self._means[layer],
            **both,
        )
        key_bytes = kv.k[0, 0, 0].nbytes
        more = ("indptr", "weights", "rows", "tile", "units", "order", "needs", "bars")
        rec.program.add(
            ops.METER_WEIGH,
            (shape.head_dim, group, 1, kv.types[0]),
            cost=lambda n_tok, pos: (sel.n_row * p.samples * key_bytes, 0),
            k_pages=kv.k,
            k_table=kv.k_table,
            report=self.meter.report[layer],
            block=1,
            window=0,
            stride=1,
            least=p.mass,
            **{name: buffers[name] for name in more},
            **both,
        )

    def _record_wider(self, rec: Recording, sel: Selection) -> Selection:
        """Record what is read additionally; returns the Selection of rows that need more."""
        shape, buffers = self.shape, self.sampled(sel.n_row)
        grain = math.gcd(sel.block, self.unit)
        if (sel.n_row, grain) not in self._wider:
            self._wider[sel.n_row, grain] = Selection(
                indptr=np.zeros(sel.n_row + 1, np.int32),
                indices=np.zeros(sel.n_row * -(-shape.n_ctx // grain), np.int32),
                block=grain,
                q_block=1,
                n_row=sel.n_row,
            )
        wider = self._wider[sel.n_row, grain]
        rec.program.add(
            ops.METER_WIDEN,
            step=rec.step,
            chosen=sel.indptr,
            blocks=sel.indices,
            indptr=wider.indptr,
            indices=wider.indices,
            whole=self._all.indptr,
            n_row=sel.n_row,
            n_head_kv=shape.n_head_kv,
            block=sel.block,
            grain=grain,
            unit=self.unit,
            n_unit=self.n_unit,
            n_all=len(self._all.indices) // shape.n_head_kv,
            **{name: buffers[name] for name in ("left", "scores", "needs", "bars")},
        )
        return wider


METHOD = Metered
