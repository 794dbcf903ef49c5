"""The CUDA backend's bookkeeping, on a device that is host memory and kernels that only count."""

import contextlib
import ctypes
import gc

import numpy as np
import pytest

from tamis.jit_kernels import cuda_backend, ops
from tamis.jit_kernels.cuda.driver import Function
from tamis.jit_kernels.cuda.scratch import TURNS, matmul_scratch
from tamis.jit_kernels.cuda.target import TARGETS
from tamis.jit_kernels.cuda_backend import CudaBackend
from tamis.jit_kernels.program import Program
from tamis.jit_kernels.types import zeros

ELSEWHERE = 1 << 40  # how far from memory that is mapped kernels see it


class Memory:
    """A device buffer: zeros of the host, given back when nothing holds it."""

    def __init__(self, device, n_bytes):
        self._array, self._device, self.n_bytes = np.zeros(n_bytes + 256, np.uint8), device, n_bytes
        self.address = (self._array.ctypes.data + 255) // 256 * 256  # as the driver aligns them
        device.held += n_bytes

    def __del__(self):
        self._device.held -= self.n_bytes


class StandIn:
    """What CudaBackend asks of a Device; launches are noted with their fields."""

    n_multiprocessor, target = 4, TARGETS["sm_90a"]

    def __init__(self):
        self.held, self.copied, self.started, self._capturing = 0, 0, [], None
        self.pinned, self.how, self.marks, self.overlapping = {}, [], [], []
        self.mapped = {}

    def use(self): ...

    def wait(self): ...

    def memory(self):
        return 1 << 30, 1 << 30

    def allocate(self, n_bytes):
        return Memory(self, n_bytes)

    def upload(self, address, host, n_bytes):
        self.copied += n_bytes
        ctypes.memmove(address, host, n_bytes)

    def download(self, host, address, n_bytes):
        ctypes.memmove(host, address, n_bytes)

    def launch(self, function, fields, *, beside, share, overlaps):
        self._capturing.append((function.handle, fields))
        self.how.append((beside, share))
        self.overlapping.append(overlaps)

    def mark(self):
        self.marks.append(len(self._capturing))
        return len(self._capturing)

    def nanoseconds(self, begin, end):
        return 100 * (end - begin)  # a launch takes 100 ns

    def pin(self, host, n_bytes):
        self.pinned[host] = n_bytes
        return True

    def unpin(self, host):
        del self.pinned[host]

    def map(self, host, n_bytes):
        self.mapped[host] = n_bytes
        return host + ELSEWHERE

    def unmap(self, host):
        del self.mapped[host]

    @contextlib.contextmanager
    def capture(self):
        self._capturing, found = [], []
        yield found
        found.append(self._capturing)

    def start(self, graph):
        self.started = graph


class Library:
    """Two kernels of MATMUL, one of every other op."""

    def __init__(self, device): ...

    def load(self, specs, progress=None): ...

    def functions(self, spec):
        if spec.op is ops.MATMUL:
            return [Function(f"matmul {rows}", 1, 1, 0, rows) for rows in ("few", "many")]
        return [Function(spec.op.name, 1, 1, 0, "any")]


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(cuda_backend, "Device", StandIn)
    monkeypatch.setattr(cuda_backend, "PtxLibrary", Library)
    return CudaBackend()


def gate(program, step, x, y):
    program.add(ops.GATE, ("silu",), step=step, gate=x, up=x, y=y, n=x.size)


def fields(backend, op):
    """The fields of each launch that the last replay made, by name."""
    return [dict(zip(op.fields, values, strict=True)) for _, values in backend.device.started]


def at(address, like):
    """The device's array at an address."""
    kind = ctypes.c_byte * like.nbytes
    return np.frombuffer(kind.from_address(address), like.dtype).reshape(like.shape)


def test_a_kernel_sees_what_was_there_at_link_and_what_was_sent(backend):
    step, x, y = np.array([1, 0, 0]), zeros(8, np.float32), zeros(8, np.float32)
    x[:] = 1
    program = Program()
    gate(program, step, x, y)
    linked = backend.link(program)
    x[:] = 2
    backend.run(linked)
    (seen,) = fields(backend, ops.GATE)
    np.testing.assert_array_equal(at(seen["gate"], x), 1)
    backend.send(x)
    np.testing.assert_array_equal(at(seen["gate"], x), 2)
    at(seen["y"], y)[:] = 7
    np.testing.assert_array_equal(y, 0)
    backend.fetch(y[2:4])
    np.testing.assert_array_equal(y, [0, 0, 7, 7, 0, 0, 0, 0])
    assert seen["n"] == 8


def test_views_of_an_array_and_programs_share_one_copy(backend):
    step, x, y = np.array([1, 0, 0]), zeros((2, 64), np.float32), zeros(64, np.float32)
    first, second = Program(), Program()
    gate(first, step, x[0], y)
    gate(second, step, x[1], y)
    linked = backend.link(first), backend.link(second)
    addresses = []
    for each in linked:
        backend.run(each)
        addresses.append(fields(backend, ops.GATE)[0]["gate"])
    assert addresses[1] - addresses[0] == 256
    assert addresses[0] % 64 == x.ctypes.data % 64


def test_memory_goes_with_the_program_and_weights_stay(backend):
    step = np.array([1, 0, 0])
    w = np.arange(64 * 64, dtype=np.float32).view(np.uint8)
    w.flags.writeable = False
    for _ in range(2):
        program, before = Program(), backend.device.copied
        program.add(
            ops.MATMUL, ("F32",), step=step, packed=0, w=w, bias=None,
            y=zeros((1, 64), np.float32), n_in=64, n_out=64, y_stride=64, add=0, scratch=0,
        )  # fmt: skip
        linked = backend.link(program)
        copied = backend.device.copied - before
        del linked, program
        gc.collect()
    assert copied < w.nbytes  # the second time they were there
    kept = w.nbytes + cuda_backend.ALIGNMENT + TURNS + matmul_scratch(64, 64)
    assert backend.device.held == kept
    backend.close()
    gc.collect()
    assert backend.device.held == 0


@pytest.mark.parametrize(
    ("n_tok", "kernel"), [(1, "matmul few"), (4, "matmul few"), (5, "matmul many")]
)
def test_the_step_record_says_which_kernels_run(backend, n_tok, kernel):
    step, x = np.array([1, 0, 0]), zeros((8, 64), np.float32)
    program = Program()
    program.add(
        ops.MATMUL, ("F32",), step=step, packed=0, w=zeros(64 * 64, np.float32), bias=None,
        y=zeros((8, 64), np.float32), n_in=64, n_out=64, y_stride=64, add=0, scratch=0,
    )  # fmt: skip
    gate(program, step, x[0], x[1])
    linked = backend.link(program)
    step[0] = n_tok
    backend.run(linked)
    assert [name for name, _ in backend.device.started] == [kernel, "gate"]
    backend.run(linked, 1, 2)
    assert [name for name, _ in backend.device.started] == ["gate"]


@pytest.mark.parametrize(
    ("n_tok", "how"),
    [(1, [(False, 1), (False, 2), (True, 2), (True, 2), (False, 1)]), (5, [(False, 1)] * 5)],
)
def test_products_of_the_same_few_rows_share_the_gpu(backend, n_tok, how):
    step, x = np.array([n_tok, 0, 0]), zeros((8, 64), np.float32)
    program = Program()
    gate(program, step, x[0], x[1])
    for i in range(3):
        program.add(
            ops.MATMUL, ("F32",), sync=i == 2, step=step, packed=0, w=zeros(64 * 64, np.float32),
            bias=None, y=zeros((8, 64), np.float32), n_in=64, n_out=64, y_stride=64, add=0,
            scratch=0,
        )  # fmt: skip
    gate(program, step, x[0], x[1])
    backend.run(backend.link(program))
    assert backend.device.how == how


def test_experts_have_scratch_for_their_rows_and_plan(backend):
    program, n_tok, n_used = Program(), 6, 2
    program.add(
        ops.MOE_MATMUL, ("Q8_0",), step=np.array([n_tok, 0, 0]),
        x=zeros((n_tok * n_used, 96), np.float32), w=zeros(34 * 3 * 5 * 4, np.uint8),
        ids=zeros((n_tok, n_used), np.int32), y=zeros((n_tok, n_used, 5), np.float32), n_in=96,
        n_out=5, n_used=n_used, n_expert=4, x_per_slot=1, scratch=0,
    )  # fmt: skip
    linked = backend.link(program)
    # Rows as float16, up to 128 elements, or 2.5 bytes an element; 12 slots, at most 12 tiles.
    assert backend.scratch(0).n_bytes == TURNS + 12 * 256 + 4 * (12 + 1 + 3 * 12)
    backend.run(linked)
    (seen,) = fields(backend, ops.MOE_MATMUL)
    assert seen["scratch"] == backend.scratch(0).address + TURNS


def test_a_timed_replay_tells_what_each_part_of_a_pass_took(backend):
    step, x = np.array([1, 7, 0]), zeros((2, 8), np.float32)
    program = Program()
    for part in ("", "", "select", "attend", "attend", ""):
        program.part = part
        program.add(
            ops.GATE, ("silu",), cost=lambda n_tok, pos: (n_tok, pos), step=step, gate=x[0],
            up=x[0], y=x[1], n=8,
        )  # fmt: skip
    linked = backend.link(program)
    backend.run(linked)  # not timed
    assert backend.device.marks == []
    assert all(backend.device.overlapping)
    backend.timed, backend.device.overlapping = True, []
    for _ in range(2):
        backend.run(linked)
        linked.count(1, 7)
    assert backend.device.marks == [0, 2, 3, 5, 6]
    assert backend.device.overlapping == [False, True, False, False, True, False]
    costs = linked.costs()
    assert [cost.cycles for cost in costs] == [0, 400, 200, 0, 400, 200]
    assert {(cost.n_call, cost.n_bytes, cost.n_flop) for cost in costs} == {(2, 2, 14)}
    linked.reset_costs()
    assert {(cost.n_call, cost.cycles) for cost in linked.costs()} == {(0, 0)}


def test_memory_that_is_fetched_to_is_pinned_as_long_as_it_is_there(backend):
    step, x, y = np.array([1, 0, 0]), zeros(8, np.float32), zeros(1 << 16, np.float32)
    program = Program()
    gate(program, step, x, y)
    linked = backend.link(program)
    backend.fetch(x, y[:9])
    backend.fetch(y)
    ((host, n_bytes),) = backend.device.pinned.items()  # x is small
    assert host <= y.ctypes.data < host + n_bytes < y.ctypes.data + y.nbytes + 256
    del linked, program
    gc.collect()
    assert not backend.device.pinned


def test_kernels_see_mapped_memory_itself_as_long_as_it_is_held(backend):
    step, x, y = np.array([1, 0, 0]), np.zeros((2, 64), np.float32), zeros(64, np.float32)
    held = backend.mapped(x)
    assert backend.device.mapped == {x.ctypes.data: x.nbytes}
    program = Program()
    gate(program, step, x[1], y)
    before = backend.device.held
    linked = backend.link(program)
    assert backend.device.held < before + x.nbytes + y.nbytes + 4096 + TURNS
    backend.run(linked)
    (seen,) = fields(backend, ops.GATE)
    assert seen["gate"] == x[1].ctypes.data + ELSEWHERE
    copied = backend.device.copied
    backend.send(x)
    backend.fetch(x[0])  # nothing is copied, and nothing of it pinned again
    assert (backend.device.copied, backend.device.pinned) == (copied, {})
    del held
    gc.collect()
    assert backend.device.mapped  # the Program's
    del linked, program
    gc.collect()
    assert not backend.device.mapped


def test_what_no_program_names_stays_as_it_is(backend):
    x = np.arange(3)
    backend.send(x)
    backend.fetch(x)
    assert x.tolist() == [0, 1, 2]
    assert backend.device.copied == 0
