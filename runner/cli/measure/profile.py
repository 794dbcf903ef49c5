"""`tamis bench --profile`: the time of prefill and decode by op, compared with ceilings.

The ceilings are measured with as many threads: bytes read from memory, and float32 multiply-adds.
"roof" is the share of an op's time that the nearer ceiling alone would take. Ops that run without a
barrier between them are timed together and share that time in proportion to the least that each
could take.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tamis.jit_kernels.backends.roofline import Ceiling
from tamis.jit_kernels.contract.program import OpCost

COLUMNS = ("op", "calls", "share", "us", "MB", "GB/s", "GFLOP/s", "roof")


def profile(session: Any, ids: np.ndarray, kind: str, ceiling: Ceiling) -> dict[str, Any]:
    """The ops' costs for `ids` as a prompt ("pp") or one at a time; the session keeps its depth.

    For each kind of op: calls, microseconds and bytes per token, rates per second, and shares of 1.
    """
    depth = session.n_past
    session.forward.start_costs()
    if kind == "pp":
        session.prefill(ids)
    else:
        for token in ids:
            session.decode(int(token))
    costs = session.forward.take_costs()
    session.truncate(depth)
    return {
        "ceiling_gb_s": round(ceiling.read_bytes / 1e9, 2),
        "ceiling_gflop_s": round(ceiling.flop / 1e9, 1),
        "ops": rows(costs, len(ids), ceiling),
    }


def rows(costs: Iterable[OpCost], n_tok: int, ceiling: Ceiling) -> list[dict[str, Any]]:
    """One record for each label, the slowest first."""
    totals: dict[str, np.ndarray] = {}
    for c in _shared(costs, ceiling):
        numbers = c.n_call, c.cycles, c.n_bytes, c.n_flop
        totals[c.label] = totals.get(c.label, np.zeros(4)) + numbers
    spent = max(1.0, sum(total[1] for total in totals.values()))
    found = []
    for label, (n_call, cycles, n_bytes, n_flop) in totals.items():
        seconds = max(1.0, cycles) / ceiling.cycles
        found.append({
            "op": label,
            "calls": round(n_call / n_tok, 3),
            "share": round(cycles / spent, 4),
            "us": round(1e6 * seconds / n_tok, 2),
            "bytes": round(n_bytes / n_tok),
            "gb_s": round(n_bytes / seconds / 1e9, 2),
            "gflop_s": round(n_flop / seconds / 1e9, 2),
            "roof": round(ceiling.seconds(n_bytes, n_flop) / seconds, 3),
        })  # fmt: skip
    return sorted(found, key=lambda row: -row["us"])


def _shared(costs: Iterable[OpCost], ceiling: Ceiling) -> Iterator[OpCost]:
    """Yield the same costs, with the cycles of concurrent ops divided by their least times."""
    group: list[OpCost] = []
    for cost in costs:
        group.append(cost)
        if not cost.sync:
            continue
        least = [ceiling.seconds(c.n_bytes, c.n_flop) for c in group]
        spent, total = sum(c.cycles for c in group), sum(least)
        for c, part in zip(group, least, strict=True):
            yield c._replace(cycles=round(spent * part / total)) if total else c
        group = []
    yield from group


def write_table(test: str, found: dict[str, Any]) -> None:
    """Print the profile of a test as a table."""
    cells = [list(COLUMNS)]
    for row in found["ops"]:
        moved = [f"{row['bytes'] / 1e6:.3f}", f"{row['gb_s']:.2f}", f"{row['gflop_s']:.1f}"]
        moved.append(f"{100 * row['roof']:.0f} %")
        # Ops whose data stays in CPU caches have no bytes to count.
        moved = moved if row["bytes"] or row["gflop_s"] else [""] * 4
        share = f"{100 * row['share']:.1f} %"
        cells.append([row["op"], f"{row['calls']:g}", share, f"{row['us']:.1f}", *moved])
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    total = sum(row["us"] for row in found["ops"])
    sys.stdout.write(
        f"\n{test}, a token: {total:.1f} us in kernels; ceilings: "
        f"{found['ceiling_gb_s']} GB/s, {found['ceiling_gflop_s']} GFLOP/s\n"
    )
    for op, *numbers in cells:
        padded = (text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True))
        sys.stdout.write(f"{op.ljust(widths[0])}  {'  '.join(padded)}\n")
