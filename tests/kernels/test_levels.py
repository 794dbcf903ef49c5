"""Kernels made for a lower level of CPU features: what they compute, and what code they are.

The host's own level is what all other tests run.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import llvmlite.binding as llvm
import numpy as np
import op_tests
import pytest
from guarded import at_level, backend, in_child
from levels import skip_unless_runnable
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.compile.library import KernelLibrary
from tamis.jit_kernels.compile.store import fingerprint
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cpu.lang import features
from tamis.platform import processor

attention, elementwise, weights = map(op_tests.module, ("attention", "elementwise", "matmul"))
KERNELS: list = []  # of the host's level
TYPES = ["Q4_K", "Q8_0"]
STRIPS = ["Q5_0x16", "Q6_Kx16", "Q8_0x16", "Q4_Kx16", "Q8_0x16_exact"]
AT = 2  # of attention.HEADS: prefill and a part of a KV head's heads
HEADS = attention.HEADS[AT]
AT_Q8, Q8_0 = (2, 4), ("q8_0", "q8_0")  # one token of an odd number of blocks, and prefill
HEADS_Q8 = [attention.HEADS_Q8[at] for at in AT_Q8]
SPECS = [
    *(KernelSpec(op, (type_,)) for op in (ops.EMBED, ops.MATMUL) for type_ in TYPES),
    *(KernelSpec(ops.MATMUL, (type_,)) for type_ in STRIPS),
    *(KernelSpec(ops.REPACK, (ops.STRIP_TYPES[type_],)) for type_ in STRIPS),
    *(KernelSpec(ops.PACK_ROWS, (form, "rows")) for form in ("quantised", "bytes")),
    KernelSpec(ops.RMS_NORM, (0,)),
    KernelSpec(ops.GATE, ("silu",)),
    KernelSpec(ops.ROPE_APPEND, (80, 0, *attention.F16)),
    KernelSpec(ops.ROPE_APPEND, (64, 1, *attention.F16)),
    KernelSpec(ops.ATTEND, (HEADS.head_dim, HEADS.group, HEADS.q_block, *attention.F16)),
    KernelSpec(ops.ATTEND_MERGE, (HEADS.head_dim, 16)),
    KernelSpec(ops.ROPE_APPEND, (*attention.SHAPE_Q8[:2], *Q8_0)),
    *(KernelSpec(ops.ATTEND, (h.head_dim, h.group, h.q_block, *Q8_0)) for h in HEADS_Q8),
]
LOWER = ["generic", "avx2"]


def body(test, **parameters):
    """Run the body of another module's test here, in the child."""
    test.__wrapped__(**parameters)


@in_child
def check_ops(level):
    with at_level(level):
        backend(1).load(SPECS)
        for type_ in TYPES:
            body(weights.test_embed_decodes_rows, type_=type_, size=1)
            for n_tok, n_out, with_bias, add in weights.PRODUCTS:
                body(
                    weights.test_matmul_is_the_product, type_=type_, n_tok=n_tok, n_out=n_out,
                    with_bias=with_bias, add=add, size=1,
                )  # fmt: skip
        for type_ in STRIPS:
            body(weights.test_strips_give_the_product_of_their_rows, type_=type_, size=1)
        body(elementwise.test_rms_norm, add=0, n_tok=2, rows_per_tok=5, n=67, row=2)
        body(elementwise.test_gate, activation="silu", n_tok=5, n=33)
        for shape, types in (
            ((80, 0, 3, 3, 13), attention.F16),
            ((64, 1, 4, 2, 16), attention.F16),
            (attention.SHAPE_Q8, Q8_0),
        ):
            body(
                attention.test_heads_get_norm_rope_and_append, shape=shape, types=types, n_tok=37,
                pos=40, normed=True,
            )  # fmt: skip
        for at in AT_Q8:
            body(
                attention.test_attention_over_each_kv_type, at=at, n_tok=37, pos=70,
                block=16, types=Q8_0,
            )  # fmt: skip
        for block in (1, 64):
            body(attention.test_attention_to_a_selection, at=AT, n_tok=37, pos=100, block=block)


@pytest.mark.parametrize("level", LOWER)
def test_ops_are_right_at_a_lower_level(level):
    skip_unless_runnable(level)
    check_ops(level=level)


def test_a_model_gives_the_same_logits_at_a_lower_level(tmp_path):
    skip_unless_runnable("avx2")
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec(type_="Q8_0"))
    found = []
    for library in (KernelLibrary(), KernelLibrary(level="avx2")):
        engine = Engine.load(path, n_threads=2, library=library)
        session = engine.session(n_ctx=128)
        found.append([session.prefill(list(range(1, 70))), session.decode(3)])
        engine.close()
    # Sums in another order; at decode an activation near a tie of its 15 bits may go either way.
    np.testing.assert_allclose(found[1], found[0], rtol=0, atol=1e-3 * np.abs(found[0]).max())


# --- code ----------------------------------------------------------------------------------------

ASSEMBLY = """
import json, sys
from tamis.jit_kernels.cpu.lang import features
features.use(sys.argv[1])
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.cpu.runtime.compiler import optimised, take_only_ir, target_machine
from tamis.jit_kernels.contract.program import KernelSpec
take_only_ir()
machine = target_machine()
for name, constants in json.loads(sys.argv[2]):
    spec = KernelSpec(getattr(ops, name), tuple(constants))
    print(machine.emit_assembly(optimised(spec, machine)))
"""
INSPECTED = [
    ("MATMUL", ["Q8_0"]), ("RMS_NORM", [0]), ("ROPE_APPEND", [64, 1, "f16", "q8_0"]),
    ("ATTEND", [64, 2, 16, "f16", "f16"]), ("ATTEND", [64, 2, 1, "q8_0", "q8_0"]),
]  # fmt: skip
# What no code of a level may have, and what it must have.
ABSENT = {
    "generic": r"%[yz]mm|^\s+v[a-z]",
    "avx2": r"%zmm|%[xy]mm(1[6-9]|2[0-9]|3[01])|%k[0-7]|vpdp",
    "avx2-vnni": r"%zmm|%[xy]mm(1[6-9]|2[0-9]|3[01])|%k[0-7]",
    "avx512": r"vpdp",
    "avx512-vnni": r"vpmaddubsw",
    "neon": r"\b[us]+dot\b|smmla",
    "neon-dotprod": r"\busdot\b|smmla",
    "neon-i8mm": r"\bsaddlp\b",
}
PRESENT = {
    "generic": r"^\s+mulps\s",
    "avx2": r"vfmadd.*%ymm",
    "avx2-vnni": r"\{vex\}\s+vpdpbusd.*%ymm",
    "avx512": r"vfmadd.*%zmm",
    "avx512-vnni": r"vpdpbusd.*%zmm",
    "neon": r"\bsmull2?\s+v",
    "neon-dotprod": r"\bsdot\s+v",
    "neon-i8mm": r"\bsmmla\s+v",
}


@pytest.fixture(scope="module")
def assembly():
    """Of each level the process that prints its code; two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {level: pool.submit(_assembly, level) for level in features.LEVELS}


def _assembly(level):
    kernels = INSPECTED if level in LOWER else INSPECTED[:1]
    if level == "neon-i8mm":  # what it adds to the level below is for panels
        kernels = [("MATMUL", ["Q8_0x16"])]
    return subprocess.run(
        [sys.executable, "-c", ASSEMBLY, level, json.dumps(kernels)],
        env=os.environ | {"NUMBA_OPT": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="names of x86's instructions")
@pytest.mark.parametrize("level", features.LEVELS)
def test_code_of_a_level_has_its_instructions_and_no_others(assembly, level):
    done = assembly[level].result()
    assert done.returncode == 0, done.stderr
    found = re.search(ABSENT[level], done.stdout, re.MULTILINE)
    assert not found, found
    assert re.search(PRESENT[level], done.stdout, re.MULTILINE)
    called = set(re.findall(r"\bcall\w*\s+\*?([a-z_]\w*)", done.stdout))
    assert not [name for name in called if name.startswith("__")], "the compiler's library"


# --- choosing ------------------------------------------------------------------------------------


def test_levels_have_folders_of_their_own():
    names = [fingerprint(level) for level in features.LEVELS.values()]
    assert len(set(names)) == len(features.LEVELS)
    assert fingerprint() == fingerprint(features.host())


def test_the_host_is_the_default(tmp_path):
    assert KernelLibrary(tmp_path).level == features.host()
    assert KernelLibrary(tmp_path, level="generic").level == features.LEVELS["generic"]
    assert CpuBackend(1, KernelLibrary(tmp_path, level="generic")).library.level.name == "generic"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [fingerprint(), fingerprint(features.LEVELS["generic"])]
    )


def test_a_level_that_cannot_run_here_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="level is 'sse9', expected one of generic, avx2"):
        KernelLibrary(tmp_path, level="sse9")
    monkeypatch.setattr(processor, "_cpuinfo", lambda: {"flags": "fpu avx2 fma f16c"})
    with pytest.raises(ValueError, match=r"needs avxvnni, which .* highest level is avx2$"):
        KernelLibrary(tmp_path, level="avx2-vnni")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("found", "level"),
    [
        ("", "generic"),
        ("avx2", "generic"),
        ("avx2 fma f16c", "avx2"),
        ("avx2 fma f16c avx512f", "avx2"),
        ("avx2 fma f16c avx_vnni", "avx2-vnni"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx_vnni", "avx512"),
        ("avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_vnni", "avx512-vnni"),
    ],
)
def test_the_hosts_level_is_the_highest_whose_instructions_it_has(monkeypatch, found, level):
    monkeypatch.setattr(processor, "_cpuinfo", lambda: {"flags": f"sse2 {found}"})
    assert features.host().name == level


def test_linux_and_llvm_say_the_same_of_this_cpu():
    found = {name for name, on in llvm.get_host_cpu_features().items() if on}
    for level in features.LEVELS.values():
        assert features.missing(level) == [name for name in level.needs if name not in found]


def test_another_cpu_has_a_folder_of_its_own(monkeypatch):
    cpu = processor._cpuinfo()
    here, lower = fingerprint(), fingerprint(features.LEVELS["generic"])
    monkeypatch.setattr(processor, "_cpuinfo", lambda: cpu | {"model": "another"})
    assert fingerprint() != here
    assert fingerprint(features.LEVELS["generic"]) == lower
    monkeypatch.setattr(processor, "_cpuinfo", lambda: cpu | {"vendor_id": "another"})
    assert fingerprint(features.LEVELS["generic"]) != lower


@pytest.mark.parametrize(("vendor", "cache"), [("AuthenticAMD", 2), ("GenuineIntel", 3)])
def test_memory_is_asked_into_the_cache_that_waits_for_most(monkeypatch, vendor, cache):
    monkeypatch.setattr(processor, "_cpuinfo", lambda: {"vendor_id": vendor})
    assert features.reads_ahead()[0] == cache


@pytest.mark.parametrize("vendor", features.VENDORS)
def test_a_level_for_any_cpu_of_a_vendor_depends_on_nothing_of_this_one(monkeypatch, vendor):
    name = f"{features.host().name}@{vendor}"
    level = features.made_for(name)
    assert (level.name, level.vendor, level.needs) == (name, vendor, features.host().needs)
    before = fingerprint(level)
    assert before != fingerprint()
    assert features.target(level).cpu == "x86-64"
    cpu = processor._cpuinfo()
    monkeypatch.setattr(processor, "_cpuinfo", lambda: cpu | {"model": "another", "vendor_id": "x"})
    assert fingerprint(level) == before
    monkeypatch.setattr(features, "_chosen", level)
    assert features.reads_ahead()[0] == {"GenuineIntel": 3, "AuthenticAMD": 2}[vendor]
