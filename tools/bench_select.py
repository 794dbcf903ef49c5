"""Decode steps of a method on a GPU: layers of Llama-3.1-8B's heads in one graph, op by op.

Run it as `python -m tamis.tools.bench_select N_KV [--captured FILE] [--key-copy BITS] METHOD...`. A
layer's time is that of a graph of LAYERS divided by LAYERS, alternating with dense attention's. Its
floor is the time of the bytes that the method reads (for scores, by its ops' costs, and attention's
K and V) at the rate of a large copy in the same run.

Keys are of CLUSTERS directions per head, each key one of them plus noise; a query looks at a few of
them. At 128K less than 0.2 % of the keys have 90 % of the weight, more peaked than a model's;
random keys have no such structure. Queries differ by layer and, for methods with references, a
head's query is new in a step with the probability NEW.

With --captured keys and queries are a model's: an npz of q [layers, heads, positions, width], the
last positions' queries, and k [layers, KV heads, positions, width] after RoPE. The KV heads of all
its layers serve as those of the bench; a narrower head is repeated and its queries are scaled down,
so that logits are unchanged; positions are repeated up to N_KV. A step's queries are the next
position's. The last lines are JSON.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tamis.jit_kernels.backends.cuda import CudaBackend
from tamis.jit_kernels.backends.cuda_program import CudaProgram
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE, KVView, Selection, zeros
from tamis.select.base import Attended, Recording, SelectorShape
from tamis.select.notation import parse_method
from tamis.tools.bench_cuda import HEAD_DIM, N_HEAD, N_HEAD_KV, Cache, copy_rate, record_attend

LAYERS, STEPS, EARLY = 8, 16, 2  # the first steps prepare data and do not count
CLUSTERS, LOOKED_AT = 2048, 4
NEW = 0.15
PAST = 32  # queries of a prompt's end from which methods learn
GROUP = N_HEAD // N_HEAD_KV


class Keys(Protocol):
    """A KV cache with room for STEPS more positions, and queries that look at it."""

    cache: Cache

    def past(self, layer: int) -> np.ndarray:
        """The queries of PAST positions before the first step, f32 [PAST, N_HEAD, HEAD_DIM]."""

    def step(self, layer: int, i: int, before: np.ndarray | None, part: float) -> np.ndarray:
        """The queries of step i, f32 [N_HEAD, HEAD_DIM]; `before` are the last step's, if any.

        part: the heads that look elsewhere than before, if the source of keys supports it.
        """


def cached(n_kv: int, keys_of: Callable[[int], np.ndarray], seed: int = 0) -> Cache:
    """Pages in random order, of keys_of(page) [N_HEAD_KV, PAGE, HEAD_DIM] and random values."""
    rng = np.random.default_rng(seed)
    n_page = -(-(n_kv + STEPS) // PAGE)
    pages = [zeros((n_page, N_HEAD_KV, PAGE, HEAD_DIM), np.float16) for _ in range(2)]
    table = rng.permutation(n_page).astype(np.int32)
    for page in range(n_page):
        pages[0][table[page]] = keys_of(page)
        pages[1][page] = rng.standard_normal((N_HEAD_KV, PAGE, HEAD_DIM), np.float32)
    step = np.array([1, n_kv - 1, 0, 0, n_kv, 0])
    q = zeros((1, N_HEAD, HEAD_DIM), np.float32)
    return Cache(KVView(pages[0], pages[1], table, table), step, q, n_kv)


class Directions:
    """Keys of some directions with noise."""

    def __init__(self, n_kv: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self._centres = centres = rng.standard_normal((N_HEAD_KV, CLUSTERS, HEAD_DIM), np.float32)
        self._rng = np.random.default_rng(1)

        def keys_of(_page: int) -> np.ndarray:
            # Neighbours often share a direction, as a text stays with its subject.
            of = np.repeat(rng.integers(0, CLUSTERS, (N_HEAD_KV, PAGE // 4)), 4, axis=1)
            noise = rng.standard_normal((N_HEAD_KV, PAGE, HEAD_DIM), np.float32)
            keys = np.take_along_axis(centres, of[..., None], axis=1)
            return np.asarray(keys + np.float32(0.5) * noise)

        self.cache = cached(n_kv, keys_of, seed)

    def past(self, layer: int) -> np.ndarray:
        """Queries that change every fourth position."""
        found = [self._queries() for _ in range(PAST // 4)]
        return np.repeat(found, 4, axis=0)

    def step(self, layer: int, i: int, before: np.ndarray | None, part: float) -> np.ndarray:
        """The queries before, changed for a part of the heads."""
        if before is None:
            return self._queries()
        new = self._rng.random(N_HEAD) < part
        return np.where(new[:, None], self._queries(), before) if new.any() else before

    def _queries(self) -> np.ndarray:
        """A query for each head: the sum of some of its keys' directions, and noise."""
        rng = self._rng
        chosen = rng.integers(0, CLUSTERS, (N_HEAD, LOOKED_AT))
        of_head = self._centres[np.arange(N_HEAD)[:, None] // GROUP, chosen]
        strength = rng.uniform(0.4, 1, (N_HEAD, LOOKED_AT, 1))
        noise = rng.standard_normal((N_HEAD, HEAD_DIM)) / 4
        return (1.5 * ((of_head * strength).sum(axis=1) + noise)).astype(np.float32)


class Captured:
    """Keys and queries of a model, from a file."""

    def __init__(self, n_kv: int, file: Path) -> None:
        with np.load(file) as data:
            q, k = data["q"], data["k"]
        (n_layer, n_head_kv, n_pos, width), n_head, n_query = k.shape, q.shape[1], q.shape[2]
        times, group = HEAD_DIM // width, n_head // n_head_kv
        if width * times != HEAD_DIM or n_layer * n_head_kv < N_HEAD_KV or group < GROUP:
            raise ValueError(
                f"{file}: {n_layer} layers of {n_head_kv} KV heads and {n_head} heads of {width}, "
                f"expected {N_HEAD_KV} KV heads with {GROUP} heads each and a divisor of {HEAD_DIM}"
            )
        if n_query < PAST + STEPS + LAYERS:
            raise ValueError(f"{file}: {n_query} queries, expected {PAST + STEPS + LAYERS} or more")
        k = np.tile(k.reshape(-1, n_pos, width)[:N_HEAD_KV], (1, 1, times))
        q = q.reshape(n_layer * n_head_kv, group, n_query, width)[:N_HEAD_KV, :GROUP]
        q = np.tile(q.astype(np.float32), times) / np.float32(times**0.5)
        self._q = np.ascontiguousarray(q.reshape(N_HEAD, n_query, HEAD_DIM).swapaxes(0, 1))
        # A layer's queries end early enough to leave room for those of its steps.
        self._apart = (n_query - PAST - STEPS) // LAYERS
        # The last query is at the file's last position, and so is the last step's, up to STEPS.
        first = (n_kv - n_pos) % n_pos

        def keys_of(page: int) -> np.ndarray:
            at = (PAGE * page + np.arange(PAGE) - first) % n_pos
            return np.asarray(k[:, at])

        self.cache = cached(n_kv, keys_of)

    def past(self, layer: int) -> np.ndarray:
        """The captured queries before a position of the layer."""
        first = self._apart * layer
        return self._q[first : first + PAST]

    def step(self, layer: int, i: int, before: np.ndarray | None, part: float) -> np.ndarray:
        """The captured queries that follow."""
        return np.asarray(self._q[self._apart * layer + PAST + i])


class Steps:
    """The decode steps of a method over a cache, from its position on."""

    def __init__(self, backend: CudaBackend, attn: str, keys: Keys, key_copy: int = 4) -> None:
        self.backend, self.attn, self.cache, self._keys = backend, attn, keys.cache, keys
        cache = self.cache
        n_ctx = -(-(cache.n_kv + STEPS) // PAGE) * PAGE
        heads = (N_HEAD, N_HEAD_KV, HEAD_DIM)
        windows = (0,) * LAYERS
        shape = SelectorShape(LAYERS, *heads, n_ctx, 1, windows, on_gpu=True, key_copy=key_copy)
        self.state = parse_method(attn).open(shape)
        self._q = [zeros(cache.q.shape, np.float32) for _ in range(LAYERS)]
        self._linked: dict[str, CudaProgram] = {}
        self._at, self._last = cache.n_kv - 1, ""
        self._selections: dict[str, Selection] = {}  # of the last layer, by phase
        self._look_back()
        self.renew(0)

    def renew(self, i: int) -> None:
        """Load the queries of step i; with references, some heads keep those before."""
        part = NEW if self.attn.startswith("cpe") else 0.0
        for layer, q in enumerate(self._q):
            q[0] = self._keys.step(layer, i, q[0].copy() if i > 0 else None, part)
        if self._linked:
            self.backend.send(*self._q)

    def _look_back(self) -> None:
        """Observe the queries of the last positions before the first step, like a prompt's end."""
        cache = self.cache
        step, program = np.array([PAST, self._at - PAST, 0, 0, self._at, 0]), Program()
        rec = Recording(program, step, PAST, 16)
        for layer in range(LAYERS):
            q = zeros((PAST, N_HEAD, HEAD_DIM), np.float32)
            q[...] = self._keys.past(layer)
            self.state.observe(rec, layer, q, cache.kv, self.state.everything(rec))
        if len(program):
            self.backend.run(self.backend.link(program))
            self.backend.device.wait()

    def _record(self) -> CudaProgram:
        program, cache = Program(), self.cache
        rec = Recording(program, cache.step, 1, 1)
        for layer, q in enumerate(self._q):
            sel = self.state.select_decode(rec, layer, q, cache.kv)
            self._selections[self._last] = sel
            out = zeros(q.shape, np.float32)
            own = cache._replace(q=q)
            record_attend(program, own, Attended(cache.step, 1, sel, out), self.backend.n_part)
            self.state.correct(rec, layer, q, cache.kv, sel, out)
            self.state.observe(rec, layer, q, cache.kv, sel)
        return self.backend.link(program)

    def next(self, *, stay: bool = False) -> Callable[[], Any]:
        """Advance to the next position, or stay at this one.

        Returns a function that runs the step.
        """
        self._last = phase = self.state.phase(self._at)
        if phase not in self._linked:
            self._linked[phase] = self._record()
        linked = self._linked[phase]
        self.cache.step[1] = self._at
        self.backend.send(self.cache.step, *self.state.planned)
        self._at += not stay
        return lambda: self.backend.run(linked)

    def by_op(self) -> dict[str, list[float]]:
        """Microseconds per layer of each op of the last step, and of its launches separately."""
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
        sel = self._selections[self._last]
        self.backend.fetch(sel.indptr)
        return sel.block * int(sel.indptr[-1]) / (len(sel.indptr) - 1) / (self._at + 1)

    def n_bytes(self) -> float:
        """Bytes that a layer of the last step reads: of scores, and of its last layer's keys."""
        program, pos = self._linked[self._last].program, self._at - 1
        self.backend.fetch(*program.named("chosen", "meta", "extent"))
        scored = sum(call.cost(1, pos)[0] for call in program.calls) / LAYERS
        n_row = self._selections[self._last].n_row
        return scored + n_row * self.kept() * (pos + 1) * self.cache.kv.row_bytes


def measure(backend: CudaBackend, attn: str, dense: Steps, steps: Steps) -> dict[str, Any]:
    """The times of a layer in microseconds, for each step, alternating with dense attention."""
    time, own, others, n_bytes = backend.device.time, [], [], []
    for i in range(STEPS):
        if i > 0:
            steps.renew(i)
        us = 1e6 * time(steps.next()) / LAYERS
        other = 1e6 * time(dense.next(stay=True)) / LAYERS
        if i >= EARLY:
            own.append(us)
            others.append(other)
            n_bytes.append(steps.n_bytes())
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
        "n_bytes": statistics.median(n_bytes),
        "ops": steps.by_op(),
    }


def write(row: dict[str, Any], rate: float) -> None:
    """Print a method's line and a line for each of its ops; rate: bytes per microsecond."""
    few, half, most = row["faster"]
    floor = row["n_bytes"] / rate
    sys.stdout.write(
        f"{row['method']:34} {row['median']:7.1f} us a layer (mean {row['mean']:.1f}, "
        f"{row['least']:.1f} to {row['most']:.1f}), dense {row['dense']:.1f}: {half:.2f} "
        f"({few:.2f} to {most:.2f}) times faster, keeps {row['kept']:.4f}; floor {floor:.1f} us, "
        f"{floor / row['median']:.0%} of it\n"
    )
    for name, us in row["ops"].items():
        sys.stdout.write(f"    {name:20} " + "".join(f"{x:8.1f}" for x in us) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print a line for each method, then JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("n_kv", type=int)
    parser.add_argument("--captured", type=Path)
    parser.add_argument("--key-copy", type=int, choices=(0, 4, 8), default=4)
    parser.add_argument("methods", nargs="+")
    args = parser.parse_args()
    backend = CudaBackend()
    copied = copy_rate(backend)
    rate = copied.n_bytes / copied.seconds / 1e6
    keys = Captured(args.n_kv, args.captured) if args.captured else Directions(args.n_kv)
    sys.stdout.write(f"{backend.device.name}, a copy of 2 GiB: {rate / 1e6:.2f} TB/s\n")
    dense, rows = Steps(backend, "dense", keys), []
    backend.device.time(dense.next(stay=True))
    for attn in args.methods:
        row = measure(backend, attn, dense, Steps(backend, attn, keys, args.key_copy))
        source = args.captured.name if args.captured else "directions"
        known = {"device": backend.device.name, "n_kv": args.n_kv, "keys": source, "rate": rate}
        rows.append({**known, **row})
        write(row, rate)
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
