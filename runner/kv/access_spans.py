"""Which positions of a layer an op is about to read, told from its fields just before it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Call, Program
from tamis.jit_kernels.contract.types import PAGE

EVERYTHING = 1 << 40
Spans = list[tuple[int, int]]  # positions first .. last - 1


@dataclass(frozen=True, slots=True)
class Fields:
    """A recorded op's fields by name, and the arrays that some are addresses of."""

    values: dict[str, Any]
    arrays: dict[int, np.ndarray]

    def __getitem__(self, name: str) -> int:
        return int(self.values[name])

    def array(self, name: str) -> np.ndarray:
        """The array whose address a field holds."""
        return self.arrays[self[name]]


def fields_of(call: Call, program: Program) -> Fields:
    """The fields of a call."""
    return Fields(dict(zip(call.spec.op.fields, call.values, strict=True)), program.arrays)


def reads_keys(op: ops.Op) -> bool:
    """Whether an op reads keys of positions before those of its own call."""
    return "k_pages" in op.fields and op is not ops.ROPE_APPEND


def reader_of(op: ops.Op) -> str:
    """What an op that reads keys is to KV_TAKE: one of ops.KV_READERS."""
    if op is ops.ATTEND:
        return "chosen"
    return op.name if op.name in SPANS else "all"


def reads_all(call: Call, program: Program) -> bool:
    """Whether an op reads, or selects for ATTEND, every key of the context at some step."""
    op, fields = call.spec.op, fields_of(call, program)
    if op is ops.SELECT_WINDOW:
        return fields["n_recent"] == 0
    return reads_keys(op) and reader_of(op) == "all"


def spans(call: Call, program: Program) -> Spans:
    """What an op other than ATTEND reads, of all KV heads."""
    fields = fields_of(call, program)
    if "step" not in fields.values:
        return [(0, EVERYTHING)]
    n_tok, pos = map(int, fields.array("step")[:2])
    return SPANS.get(call.spec.op.name, _every)(fields, n_tok, pos)


def chosen(call: Call, program: Program, n_page: int, unit: int) -> tuple[np.ndarray, int]:
    """What ATTEND reads: bool [n_page, n_head_kv, PAGE / unit], and how many keys were chosen."""
    fields = fields_of(call, program)
    n_tok, pos = map(int, fields.array("step")[:2])
    n_head_kv, n_row, block = fields["n_head_kv"], fields["n_row"], fields["block"]
    constants = dict(zip(call.spec.op.constants, call.spec.constants, strict=True))
    group, rows = int(constants["group"]), -(-n_tok // int(constants["q_block"])) * n_row
    indptr = fields.array("indptr")[: rows + 1]
    starts = fields.array("indices")[indptr[0] : indptr[-1]].astype(np.int64) * block
    heads = np.arange(rows) % n_row * group // fields["heads_per_kv"]
    heads = np.repeat(heads, np.diff(indptr))
    window, end = fields["window"], pos + fields["stride"] * (n_tok - 1) + 1
    low = max(0, pos - window + 1) if window else 0
    starts, stops = np.maximum(starts, low), np.minimum(starts + block, end)
    some = starts < stops
    heads, starts, stops = heads[some], starts[some], stops[some]
    shape = n_head_kv, n_page * PAGE
    need = _inside(heads, starts, stops, shape, int(np.gcd(np.gcd(unit, block), PAGE)))
    n_key = int(need.sum()) * shape[1] // need.shape[1]
    units = need.reshape(n_head_kv, n_page, PAGE // unit, -1).any(axis=-1)
    return np.swapaxes(units, 0, 1), n_key


def _inside(
    heads: np.ndarray, starts: np.ndarray, stops: np.ndarray, shape: tuple[int, int], grain: int
) -> np.ndarray:
    """Of each head, which grains of positions have one of starts .. stops - 1: bool.

    shape: heads, positions, a multiple of grain.
    """
    n = shape[1] // grain + 1
    edges = np.zeros(shape[0] * n, np.int32)
    np.add.at(edges, heads * n + starts // grain, 1)
    np.add.at(edges, heads * n + (stops - 1) // grain + 1, -1)
    return edges.cumsum().reshape(shape[0], n)[:, :-1] > 0


def _every(_fields: Fields, n_tok: int, pos: int) -> Spans:
    return [(0, pos + n_tok)]


def _quest_bounds(fields: Fields, _n_tok: int, pos: int) -> Spans:
    page, filled = fields["page"], int(fields.array("filled")[0])
    return [(min(filled, pos) // page * page, pos + 1)]


def _hip_means(fields: Fields, n_tok: int, pos: int) -> Spans:
    block, top, end = fields["block"], fields["top"], pos + n_tok
    first = min(int(fields.array("filled").min()), pos // block)
    if first == end // block:
        return []
    return [((first >> 2 * top) * (block << 2 * top), end)]


def _hip_search(fields: Fields, n_tok: int, pos: int) -> Spans:
    block, end = fields["block"], pos + n_tok
    tail = max(0, pos + 1 - fields["n_local"]) // block * block
    return [(0, min(fields["n_sink"] * block, end)), (tail, end)]


def _lfps_start(fields: Fields, n_tok: int, pos: int) -> Spans:
    follows = fields.array("meta").reshape(-1, 6)[:, ops.LFPS_META.next // 8] == pos
    return [] if follows.all() else _every(fields, n_tok, pos)


# Ops that read only some of the keys, whatever these are; every other one may read all.
SPANS: dict[str, Callable[[Fields, int, int], Spans]] = {
    "quest_bounds": _quest_bounds,
    "hip_means": _hip_means,
    "hip_search": _hip_search,
    "lfps_start": _lfps_start,
}
# Their fields that tell which, as KV_TAKE has them: found, block, x and y.
FOUND = {
    "chosen": ("", "", "", ""),
    "all": ("", "", "", ""),
    "quest_bounds": ("filled", "page", "", ""),
    "hip_means": ("filled", "block", "top", ""),
    "hip_search": ("", "block", "n_sink", "n_local"),
    "lfps_start": ("meta", "", "", ""),
}
