"""The CUDA backend's bookkeeping, on a device that is host memory and kernels that only count."""

import ctypes
import gc
import mmap

import numpy as np
import pytest
from cuda_stand_in import ELSEWHERE, Library, StandIn, fields

from tamis.jit_kernels.backends import cuda as cuda_backend
from tamis.jit_kernels.backends import cuda_memory
from tamis.jit_kernels.backends.cuda import CudaBackend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec, Program
from tamis.jit_kernels.contract.types import zeros
from tamis.jit_kernels.cuda.lang.scratch import (
    COUNTERS,
    FEW_ROW,
    FEW_ROWS,
    matmul_scratch,
    some_scratch,
)
from tamis.jit_kernels.cuda.lang.target import TARGETS
from tamis.platform.memory import huge_zeros

FEW, SOME, MANY = "matmul few", "matmul some", "matmul many"


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr(cuda_backend, "Device", StandIn)
    monkeypatch.setattr(cuda_backend, "PtxLibrary", Library)
    return CudaBackend()


def gate(program, step, x, y):
    program.add(ops.GATE, ("silu",), step=step, gate=x, up=x, y=y, n=x.size)


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
    kept = w.nbytes + cuda_memory.ALIGNMENT + COUNTERS
    kept += max(matmul_scratch(64, 64), some_scratch(backend.n_thread))
    assert backend.device.held == kept
    backend.close()
    gc.collect()
    assert backend.device.held == 0


@pytest.mark.parametrize(
    ("n_tok", "kernel"),
    [(1, "matmul few"), (4, "matmul few"), (5, "matmul some"), (64, "matmul some"), (65, MANY)],
)
def test_the_step_record_says_which_kernels_run(backend, n_tok, kernel):
    step, x = np.array([1, 0, 0]), zeros((65, 64), np.float32)
    program = Program()
    program.add(
        ops.MATMUL, ("F32",), step=step, packed=0, w=zeros(64 * 64, np.float32), bias=None,
        y=zeros((64, 64), np.float32), n_in=64, n_out=64, y_stride=64, add=0, scratch=0,
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


def feed_forward(step):
    """A Program of rows, a gate of theirs and what is made of it."""
    program, packed = Program(), zeros(ops.packed_bytes(64, 512), np.uint8)
    x, y = zeros((64, 256), np.float32), zeros((64, 256), np.float32)
    gate, up = zeros((64, 512), np.float32), zeros((64, 512), np.float32)
    for source, rows, other, n, products in (
        ("rows", x, None, 256, (gate, up)), ("silu", gate, up, 512, (y,))
    ):  # fmt: skip
        program.add(
            ops.PACK_ROWS, ("quantised", source), step=step, x=rows, other=other, packed=packed,
            n=n, scratch=0, eps=0.0,
        )  # fmt: skip
        for i, to in enumerate(products):
            n_out = to.shape[1]
            program.add(
                ops.MATMUL, ("Q8_0",), sync=i == len(products) - 1, step=step, packed=packed,
                w=zeros(n_out * n // 32 * 34, np.uint8), bias=None, y=to, n_in=n, n_out=n_out,
                y_stride=n_out, add=0, scratch=0,
            )  # fmt: skip
    return program, packed


FUSED = ["pack_rows", "product_gate", "products"]
STAGED = ["staged_gate", "staged_products"]


@pytest.mark.parametrize(
    ("n_tok", "timed", "target", "names"),
    [
        (1, False, "sm_90a", FUSED),
        (4, False, "sm_90a", FUSED),
        (5, False, "sm_90a", STAGED),
        (64, False, "sm_90a", STAGED),
        (65, False, "sm_90a", ["pack_rows", MANY, MANY, "pack_rows", MANY]),
        (5, True, "sm_90a", ["pack_rows", SOME, SOME, "pack_rows", SOME]),
        (5, False, "sm_80", ["pack_rows", SOME, SOME, "pack_rows", SOME]),
        (1, True, "sm_90a", ["pack_rows", FEW, FEW, "pack_rows", FEW]),
        (1, False, "sm_80", ["pack_rows", FEW, FEW, "pack_rows", FEW]),
    ],
)
def test_ops_of_few_rows_are_launched_together(backend, n_tok, timed, target, names):
    backend.device.target = TARGETS[target]
    linked = backend.link(feed_forward(np.array([n_tok, 0, 0]))[0])
    backend.timed = timed
    backend.run(linked)
    assert [name for name, _ in backend.device.started] == names
    assert [graph[0][0] for graph in linked.launches(backend)] == names


def test_each_replay_is_launched_as_it_may_be(backend):
    step = np.array([1, 0, 0])
    linked = backend.link(feed_forward(step)[0])
    for n_tok, timed, n_launch in ((1, False, 3), (1, True, 5), (70, False, 5), (2, False, 3)):
        step[0], backend.timed = n_tok, timed
        backend.run(linked)
        assert len(backend.device.started) == n_launch
    backend.run(linked, 0, 3)
    assert [name for name, _ in backend.device.started] == ["pack_rows", "products"]
    backend.run(linked, 3)
    assert [name for name, _ in backend.device.started] == ["pack_rows", "products"]


def test_what_may_be_launched_is_loaded_with_the_rest(backend):
    program = feed_forward(np.array([1, 0, 0]))[0]
    fused = {KernelSpec(ops.PRODUCT_GATE, ("Q8_0", "silu")), KernelSpec(ops.PRODUCTS, ("Q8_0",))}
    backend.load(program.specs)
    assert program.specs | fused < backend.library.loaded
    loaded = set(backend.library.loaded)
    backend.run(backend.link(program))
    assert backend.library.loaded == loaded
    backend.device.target, backend.library.loaded = TARGETS["sm_80"], set()
    backend.load(program.specs)
    assert backend.library.loaded == program.specs


def test_rows_are_packed_to_the_other_half_of_their_room(backend):
    program, packed = feed_forward(np.array([4, 0, 0]))
    backend.run(backend.link(program))
    (_, first), (_, gate), (_, products) = backend.device.started
    first = dict(zip(ops.PACK_ROWS.fields, first, strict=True))["packed"]
    gate = dict(zip(ops.PRODUCT_GATE.fields, gate, strict=True))
    products = dict(zip(ops.PRODUCTS.fields, products, strict=True))
    assert (gate["packed"], products["packed"]) == (first, gate["to"])
    room, n_byte = gate["to"] - first, FEW_ROWS * FEW_ROW.size * 512 // 4
    assert room % cuda_memory.ALIGNMENT == 0
    assert n_byte <= room <= packed.nbytes - n_byte


def test_experts_have_scratch_for_their_rows_and_plan(backend):
    program, n_tok, n_used = Program(), 6, 2
    program.add(
        ops.MOE_MATMUL, ("Q8_0",), step=np.array([n_tok, 0, 0]),
        x=zeros((n_tok * n_used, 96), np.float32), w=zeros(34 * 3 * 5 * 4, np.uint8),
        ids=zeros((n_tok, n_used), np.int32), y=zeros((n_tok, n_used, 5), np.float32), n_in=96,
        n_out=5, n_used=n_used, n_expert=4, x_per_slot=1, scratch=0,
    )  # fmt: skip
    linked = backend.link(program)
    # Rows as float16, up to 128 elements, or 3 bytes an element; 12 slots, at most 12 tiles.
    assert backend.scratch(0).n_bytes == COUNTERS + 12 * 288 + 4 * (12 + 1 + 3 * 12)
    backend.run(linked)
    (seen,) = fields(backend, ops.MOE_MATMUL)
    assert seen["scratch"] == backend.scratch(0).address + COUNTERS


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


def test_what_a_device_is_shown_is_zero_and_in_pages_that_hold_nothing_else():
    arrays = [huge_zeros((2, 3), np.dtype(np.float32))[1] for _ in range(3)]
    pages = {array.ctypes.data // mmap.PAGESIZE for array in arrays}
    assert len(pages) == 3
    assert all(array.ctypes.data % mmap.PAGESIZE == 0 for array in arrays)
    arrays[0][:] = 1
    assert not arrays[1].any()
    assert arrays[0].sum() == 6


def test_kernels_see_mapped_memory_itself_as_long_as_it_is_held(backend):
    step, x, y = np.array([1, 0, 0]), np.zeros((2, 64), np.float32), zeros(64, np.float32)
    held = backend.mapped(x)
    assert backend.device.mapped == {x.ctypes.data: x.nbytes}
    program = Program()
    gate(program, step, x[1], y)
    before = backend.device.held
    linked = backend.link(program)
    assert backend.device.held < before + x.nbytes + y.nbytes + 4096 + COUNTERS
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
