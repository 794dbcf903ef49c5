"""Programs of several rows as one CUDA graph, on a device that is host memory."""

import ctypes

import numpy as np
import pytest
from cuda_stand_in import Library, StandIn

from tamis.jit_kernels.backends import cuda as cuda_backend
from tamis.jit_kernels.backends.cuda import CudaBackend
from tamis.jit_kernels.backends.cuda_joined import MOST_ROWS
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.op import EACH
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import zeros
from tamis.jit_kernels.cuda.lang.scratch import COUNTERS

N = 8  # elements of a row


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(cuda_backend, "Device", StandIn)
    monkeypatch.setattr(cuda_backend, "PtxLibrary", Library)
    return CudaBackend()


def gate(program, step, x, y):
    program.add(ops.GATE, ("silu",), step=step, gate=x, up=x, y=y, n=x.size)


def scaled(program, step, x, y, outer):
    program.add(ops.MAP_ROWS, ("none", 0), step=step, x=x, y=y, inner=1.0, outer=outer, n=x.size)


class Rows:
    """What all rows share, a gate before and one after, and the ops of rows of their own."""

    def __init__(self, backend):
        self.backend, self.step = backend, np.array([1, 0, 0, 0, 0])
        self.x = zeros((MOST_ROWS, N), np.float32)
        program = Program()
        for _ in range(2):
            gate(program, self.step, self.x, self.x)
        self.shared = backend.link(program)

    def own(self, outer):
        program, y = Program(), zeros(N, np.float32)
        step = np.array([1, int(outer), 0, 0, 0, 0])
        scaled(program, step, self.x[0], y, outer)
        gate(program, step, y, y)
        return self.backend.link(program)

    def join(self, rows, before=None):
        self.step[0] = len(rows)
        steps = [[(self.shared, range(1))], [(row, range(2)) for row in rows]]
        return self.backend.join([*steps, [(self.shared, range(1, 2))]], before)


def record_of(op, records, stride, row):
    """An op's fields as a kernel reads them from the table."""
    raw = (ctypes.c_int64 * len(op.fields)).from_address(records + stride * row)
    values = np.frombuffer(raw, np.int64).copy()
    return {
        name: float(values[i : i + 1].view(np.float32)[0]) if name in op.floats else int(values[i])
        for i, name in enumerate(op.fields)
    }


def launched(backend):
    """The launches of the last replay: name and fields of ops of every row, name of others."""
    found = []
    for name, values in backend.device.started:
        fields = dict(zip(ops.each(ops.GATE).fields, values, strict=False))
        found.append((name, fields if name.startswith(EACH) else None))
    return found


def test_an_op_of_every_row_is_one_launch_that_finds_each_rows_fields(backend):
    rows = Rows(backend)
    own = [rows.own(outer) for outer in (0.5, 2.5, 7.5)]
    joined = rows.join(own)  # which has the table
    backend.run(joined)
    found = launched(backend)
    assert [name for name, _ in found] == ["gate", "each_map_rows", "each_gate", "gate"]
    assert backend.device.times == [1, 2, 2, 1]  # of 4 slots
    for (name, fields), op in zip(found[1:3], (ops.MAP_ROWS, ops.GATE), strict=True):
        assert name == EACH + op.name
        assert ctypes.c_int64.from_address(fields["n_row"]).value == 3
        assert fields["n_slot"] == 4
        for i, linked in enumerate(own):
            step = next(step for step in linked.steps if step.spec.op is op)
            assert record_of(op, fields["records"], fields["stride"], i) == step.fields
    assert {spec.op.name for spec in backend.library.loaded} == {
        "gate", "map_rows", "each_gate", "each_map_rows"
    }  # fmt: skip


def test_a_row_that_joins_changes_its_part_of_the_table_and_no_graph(backend):
    rows = Rows(backend)
    own = [rows.own(float(i)) for i in range(6)]
    first = rows.join(own[:5])
    backend.run(first)
    graph, copied = backend.device.started, backend.device.copied
    backend.run(first)
    assert backend.device.copied == copied  # nothing has changed
    second = rows.join([own[0], own[5], *own[2:5]], first)
    backend.run(second)
    assert backend.device.started is graph
    _, fields = launched(backend)[1]
    assert backend.device.copied - copied == fields["stride"]
    seen = [
        record_of(ops.MAP_ROWS, fields["records"], fields["stride"], i)["outer"] for i in range(5)
    ]
    assert seen == [0, 5, 2, 3, 4]
    third = rows.join(own[:2], second)  # of another number of slots
    backend.run(third)
    assert backend.device.started is not graph
    backend.run(rows.join(own[:5], third))
    assert backend.device.started is graph


@pytest.mark.parametrize(
    ("n", "slots"), [(2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (17, 32), (32, 32)]
)
def test_rows_are_padded_to_the_next_graph(backend, n, slots):
    rows = Rows(backend)
    joined = rows.join([rows.own(float(i)) for i in range(n)])
    backend.run(joined)
    _, fields = launched(backend)[1]
    assert fields["n_slot"] == slots
    assert ctypes.c_int64.from_address(fields["n_row"]).value == n


def test_rows_have_counters_of_their_own(backend):
    shared, own = Rows(backend), []
    for _ in range(2):
        program, step = Program(), np.array([1, 0, 0, 0, 0])
        fields = dict.fromkeys(ops.ATTEND.fields, 0) | {"step": step, "scale": 0.5}
        program.add(ops.ATTEND, (64, 2, 1, "f16", "f16"), **fields)
        program.add(
            ops.ATTEND_MERGE, (64, 1), step=step, partial=0, out=0, lse=0, n_head=2, n_split=2
        )
        own.append(backend.link(program))
    joined = shared.join(own)
    backend.run(joined)
    found = launched(backend)
    # Kernels of attention join the parts of rows of one query themselves.
    assert [name for name, _ in found] == ["gate", "each_attend_pack", "gate"]
    fields = found[1][1]
    one, other = (
        record_of(ops.ATTEND_PACK, fields["records"], fields["stride"], i)["scratch"]
        for i in range(2)
    )
    assert other - one == COUNTERS


def test_rows_of_other_ops_are_joined_anew(backend):
    rows = Rows(backend)
    first = rows.join([rows.own(1.0), rows.own(2.0)])
    backend.run(first)
    graph, own = backend.device.started, []
    for _ in range(2):
        program, y = Program(), zeros(N, np.float32)
        gate(program, np.array([1, 0, 0, 0, 0]), rows.x[0], y)
        gate(program, np.array([1, 0, 0, 0, 0]), y, y)
        own.append(backend.link(program))
    backend.run(rows.join(own, first))
    assert backend.device.started is not graph
    assert [name for name, _ in launched(backend)][1:3] == ["each_gate", "each_gate"]
