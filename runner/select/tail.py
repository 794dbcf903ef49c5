"""The tail counted: any method at decode, with samples of what it left out in its output.

vAttention, verified sparse attention (Desai et al. 2025, arXiv 2510.05688). Decides: how many of
the n positions outside the Selection I of `inner` are sampled, and what the samples add. With b
samples J, position j drawn with chance p_j (uniform: b / n), the output is
  N / D,  N = sum_I e^(q.k) v + sum_J e^(q.k) v / p,  D = sum_I e^(q.k) + sum_J e^(q.k) / p:
one softmax in which a sample has the log weight -log p; N and D are without bias. From `samples`
first samples the paper's theorem takes the size of J: the sum of b independent draws of population
covariance C errs by more than T with chance delta at most, if
  b >= (z n sqrt(tr C) / T)^2,  z = the normal distribution's quantile at 1 - delta / 2.
`bound` says what errs by less than `epsilon` of its size in all but `delta` of the heads and steps:
  "denominator": D, the paper's verified-D, as in its experiments;
  "parts": the output, as the paper proves it: N and D each by e' = epsilon / (2 + epsilon), with
    half of delta, since their quotient then errs by at most 2 e' / (1 - e') = epsilon;
  "output", a departure: the output by its own linear error, sum_J e^(q.k) (v - o) / (p D). What the
    values have in common cancels: a quarter to a fifth of the samples of "parts" for the same
    promise.
The theorem is the central limit theorem's, with the covariance that the first samples have.
A row whose heads need more than `most` of the positions left out reads all of them: then its output
is dense attention's.

Departures: the samples of a row serve all its heads, as many as the neediest head asks for. They
are drawn anew, not added to the first ones, so that their number says nothing about them. They are
systematic samples (equal distances from a random start), which never repeat a position.
`even` below 1 mixes the uniform chances with the scores of mean keys of `metered`, which draws and
weighs the first samples; it needs a tenth to a quarter fewer samples, but a heavy key among light
ones is missed more often.
Layers in which `inner` reads everything are left alone. State: `metered`'s.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import (
    DECODE,
    Attended,
    Bound,
    Recording,
    Selector,
    SelectorShape,
    SelectorState,
    WrapperState,
    check,
)
from tamis.select.metered import Metered

BOUNDS = ("output", "parts", "denominator")  # by ops.OUTPUT, ops.PARTS, ops.DENOMINATOR


@dataclass(frozen=True, slots=True)
class Tail:
    """inner: the method that selects. epsilon, delta: error of a head, and how often it is more."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)
    promise: ClassVar[tuple[str, ...]] = ("epsilon-delta", "epsilon", "delta", "bound")
    all_layers: ClassVar[bool] = True

    inner: Selector
    epsilon: float = 0.1
    delta: float = 0.1
    bound: str = "output"
    samples: int = 128
    even: float = 1.0
    most: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        check(
            self,
            "0 < epsilon <= 1",
            "0 < delta < 1",
            f"bound in {BOUNDS}",
            "16 <= samples <= 4096",
            "samples % 16 == 0",
            "0 < even <= 1",
            "0 <= most <= 1",
        )

    @property
    def asked(self) -> tuple[float, float]:
        """The relative error and the normal quantile that a sample size is computed for."""
        if self.bound == "parts":
            return self.epsilon / (2 + self.epsilon), NormalDist().inv_cdf(1 - self.delta / 4)
        return self.epsilon, NormalDist().inv_cdf(1 - self.delta / 2)

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


def sample_size(p: Tail, weights: np.ndarray, values: np.ndarray, kept: np.ndarray) -> float:
    """The samples that a head asks for.

    weights f64 [n]: of the first samples, e^(q.k) / chance by the kept sum of e^(q.k), see
    metered.dropped; values f64 [n, head_dim]; kept f64 [head_dim]: the output of what was kept.
    """
    epsilon, z = p.asked
    n, total = len(weights), weights.sum()
    y = n * weights / (1 + total)  # one sample's estimate of the share of D that is left out
    o = kept / (1 + total) + (y[:, None] * values).mean(axis=0)
    scaled = (z / epsilon) ** 2

    def spread(x: np.ndarray) -> float:
        return float(x.var(axis=0, ddof=1).sum())

    if p.bound == "output":
        return scaled * spread(y[:, None] * (values - o)) / float(o @ o)
    of_denominator = scaled * spread(y[:, None])
    if p.bound == "denominator":
        return of_denominator
    return max(of_denominator, scaled * spread(y[:, None] * values) / float(o @ o))


def need_of(p: Tail, sizes: np.ndarray, n_left: int) -> int:
    """The samples of a row whose heads ask for `sizes`, or ops.READ_ALL."""
    most = sizes.max() if np.isfinite(sizes).all() else np.inf
    if n_left <= p.samples or most > p.most * n_left:
        return ops.READ_ALL
    return max(p.samples, int(np.ceil(most)))


def random_number(*words: int) -> float:
    """The random number of four words, 0 <= u < 1, a multiple of 2^-32."""
    x, word = 0x9E3779B9, 0xFFFFFFFF
    for each in words:
        x = (x + each) & word
        x = (x ^ x >> 16) * 0x45D9F3B & word
        x = (x ^ x >> 16) * 0x45D9F3B & word
    return (x ^ x >> 16) * 2.0**-32


def chances(p: Tail, need: int, left: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """The chance of a position left out of each unit, f64 [n_unit].

    left int [n_unit]: positions left out of each unit; scores f [n_unit]: of their mean keys.
    """
    if need == ops.READ_ALL:
        return np.ones(len(left))
    total = float(left @ scores.astype(float))
    even = p.even if 0 < total < 1e30 else 1.0
    chance = np.full(len(left), need * even / max(1, left.sum()))
    if even < 1:
        chance += need * (1 - even) / total * scores
    return np.minimum(1, chance)


def sampled(
    left_out: np.ndarray, chance: np.ndarray, unit: int, start: float, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The sampled positions of a row, ascending, and their log weights.

    left_out bool [n]; chance f64 [n_unit]; start, starts [n_unit]: random numbers below 1, of the
    row and of its units.
    """
    positions, log_weights, run, before = [], [], start, 0
    for u, each in enumerate(chance):
        omitted = u * unit + np.flatnonzero(left_out[u * unit : (u + 1) * unit])
        count = len(omitted)
        if each < 1:
            run += each * len(omitted)
            count, before = min(count, int(run) - before), int(run)
        at = ((np.arange(count) + starts[u]) * len(omitted) / max(1, count)).astype(int)
        positions.append(omitted[np.minimum(at, len(omitted) - 1)] if count else omitted[:0])
        log_weights.append(np.full(count, -np.log(each)))
    return np.concatenate(positions), np.concatenate(log_weights)


class _State(WrapperState):
    """The metered state, and what is sampled after it has measured."""

    def __init__(self, params: Tail, shape: SelectorShape) -> None:
        first = Metered(
            params.inner, mass=0, samples=params.samples, seed=params.seed, even=params.even
        )
        self._params, self._metered = params, first.open(shape)
        super().__init__(shape, self._metered)
        if self.estimates:
            raise ValueError(
                f"tail({type(params.inner).__name__}): expected a method that does not estimate "
                "what it leaves out itself, such as topk"
            )
        self.meter, self.lse = self._metered.meter, self._metered.lse
        # Scratch of one layer, shared by all with equally many rows.
        self._scratch: dict[int, dict[str, Any]] = {}
        self._sampled: dict[int, Selection] = {}
        self._out = np.zeros((1, shape.n_head, shape.head_dim), np.float32)
        self._out_lse = np.zeros((1, shape.n_head), np.float32)
        self._kept: tuple[np.ndarray, np.ndarray] | None = None  # of the layer being recorded

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        self._kv = kv
        return super().select_decode(rec, layer, q, kv)

    def also_attend(self, rec: Recording, layer: int, rows: Attended) -> Iterable[Attended]:
        kept = rows
        for more in super().also_attend(rec, layer, rows):
            kept = more  # of a choice with log weights: the same without them
            yield more
        if not self._metered.measures(rec, layer, rows.sel):
            return
        assert kept.lse is not None
        assert rows.lse is not None
        self._kept, self._lse = (kept.out, kept.lse), rows.lse
        sel = self._record_samples(rec, layer, kept)
        yield Attended(rec.step, 1, sel, self._out, lse=self._out_lse)

    def correct(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection, out: np.ndarray
    ) -> None:
        super().correct(rec, layer, q, kv, sel, out)
        if not self._metered.measures(rec, layer, sel):
            return
        assert self._kept is not None
        rec.program.add(
            ops.TAIL_MERGE,
            kept=self._kept[0],
            kept_lse=self._kept[1],
            sampled=self._out,
            sampled_lse=self._out_lse,
            out=out,
            lse=self._lse,
        )

    def bounds(self, layer: int, report: np.ndarray) -> list[Bound]:
        return []  # the inner method's are of the output without the samples

    def _rows(self, n_row: int) -> dict[str, Any]:
        """Buffers of n_row rows."""
        if n_row not in self._scratch:
            shape, n_unit = self.shape, self._metered.n_unit
            group = shape.n_head // n_row
            size = (2 * group + 1) * shape.head_dim + 2 * group
            self._scratch[n_row] = {
                "work": np.zeros((n_row, size), np.float32),
                "needs": np.zeros(n_row, np.int32),
                "rates": np.zeros((n_row, 2), np.float32),
                "starts": np.zeros((n_row, n_unit + 1), np.int32),
            }
            self._sampled[n_row] = Selection(
                indptr=np.zeros(n_row + 1, np.int32),
                indices=np.zeros(n_row * shape.n_ctx, np.int32),
                block=1,
                q_block=1,
                n_row=n_row,
                log_weight=np.zeros(n_row * shape.n_ctx, np.float32),
            )
        return self._scratch[n_row]

    def _record_samples(self, rec: Recording, layer: int, kept: Attended) -> Selection:
        """Record how many samples rows need, and which; returns their Selection."""
        p, sel, n_row = self._params, kept.sel, kept.sel.n_row
        scratch, first = self._rows(n_row), self._metered.sampled(n_row)
        unit = self._metered.unit
        seed: dict[str, Any] = {"layer": layer, "seed": p.seed}
        self._record_size(rec, layer, kept, scratch, first)
        units = {"needs": scratch["needs"], "left": first["left"], "scores": first["scores"]}
        units |= {"step": rec.step, "rates": scratch["rates"], "starts": scratch["starts"]}
        rec.program.add(ops.TAIL_PLAN, unit=unit, even=p.even, **units, **seed)
        chosen = self._sampled[n_row]
        rec.program.add(
            ops.TAIL_DRAW,
            chosen=sel.indptr,
            blocks=sel.indices,
            indptr=chosen.indptr,
            indices=chosen.indices,
            log_weight=chosen.log_weight,
            block=sel.block,
            unit=unit,
            **units,
            **seed,
        )
        return chosen

    def _record_size(
        self,
        rec: Recording,
        layer: int,
        kept: Attended,
        scratch: dict[str, Any],
        first: dict[str, Any],
    ) -> None:
        assert self.meter is not None
        p, shape, kv, n_row = self._params, self.shape, self._kv, kept.sel.n_row
        epsilon, z = p.asked
        value_bytes = kv.v[0, 0, 0].nbytes
        rec.program.add(
            ops.TAIL_SIZE,
            (shape.head_dim, shape.n_head // n_row, *kv.types),
            cost=lambda n_tok, pos: (n_row * p.samples * value_bytes, 0),
            step=rec.step,
            k_pages=kv.k,
            v_pages=kv.v,
            k_table=kv.k_table,
            v_table=kv.v_table,
            kept=kept.out,
            report=self.meter.report[layer],
            n_row=n_row,
            n_sample=p.samples,
            heads_per_kv=shape.group,
            n_head_kv=shape.n_head_kv,
            block=1,
            window=0,
            stride=1,
            unit=self._metered.unit,
            bounded=BOUNDS.index(p.bound),
            epsilon=epsilon,
            z=z,
            most=p.most,
            work=scratch["work"],
            needs=scratch["needs"],
            **{name: first[name] for name in ("indptr", "indices", "weights", "left")},
        )


METHOD = Tail
