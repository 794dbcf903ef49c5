"""The positions of a layer that an op will read, derived from its fields just before it runs."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.op import Reads
from tamis.jit_kernels.contract.program import Call, Program
from tamis.jit_kernels.contract.types import PAGE

EVERYTHING = 1 << 40
ONE_QUERY = {"block": 1, "stride": 1, "window": 0}  # values for an op without these fields
Spans = list[tuple[int, int]]  # positions first .. last - 1


@dataclass(frozen=True, slots=True)
class Fields:
    """A recorded op's fields by name, and the arrays whose addresses some of them are."""

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


def reads_all(call: Call, program: Program) -> bool:
    """Whether an op reads, or selects for ATTEND, every key of the context at some step."""
    op, fields = call.spec.op, fields_of(call, program)
    if op is ops.SELECT_WINDOW:
        return fields["n_recent"] == 0
    return op.reads is ops.READS_ALL or op.name == "lfps_start"  # it does so at its first step


def spans(reads: Reads, fields: Fields) -> Spans:
    """The positions that an op reads for all KV heads, other than by its Selection."""
    if "step" not in fields.values:
        return [(0, EVERYTHING)]
    n_tok, pos = map(int, fields.array("step")[:2])
    low = high = 0
    if reads.found:
        positions = fields.array(reads.found).reshape(-1)[reads.first :: reads.every]
        low, high = int(positions.min()), int(positions.max())
    block, x, y = (fields[name] if name else 0 for name in (reads.block, reads.x, reads.y))
    first, end, other, last = reads.spans(low, high, block, x, y, n_tok, pos)
    return [(a, b) for a, b in ((first, end), (other, last)) if a < b]


def chosen(call: Call, program: Program, n_page: int, unit: int) -> tuple[np.ndarray, int]:
    """The content of a Selection: bool [n_page, n_head_kv, PAGE / unit], and its number of keys."""
    fields = fields_of(call, program)
    n_tok, pos = map(int, fields.array("step")[:2])
    n_head_kv, n_row = fields["n_head_kv"], fields["n_row"]
    block, stride, window = (int(fields.values.get(name, n)) for name, n in ONE_QUERY.items())
    constants = dict(zip(call.spec.op.constants, call.spec.constants, strict=True))
    rows = -(-n_tok // int(constants.get("q_block", 1))) * n_row
    indptr = fields.array("indptr")[: rows + 1]
    starts = fields.array("indices").reshape(-1)[indptr[0] : indptr[-1]].astype(np.int64) * block
    heads = np.repeat(np.arange(rows) % n_row * n_head_kv // n_row, np.diff(indptr))
    end = pos + stride * (n_tok - 1) + 1
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
    """For each head, which grains have a position in one of starts .. stops - 1: bool.

    shape: heads, positions; grain: positions that divide the latter.
    """
    n = shape[1] // grain + 1
    edges = np.zeros(shape[0] * n, np.int32)
    np.add.at(edges, heads * n + starts // grain, 1)
    np.add.at(edges, heads * n + (stops - 1) // grain + 1, -1)
    return edges.cumsum().reshape(shape[0], n)[:, :-1] > 0
