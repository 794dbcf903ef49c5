"""Decode steps with a method on a GPU: layers of Llama-3.1-8B's heads in one graph, op by op.

Run it as `python -m tamis.tools.bench_select N_KV METHOD [METHOD...]`. A layer's time is that of a
graph of LAYERS over LAYERS, alternating with dense attention's. Queries differ by layer and, for
methods with references, a head's are new at a step with the probability NEW. Keys: of CLUSTERS
directions a head, each key one of them and noise; a query looks at a few of them. At 128K less than
0.2 % of the keys have 90 % of the weight, more peaked than a model's; random keys have no such
place. The last lines are JSON.
"""

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from tamis.jit_kernels.backends.cuda import CudaBackend, CudaProgram
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE, KVView, Selection, zeros
from tamis.select.base import Recording, Rows, SelectorShape
from tamis.select.notation import parse_method
from tamis.tools.bench_cuda import HEAD_DIM, N_HEAD, N_HEAD_KV, Cache, record_attend

LAYERS, STEPS, EARLY = 8, 16, 2  # the first steps, in which things are made, do not count
CLUSTERS, LOOKED_AT = 2048, 4
NEW = 0.15


def clustered(n_kv: int, seed: int = 0) -> tuple[Cache, np.ndarray]:
    """A KV cache of such keys, with room for STEPS more positions, and the directions."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((N_HEAD_KV, CLUSTERS, HEAD_DIM), np.float32)
    n_page = -(-(n_kv + STEPS) // PAGE)
    pages = [zeros((n_page, N_HEAD_KV, PAGE, HEAD_DIM), np.float16) for _ in range(2)]
    table = rng.permutation(n_page).astype(np.int32)
    for page in range(n_page):
        # Neighbours are often of one direction, as a text stays with what it is about.
        of = np.repeat(rng.integers(0, CLUSTERS, (N_HEAD_KV, PAGE // 4)), 4, axis=1)
        noise = rng.standard_normal((N_HEAD_KV, PAGE, HEAD_DIM), np.float32)
        keys = np.take_along_axis(centres, of[..., None], axis=1)
        pages[0][page] = keys + np.float32(0.5) * noise
        pages[1][page] = rng.standard_normal((N_HEAD_KV, PAGE, HEAD_DIM), np.float32)
    step = np.array([1, n_kv - 1, 0, 0, n_kv])
    q = zeros((1, N_HEAD, HEAD_DIM), np.float32)
    return Cache(KVView(pages[0], pages[1], table, table), step, q, n_kv), centres


def queries(rng: np.random.Generator, centres: np.ndarray) -> np.ndarray:
    """A query of each head: the sum of some of its keys' directions, and noise."""
    chosen = rng.integers(0, CLUSTERS, (N_HEAD, LOOKED_AT))
    of_head = centres[np.arange(N_HEAD)[:, None] // (N_HEAD // N_HEAD_KV), chosen]
    strength = rng.uniform(0.4, 1, (N_HEAD, LOOKED_AT, 1))
    noise = rng.standard_normal((N_HEAD, HEAD_DIM)) / 4
    return (1.5 * ((of_head * strength).sum(axis=1) + noise)).astype(np.float32)


class Steps:
    """A method's decode steps over a cache, from its position on."""

    def __init__(self, backend: CudaBackend, attn: str, cache: Cache, centres: np.ndarray) -> None:
        self.backend, self.attn, self.cache = backend, attn, cache
        self._centres, self._rng = centres, np.random.default_rng(1)
        n_ctx = -(-(cache.n_kv + STEPS) // PAGE) * PAGE
        shape = SelectorShape(LAYERS, N_HEAD, N_HEAD_KV, HEAD_DIM, n_ctx, 1, (0,) * LAYERS)
        self.state = parse_method(attn).open(shape)
        self._q = [zeros(cache.q.shape, np.float32) for _ in range(LAYERS)]
        self._linked: dict[str, CudaProgram] = {}
        self._at, self._last = cache.n_kv - 1, ""
        self._selections: list[Selection] = []
        self.renew(1.0)
        self._look_back()

    def renew(self, part: float) -> None:
        """Give this part of the heads another query."""
        for q in self._q:
            new = self._rng.random(N_HEAD) < part
            q[0, new] = queries(self._rng, self._centres)[new]
        if self._linked:
            self.backend.send(*self._q)

    def _look_back(self) -> None:
        """Observe the queries of the last positions before the first step, as a prompt's end."""
        n_past, cache = 32, self.cache
        step, program = np.array([n_past, self._at - n_past, 0, 0, self._at]), Program()
        rec = Recording(program, step, n_past, 16)
        for layer in range(LAYERS):
            q = zeros((n_past, N_HEAD, HEAD_DIM), np.float32)
            for t in range(n_past):
                q[t] = queries(self._rng, self._centres) if t % 4 == 0 else q[t - 1]
            self.state.observe(rec, layer, q, cache.kv, self.state.everything(rec))
        if len(program):
            self.backend.run(self.backend.link(program))
            self.backend.device.wait()

    def _record(self) -> CudaProgram:
        program, cache = Program(), self.cache
        rec = Recording(program, cache.step, 1, 1)
        for layer, q in enumerate(self._q):
            sel = self.state.decode(rec, layer, q, cache.kv)
            self._selections.append(sel)
            out = zeros(q.shape, np.float32)
            own = cache._replace(q=q)
            record_attend(program, own, Rows(cache.step, 1, sel, out), self.backend.n_part)
            self.state.correct(rec, layer, q, cache.kv, sel, out)
            self.state.observe(rec, layer, q, cache.kv, sel)
        return self.backend.link(program)

    def next(self, *, stay: bool = False) -> Callable[[], Any]:
        """Go to the next position, or stay at this one; what runs its step."""
        phase = self.state.phase(self._at)
        if phase not in self._linked:
            self._linked[phase] = self._record()
        self._last, linked = phase, self._linked[phase]
        self.cache.step[1] = self._at
        self.backend.send(self.cache.step)
        self._at += not stay
        return lambda: self.backend.run(linked)

    def by_op(self) -> dict[str, list[float]]:
        """Microseconds a layer of each op of the last step, and of its launches by themselves."""
        linked, found = self._linked[self._last], dict[str, list[float]]()
        device, calls = self.backend.device, linked.program.calls
        for name in dict.fromkeys(call.spec.op.name for call in calls):
            own = [i for i, call in enumerate(calls) if call.spec.op.name == name]
            all_rows = [f.rows for f in self.backend.library.functions(calls[own[0]].spec)]
            some = [k for k, rows in enumerate(all_rows) if rows == "any" or "few" in rows.split()]
            found[name] = []
            for kept in [some] + [[k] for k in some if len(some) > 1]:
                with device.capture() as captured:
                    for i in own:
                        functions = self.backend.library.functions(calls[i].spec)
                        for k in kept:
                            device.launch(functions[k], tuple(linked.steps[i].fields.values()))
                graph = captured[0]
                times = [device.time(lambda graph=graph: device.start(graph)) for _ in range(6)]
                found[name].append(1e6 * statistics.median(times[1:]) / LAYERS)
        return found

    def kept(self) -> float:
        """The share of positions that a row of the last step reads."""
        sel = self._selections[-1]
        self.backend.fetch(sel.indptr)
        return sel.block * int(sel.indptr[-1]) / (len(sel.indptr) - 1) / (self._at + 1)


def measure(backend: CudaBackend, attn: str, dense: Steps, steps: Steps) -> dict[str, Any]:
    """Times of a layer in microseconds: of each step, alternating with dense attention."""
    time, own, others = backend.device.time, [], []
    for i in range(STEPS):
        if attn.startswith("cpe"):
            steps.renew(NEW)
        us = 1e6 * time(steps.next()) / LAYERS
        other = 1e6 * time(dense.next(stay=True)) / LAYERS
        if i >= EARLY:
            own.append(us)
            others.append(other)
    ratios = sorted(d / o for d, o in zip(others, own, strict=True))
    return {
        "method": attn,
        "median": statistics.median(own),
        "mean": statistics.mean(own),
        "least": min(own),
        "most": max(own),
        "dense": statistics.median(others),
        "faster": [ratios[0], statistics.median(ratios), ratios[-1]],
        "kept": steps.kept(),
        "ops": steps.by_op(),
    }


def main() -> None:
    """Print a line a method, then JSON."""
    backend, n_kv = CudaBackend(), int(sys.argv[1])
    cache, centres = clustered(n_kv)
    dense, rows = Steps(backend, "dense", cache, centres), []
    backend.device.time(dense.next(stay=True))
    for attn in sys.argv[2:]:
        row = measure(backend, attn, dense, Steps(backend, attn, cache, centres))
        rows.append({"device": backend.device.name, "n_kv": n_kv, **row})
        few, half, most = row["faster"]
        sys.stdout.write(
            f"{attn:34} {row['median']:7.1f} us a layer (mean {row['mean']:.1f}, {row['least']:.1f}"
            f" to {row['most']:.1f}), dense {row['dense']:.1f}: {half:.2f} ({few:.2f} to "
            f"{most:.2f}) times faster, keeps {row['kept']:.4f}\n"
        )
        for name, us in row["ops"].items():
            sys.stdout.write(f"    {name:20} " + "".join(f"{x:8.1f}" for x in us) + "\n")
        sys.stdout.flush()
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
