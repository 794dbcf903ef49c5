"""The audit: on every N-th decode step, dense attention is computed and compared.

An audited step replays a Program of its own: the decode Program with one more op per layer. It
costs a few times as much as dense attention on those steps, nothing on others.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops import AUDIT
from tamis.jit_kernels.contract.ops.select.metered import METER
from tamis.jit_kernels.contract.program import ATTEND, SELECT, KernelSpec, Program
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.kv.types import KVTypes
from tamis.model.hparams import HParams
from tamis.select.base import Recording, SelectorState

LOW_MASS = 0.9  # of a head: estimates must detect a mass below it


class AuditError(RuntimeError):
    """A guaranteed bound was violated: the message names it, the position, and both numbers."""


class Findings(NamedTuple):
    """Means over audited steps and heads. Weights are dense attention's, which sum to 1."""

    layer: int | None  # None: all layers
    head_kv: int | None  # the KV head of these query heads; None: all heads
    n_step: int
    n_seen: float  # tokens that dense attention reads
    n_kept: float  # tokens that a query head attends to
    mass: float  # the sum of their weights
    mass_p5: float  # the fifth percentile of mass
    best_mass: float  # the sum of as many of the largest weights
    recall: float  # the share of those best tokens that is read
    error: float  # |out - dense| / |dense|


class BoundFindings(NamedTuple):
    """The tightness of a paper's bound over all audited steps, layers and heads."""

    name: str
    measured: float  # mean
    allowed: float  # mean
    tightest: float  # the largest measured / (allowed + rounding); at 1 it meets the bound
    holds_always: bool  # True: a violation is an error; False: it is only reported


class EstimateFindings(NamedTuple):
    """The accuracy of estimated retained mass, over audited steps, layers and heads."""

    n: int  # the number of (step, layer, head)
    mass: float  # estimated, mean
    exact: float  # mean
    error: float  # the mean of |estimated - exact|
    low: float  # the share of heads that retain less than LOW_MASS
    caught: float  # the share of those whose estimate is below it, too; 1 if there are none
    false_alarms: float  # the share of the others whose estimate is below it


class Queries(NamedTuple):
    """The queries and the output of a layer's attention: f32 [n_tok, n_head, head_dim] each."""

    layer: int
    q: np.ndarray
    out: np.ndarray
    lse: np.ndarray | None = None  # f32 [n_tok, n_head], if an op reads it: see Rows


class Audit:
    """The samples of one session's audited steps; every: each how manyth step is one, 0: none."""

    def __init__(
        self,
        every: int,
        hp: HParams,
        window: Sequence[int],
        n_ctx: int,
        kv_types: KVTypes,
        n_thread: int,
    ) -> None:
        if every < 0:
            raise ValueError(f"audit is {every}, expected 0 (none) or more: every how manyth step")
        self.every, self._hp, self._window, self._n_ctx = every, hp, tuple(window), n_ctx
        self._n_thread = n_thread
        self._kv_types = kv_types
        self._layers = [hp.of_cache(layer) for layer in range(hp.n_layer)]
        most = max(own.n_head for own in hp.kinds)
        self._report = np.zeros((hp.n_layer, most, len(AUDIT)), np.float64)
        self._work: np.ndarray | None = None  # made once the size of the team is known
        self._n_decoded = 0
        self.reset()

    def __repr__(self) -> str:
        return f"<Audit of 1 in {self.every} steps: {self._n_decoded} decoded>"

    def reset(self) -> None:
        """Drop the samples; the count of steps continues."""
        self._samples: list[np.ndarray] = []
        self._bytes: list[tuple[int, int, int]] = []
        self._bounds: dict[tuple[str, bool], list[np.ndarray]] = {}
        self._estimates: list[np.ndarray] = []  # f64 [n, 2] for each step: estimated and exact mass

    @property
    def n_step(self) -> int:
        """The number of audited steps."""
        return len(self._samples)

    @property
    def samples(self) -> np.ndarray:
        """All measurements: f64 [n_step, n_layer, n_head, len(ops.AUDIT)]."""
        shape = (-1, *self._report.shape)
        return np.array(self._samples, np.float64).reshape(shape)

    @property
    def specs(self) -> set[KernelSpec]:
        """The kernels of the audit."""
        dims = {hp.head_dim for hp in self._hp.kinds}
        return {KernelSpec(ops.AUDIT_HEADS, (dim, *self._kv_types)) for dim in dims}

    def due(self) -> bool:
        """Whether the next decode step is an N-th one, which is audited."""
        self._n_decoded += 1
        return self._n_decoded % self.every == 0

    def record(self, rec: Recording, queries: Queries, kv: KVView, sel: Selection) -> None:
        """Record the comparison of attention's output for the queries with dense attention."""
        hp = self._layers[queries.layer]
        if self._work is None:
            n_work = max(ops.audit_work(self._n_ctx, own.head_dim) for own in self._hp.kinds)
            self._work = np.zeros((min(self._n_thread, hp.n_head), n_work), np.float64)
        rec.program.add(
            ops.AUDIT_HEADS,
            (hp.head_dim, *kv.types),
            step=rec.step,
            q=queries.q,
            k_pages=kv.k,
            v_pages=kv.v,
            k_table=kv.k_table,
            v_table=kv.v_table,
            indptr=sel.indptr,
            indices=sel.indices,
            log_weight=sel.log_weight,
            block=sel.block,
            n_row=sel.n_row,
            heads_per_kv=hp.group,
            n_head=hp.n_head,
            window=self._window[queries.layer],
            capacity=self._n_ctx,
            given=queries.out,
            report=self._report[queries.layer],
            work=self._work,
            scale=hp.scale,
        )

    def take(self, program: Program, state: SelectorState, step: int, pos: int) -> None:
        """Store the audited step's measurements. Raises AuditError if a bound is violated."""
        report, dense = self._report.copy(), 0
        for hp, heads in zip(self._layers, report, strict=True):
            for field in (AUDIT.max_k, AUDIT.max_v):
                own = heads[: hp.n_head, field]
                own[:] = np.repeat(own[:: hp.group], hp.group)
            rows = hp.n_head_kv * int(heads[0, AUDIT.n_seen])
            dense += self._kv_types.row_bytes(hp.head_dim) * rows
        self._samples.append(report)
        if state.meter is not None:
            estimated = state.meter.report[..., METER.mass]
            exact = report[:, : estimated.shape[1], AUDIT.mass]
            both = np.stack([estimated, exact], axis=-1)
            self._estimates.append(both[estimated >= 0])
        moved = {SELECT: 0, ATTEND: 0}
        for call in program.calls:
            if call.part in moved:
                moved[call.part] += call.cost(1, pos)[0]
        self._bytes.append((moved[ATTEND], moved[SELECT], dense))
        for layer, heads in enumerate(report):
            if not self._hp.has_own_heads(layer):  # layers that no method serves
                self._check(layer, heads[: self._hp.n_head], state, step)

    def _check(self, layer: int, heads: np.ndarray, state: SelectorState, step: int) -> None:
        for bound in state.bounds(layer, heads):
            limit = bound.allowed + bound.rounding
            numbers = np.stack([bound.measured, bound.allowed, limit], axis=-1)
            self._bounds.setdefault((bound.name, bound.holds_always), []).append(numbers)
            broken = np.flatnonzero(~(bound.measured <= limit))
            if bound.holds_always and len(broken):
                head = broken[0]
                raise AuditError(
                    f"{bound.name} does not hold at layer {layer}, head {head}, step {step}: "
                    f"measured {bound.measured[head]:.6g}, allowed {bound.allowed[head]:.6g}"
                )

    def groups(self) -> list[Findings]:
        """The findings of each layer and KV head, over its query heads."""
        return [
            self._found(layer, h)
            for layer, hp in enumerate(self._layers)
            for h in range(hp.n_head_kv)
            if self._samples
        ]

    def total(self) -> Findings:
        """The findings over all layers and heads. Raises ValueError if no step was audited."""
        if not self.every:
            raise ValueError("no step was audited: open the session with audit=1")
        if not self._samples:
            raise ValueError(
                f"no step was audited: {self._n_decoded} were decoded, every {self.every}th counts"
            )
        return self._found(None, None)

    def n_bytes(self) -> tuple[float, float, float]:
        """Bytes per step: of the K and V read, of selection, and of dense attention."""
        attend, select, dense = np.mean(self._bytes, axis=0)
        return float(attend), float(select), float(dense)

    def bounds(self) -> list[BoundFindings]:
        """The findings of each of the method's bounds."""
        found = []
        for (name, always), numbers in self._bounds.items():
            measured, allowed, limit = np.concatenate(numbers).T
            ratio = measured[limit > 0] / limit[limit > 0]
            tightest = float(ratio.max(initial=0.0))
            found.append(
                BoundFindings(name, float(measured.mean()), float(allowed.mean()), tightest, always)
            )
        return found

    def estimate(self) -> EstimateFindings | None:
        """The findings on estimates of retained mass; None if no audited step had any."""
        if not sum(map(len, self._estimates)):
            return None
        mass, exact = np.concatenate(self._estimates).T
        low, found = exact < LOW_MASS, mass < LOW_MASS
        return EstimateFindings(
            n=len(mass),
            mass=float(mass.mean()),
            exact=float(exact.mean()),
            error=float(np.abs(mass - exact).mean()),
            low=float(low.mean()),
            caught=float(found[low].mean()) if low.any() else 1.0,
            false_alarms=float(found[~low].mean()) if not low.all() else 0.0,
        )

    def _found(self, layer: int | None, head_kv: int | None) -> Findings:
        at = self.samples
        if layer is not None and head_kv is not None:
            group = self._layers[layer].group
            at = at[:, layer, head_kv * group : (head_kv + 1) * group]
        else:
            each = enumerate(self._layers)
            at = np.concatenate([at[:, i, : hp.n_head] for i, hp in each], axis=1)
        mass = at[..., AUDIT.mass]
        norm = np.maximum(at[..., AUDIT.norm], np.finfo(np.float32).tiny)
        return Findings(
            layer=layer,
            head_kv=head_kv,
            n_step=len(at),
            n_seen=float(at[..., AUDIT.n_seen].mean()),
            n_kept=float(at[..., AUDIT.n_kept].mean()),
            mass=float(mass.mean()),
            mass_p5=float(np.percentile(mass, 5)),
            best_mass=float(at[..., AUDIT.best_mass].mean()),
            recall=float(at[..., AUDIT.recall].mean()),
            error=float((at[..., AUDIT.error] / norm).mean()),
        )
