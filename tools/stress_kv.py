"""Write the KV cache of a long context to disk and read it back, comparing every bit.

Run it as `python -m tamis.tools.stress_kv --kv-dir DIR`: 2^20 tokens of SmolLM2-135M's shape, in
23 GB.
"""

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tamis.cli.options import common
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.cache import KVCounts
from tamis.kv.disk_tier import DiskTier
from tamis.kv.types import UNIT, KVTypes, Tier
from tamis.model.hparams import HParams, RopeScaling

CHUNK = 512  # tokens written at once


class Shape(NamedTuple):
    """The numbers of a model that shape its KV cache."""

    n_layer: int = 30
    n_head_kv: int = 3
    head_dim: int = 64

    @property
    def hp(self) -> HParams:
        """The numbers as hyperparameters; those that do not shape the KV cache are 0."""
        counts = dict.fromkeys(HParams.__slots__, 0)
        names = {"arch": "llama", "rms_eps": 0.0, "rope_base": 1e4, "rope_scaling": RopeScaling()}
        return HParams(**{**counts, **names, **self._asdict(), "n_head": self.n_head_kv})


def rows_of(shape: Shape, side: int, layer: int, page: int) -> np.ndarray:
    """The bits of a page, uint16 [n_head_kv, PAGE, head_dim]: different for every page."""
    ramp = np.arange(shape.n_head_kv * PAGE * shape.head_dim, dtype=np.uint16)
    key = (page * 2 + side) * shape.n_layer + layer
    first, step = key & 0xFFFF, 2 * (key >> 16) + 1
    found = ramp * np.uint16(step) + np.uint16(first)
    return found.reshape(shape.n_head_kv, PAGE, shape.head_dim)


def fill(kv: DiskTier, shape: Shape, first: int, last: int) -> None:
    """Write positions first .. last - 1, multiples of CHUNK, as prefill does."""
    for pos in range(first, last, CHUNK):
        kv.begin(pos, CHUNK)
        for layer in range(shape.n_layer):
            view = kv.view(layer)
            tables = view.k_table, view.v_table
            for side, (frames, table) in enumerate(zip((view.k, view.v), tables, strict=True)):
                for page in range(pos // PAGE, (pos + CHUNK) // PAGE):
                    frames[table[page]].view(np.uint16)[...] = rows_of(shape, side, layer, page)
        kv.finish(pos, CHUNK)


def check(kv: DiskTier, shape: Shape, need: np.ndarray, layer: int) -> int:
    """Fetch units of a layer, bool [n_page, n_head_kv, units], and compare all.

    Returns how many.
    """
    kv.fetch_units(layer, [need.reshape(len(need), -1)] * 2)
    view, unit, n = kv.view(layer), PAGE // need.shape[2], 0
    tables = view.k_table, view.v_table
    for side, (frames, table) in enumerate(zip((view.k, view.v), tables, strict=True)):
        for page in np.flatnonzero(need.any(axis=(1, 2))):
            lines = np.repeat(need[page], unit, axis=-1)
            found = frames[table[page]].view(np.uint16)[lines]
            if (found != rows_of(shape, side, layer, int(page))[lines]).any():
                raise AssertionError(f"layer {layer}, page {page}: not what was written")
            n += int(need[page].sum())
    return n


def stress(
    shape: Shape, n_tokens: int, kv_ram: int, folder: Path, *, n_round: int, share: float
) -> tuple[KVCounts, int]:
    """Fill n_tokens, then read a share of each layer's units n_round times; returns the counters.

    Half of what a round reads was read by the one before, as with consecutive queries. The last
    eighth of the context is dropped and written again in between.
    """
    rng = np.random.default_rng(0)
    kv = DiskTier(shape.hp, n_tokens, KVTypes(), Tier(kv_ram, folder, UNIT), CHUNK)
    fill(kv, shape, 0, n_tokens)
    keep = n_tokens * 7 // 8 // CHUNK * CHUNK
    kv.truncate(keep)
    fill(kv, shape, keep, n_tokens)
    kv.drop_cached()
    n, size = 0, (n_tokens // PAGE, shape.n_head_kv, PAGE // UNIT)
    needs = [rng.random(size, np.float32) < share for _ in range(shape.n_layer)]
    for _ in range(n_round):
        for layer, need in enumerate(needs):
            n += check(kv, shape, need, layer)
            stays = rng.random(size, np.float32) < 0.5
            needs[layer] = need & stays | (rng.random(size, np.float32) < share / 2)
    return kv.counts, n


def main() -> None:
    """Run it and report bytes moved, rates, and memory used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kv-dir", required=True)
    parser.add_argument("--kv-ram", type=common.size, default=512 << 20)
    parser.add_argument("--tokens", type=common.count, default=1 << 20)
    given = parser.parse_args()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    shape, folder = Shape(), Path(given.kv_dir)
    counts, n = stress(shape, given.tokens, given.kv_ram, folder, n_round=4, share=0.01)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(
        f"{given.tokens} tokens: {counts.n_written / 1e9:.1f} GB written, "
        f"{counts.n_read / 1e9:.2f} GB read, {n} units compared, all as written; "
        f"{100 * counts.hit_rate:.1f} % were in "
        f"memory; {time.monotonic() - start:.0f} s; at most {(most - before) / 1024:.0f} MiB of "
        f"memory beyond {before / 1024:.0f} MiB\n"
    )


if __name__ == "__main__":
    main()
