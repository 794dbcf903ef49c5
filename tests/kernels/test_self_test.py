"""Kernels are tried once on a machine; one that gives wrong values is refused and named."""

import struct

import pytest

from tamis.jit_kernels.compile import self_test
from tamis.jit_kernels.compile.elf import _MACHINES, _sections, load_code
from tamis.jit_kernels.compile.library import CompileError, KernelLibrary
from tamis.jit_kernels.compile.store import open_folder, write_object
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.platform.processor import MACHINE

GATE = KernelSpec(ops.GATE, ("silu",))
PRODUCT = [
    KernelSpec(ops.PACK_ROWS, ("bytes", "rows")),
    KernelSpec(ops.REPACK, ("Q8_0",)),
    KernelSpec(ops.MATMUL, ("Q8_0x16_exact",)),
    KernelSpec(ops.MATMUL, ("Q8_0x16",)),
]
F16, Q8_0, Q4_0 = ("f16", "f16"), ("q8_0", "q8_0"), ("q4_0", "q4_0")
KERNELS = [
    GATE,
    KernelSpec(ops.RMS_NORM, (0,)),
    KernelSpec(ops.EMBED, ("Q4_K",)),
    *PRODUCT,
    KernelSpec(ops.PACK_ROWS, ("quantised", "rows")),
    KernelSpec(ops.MATMUL, ("Q4_K",)),
    KernelSpec(ops.ATTEND, (64, 2, 16, *F16)),
    KernelSpec(ops.ATTEND, (64, 7, 1, *Q8_0)),
    KernelSpec(ops.ATTEND, (256, 4, 1, *Q4_0)),
    KernelSpec(ops.ROPE_TABLE, ()),
    KernelSpec(ops.ROPE_HEADS, (64, 0, "norm")),
    KernelSpec(ops.ROPE_HEADS, (64, 1, "rope")),
    KernelSpec(ops.ROPE_APPEND, (64, 1, *F16)),
    KernelSpec(ops.ROPE_APPEND, (64, 0, "q8_0", "q4_0")),
    KernelSpec(ops.LOGIT_PARTS, ()),
    KernelSpec(ops.LOGIT_BEST, ()),
]


@pytest.fixture(scope="module")
def loaded():
    found = KernelLibrary()
    found.load(KERNELS)
    return found


def damaged(code):
    """Object code with every float constant's exponent changed: it runs, and is wrong.

    Other words, which code may add to addresses, are no floats of a usual size.
    """
    data = bytearray(code)
    for section in _sections(code, _MACHINES[MACHINE]):
        if section.type == 1 and section.flags == 2 | 0x10:  # constants that may be merged
            for at in range(section.offset, section.offset + section.size - 3, 4):
                (value,) = struct.unpack_from("<f", code, at)
                data[at + 3] ^= 1e-12 < abs(value) < 1e12
    assert data != code
    return bytes(data)


@pytest.mark.parametrize("spec", KERNELS, ids=lambda spec: spec.symbol)
def test_right_kernels_pass(loaded, spec):
    assert self_test.passes(spec, lambda s: loaded._addresses.get(s.symbol)) is True


ATTEND, APPEND = (64, 2, 16, *F16), (64, 1, *F16)
WRONG = [GATE, KernelSpec(ops.ATTEND, ATTEND), KernelSpec(ops.ROPE_APPEND, APPEND)]


@pytest.mark.parametrize("spec", WRONG, ids=lambda spec: spec.symbol)
def test_wrong_constants_are_noticed(loaded, spec):
    code = damaged(loaded._code.take([spec])[spec.symbol])
    addresses = load_code({spec.symbol: code})
    assert self_test.passes(spec, lambda s: addresses.get(s.symbol)) is False


def test_a_product_waits_for_what_packs_its_rows(loaded):
    alone = {PRODUCT[-1].symbol: loaded.address(PRODUCT[-1])}
    assert self_test.passes(PRODUCT[-1], lambda s: alone.get(s.symbol)) is None


def test_a_wrong_kernel_is_refused_and_named_and_its_neighbours_are_usable_later(loaded, tmp_path):
    folder = open_folder(tmp_path)
    norm = KERNELS[1]
    for spec in (GATE, norm):
        code = loaded._code.take([spec])[spec.symbol]
        write_object(folder, spec.symbol, damaged(code) if spec is GATE else code)
    own = KernelLibrary(tmp_path)
    with pytest.raises(CompileError, match=f"kernel {GATE.symbol} gives wrong values"):
        own.load([GATE, norm])
    own.load([norm])
    assert own.address(norm)
    with pytest.raises(KeyError):
        own.address(GATE)


def test_a_kernel_is_tried_once_on_a_machine(loaded, tmp_path, monkeypatch):
    folder, tried = open_folder(tmp_path), []

    def passes(spec, address):
        tried.append(spec)
        return True

    monkeypatch.setattr(self_test, "passes", passes)
    write_object(folder, GATE.symbol, loaded._code.take([GATE])[GATE.symbol])
    for _ in range(2):
        KernelLibrary(tmp_path).load([GATE])
    assert tried == [GATE]
    (tmp_path / self_test.NOTED).unlink()
    KernelLibrary(tmp_path).load([GATE])
    assert tried == [GATE, GATE]
