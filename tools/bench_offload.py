"""Decoding with a part of the KV cache resident, along a recorded sequence of selected keys.

    python -m tamis.tools.bench_offload record ATTENTION.npz MASKS.npz
    python -m tamis.tools.bench_offload run -m MODEL --masks MASKS.npz -n CONTEXT --share 0.5

`record` runs HiP over queries and keys of a real model, q [n_layer, n_head, n, head_dim], k and v
[n_layer, n_head_kv, n_kv, head_dim], and stores the selection of each step. `run` decodes with a
model of random weights, whose own selections would have no locality: HiP searches as usual, and
then attends to the recorded blocks in place of its own. Masks of a longer context are the same ones
in runs of 32 positions, spread evenly. Sessions with everything in memory and with a share of it
alternate; a row is the median of the rounds, and a ratio compares the two sides of a round.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tamis.engine.engine import Engine
from tamis.jit_kernels.backends import on_host
from tamis.select import hip
from tamis.select.base import DECODE

RUN = 32  # positions that stay adjacent when a context is stretched


@dataclass(frozen=True, slots=True)
class Replayed:
    """HiP that attends to recorded blocks: masks int32 [n_step, n_layer, n_row, 1 + n_chunk]."""

    method: hip.HiP
    masks: np.ndarray
    roles = (DECODE,)

    def open(self, shape: Any) -> Any:
        """The state of one sequence."""
        return _State(self, shape)


class _State(hip._State):
    def __init__(self, params: Replayed, shape: Any) -> None:
        super().__init__(params.method, shape)
        source = params.masks
        self._recorded, self._at = source, 0
        self._now = np.zeros((shape.n_layer, self._n_row, source.shape[3]), np.int32)
        self.planned = (self._now,)
        self._layer = 0

    def select_decode(self, rec: Any, layer: int, q: np.ndarray, kv: Any) -> Any:
        self._layer = layer
        return super().select_decode(rec, layer, q, kv)

    def _record_selection(self, rec: Any, mask: np.ndarray, *, mask_block: int) -> Any:
        if mask_block == 1:
            mask = self._now[self._layer]
        return super()._record_selection(rec, mask, mask_block=mask_block)

    def phase(self, step: int) -> str:
        found = super().phase(step)
        self._at += 1  # it continues after a truncation: each repetition has new selections
        if found == hip.REFRESH:
            n_step, n_source, n_row, _ = self._recorded.shape
            # Layers and heads beyond the recorded ones use them at other times.
            for layer in range(len(self._now)):
                for row in range(self._n_row):
                    late = 37 * (layer // n_source) + 53 * (row // n_row)
                    at = (self._at + late) % n_step
                    self._now[layer, row] = self._recorded[at, layer % n_source, row % n_row]
        return found


def record(source: Path, target: Path, method: hip.HiP) -> None:
    """Run HiP over recorded attention and store its masks."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    from replay import Replay

    data = np.load(source)
    replayed = Replay(
        method, data["q"], data["k"], data.get("v", data["k"]), n_prefill=32, n_thread=4
    )
    masks = []
    for step in range(data["q"].shape[2] - 32):
        replayed.state.phase(step + 1)
        replayed.decode()
        masks.append(replayed.state._masks.astype(np.int16))
    np.savez_compressed(target, masks=np.array(masks), n_kv=data["k"].shape[2], block=method.b_k)


def stretched(masks: np.ndarray, block: int, factor: int) -> np.ndarray:
    """Masks of a context `factor` times as long."""
    per, blocks = RUN // block, masks[..., 1:].astype(np.int64)
    run = blocks // per
    # The offset of a run within its stretch is arbitrary, but the same at each step.
    offset = (run * 2654435761 >> 7) % factor
    found = ((run * factor + offset) * per + blocks % per).astype(np.int32)
    return np.concatenate([masks[..., :1].astype(np.int32), np.sort(found, axis=-1)], axis=-1)


def turn(session: Any, n: int, cold: bool) -> float:
    """Seconds per token of n steps; the session is then truncated to where it was.

    cold: the system's copies of the file are dropped before.
    """
    depth, spent = session.n_past, 0.0
    session.decode(7)
    for i in range(n):
        if cold and session.kv_ram is not None:
            session._kv.drop_cached()
        start = time.perf_counter()
        session.decode(11 + i)
        spent += time.perf_counter() - start
    session.truncate(depth)
    return spent / n


def counted(session: Any) -> tuple[int, int, int]:
    """Units that were resident, units that were not, and bytes that were fetched."""
    counts = session.kv_counts
    return (0, 0, 0) if counts is None else (counts.n_hit, counts.n_miss, counts.n_read)


def run(given: argparse.Namespace) -> None:
    """Print one row for each method."""
    data = np.load(given.masks)
    factor = given.n_ctx // int(data["n_kv"])
    masks = stretched(data["masks"], int(data["block"]), factor)
    engine = Engine.load(given.model, device=given.device, prepare=False)
    n_past = given.n_ctx - 600
    plan = engine.memory_plan(given.n_ctx)
    ids = np.random.default_rng(0).integers(3, 200, n_past)
    methods: dict[str, Any] = {
        f"hip:l_d=0,r_m={r_m}": Replayed(
            replace(hip.HiP(), l_d=0, r_m=r_m, b_k=int(data["block"])), masks
        )
        for r_m in given.r_m
    }
    methods |= {name: name for name in given.beside or ()}
    for name, method in methods.items():
        rows: list[dict[str, Any]] = []
        sessions = []
        for share in [1.0, *given.share]:
            tier: dict[str, Any] = {}
            if share < 1:
                n_byte = int(share * plan.kv)
                on_gpu = {"kv_vram": n_byte}
                on_disk = {"kv_ram": n_byte, "kv_dir": given.kv_dir}
                tier = on_disk if on_host(given.device) else on_gpu
            session = engine.session(given.n_ctx, attn=method, prefill=given.prefill, **tier)
            start = time.perf_counter()
            session.prefill(ids)
            session.decode(5)
            session.truncate(n_past)
            row = {"attn": name, "cold": given.cold, "share": share, "n_past": n_past}
            rows.append(row | {"prefill_s": round(time.perf_counter() - start, 1)})
            sessions.append(session)
        for session in sessions:
            turn(session, given.n_gen, given.cold)
        before = [counted(session) for session in sessions]
        times = [
            [turn(session, given.n_gen, given.cold) for session in sessions]
            for _ in range(given.rounds)
        ]
        n_step = given.rounds * (given.n_gen + 1)
        for i, (row, session) in enumerate(zip(rows, sessions, strict=True)):
            ratios = [each[0] / each[i] for each in times]
            n_hit, n_miss, n_read = (
                b - a for a, b in zip(before[i], counted(session), strict=True)
            )
            row |= {
                "ms": round(1e3 * statistics.median(each[i] for each in times), 4),
                "of_resident": round(statistics.median(ratios), 4),
                "min": round(min(ratios), 4),
                "max": round(max(ratios), 4),
                "hit": round(n_hit / max(1, n_hit + n_miss), 4),
                "mb_a_step": round(n_read / n_step / 1e6, 3),
            }
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
        del sessions, session
    engine.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    recording = commands.add_parser("record")
    recording.add_argument("source", type=Path)
    recording.add_argument("target", type=Path)
    running = commands.add_parser("run")
    running.add_argument("-m", "--model", required=True)
    running.add_argument("--masks", type=Path, required=True)
    running.add_argument("-c", "--n-ctx", type=int, default=131072)
    running.add_argument("--device", default="cuda")
    running.add_argument("--kv-dir")
    running.add_argument("--share", type=float, action="append")
    running.add_argument("--r-m", type=int, action="append")
    running.add_argument("--beside", action="append", help="another method")
    running.add_argument("--cold", action="store_true", help="drop the system's copies of a file")
    running.add_argument("--prefill", default="window:recent=1024")
    running.add_argument("-n", "--n-gen", type=int, default=64)
    running.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.command == "record":
        record(given.source, given.target, hip.HiP(l_d=0))
    else:
        given.share, given.r_m = given.share or [0.5], given.r_m or [8, 1]
        run(given)


if __name__ == "__main__":
    main()
