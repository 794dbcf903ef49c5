"""CUDA without a GPU: kernels compile to the PTX that is meant, and what is missing is said."""

import importlib
import json
import re
import shutil
import subprocess
import sys

import pytest

from tamis.engine.engine import Engine
from tamis.jit_kernels import cuda as cuda_kernels
from tamis.jit_kernels.compile.store import fingerprint, read_object
from tamis.jit_kernels.compile.workers import Command, CompileError, compile_specs
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cuda.lang.target import TARGETS, target_of
from tamis.jit_kernels.cuda.runtime.driver import CudaError, Device
from tamis.jit_kernels.cuda.runtime.ptx_library import PtxLibrary

BY_NAME = ops.declared()
F16 = ("f16", "f16")  # types of K and of V
NO_CONSTANT = (
    r"(?s)\A(?!.*ld\.global\.nc)"  # a backing store in RAM is written within the same graph
)
# Weights come in bulk, to where a barrier says that they are there.
IN_BULK = ["cp.async.bulk.shared", "mbarrier.arrive.expect_tx", "mbarrier.try_wait"]
# One kernel of every op, and what its PTX must contain: the instructions it is written for.
MEANT = {
    KernelSpec(ops.EMBED, ("Q4_1",)): ["ld.global.nc", "st.global.v4.f32"],
    KernelSpec(ops.MATMUL, ("Q8_0",)): [
        "wgmma|mma.sync",
        "wgmma|ldmatrix",
        "cp.async.(bulk|cg)",
        "ld.shared",
        "dp4a",
    ],
    KernelSpec(ops.MATMUL, ("MXFP4",)): ["wgmma|mma.sync", "prmt", "dp4a.s32.s32"],
    # Grids of codebooks are in device memory.
    **{
        KernelSpec(ops.MATMUL, (type_,)): [r"\.global .*table", "wgmma|mma.sync", f"dp4a.{sign}32"]
        for sign, types in (
            ("u32.s", ("IQ1_S", "IQ1_M")),
            ("s32.s", ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")),
        )
        for type_ in types
    },
    **{
        KernelSpec(ops.MATMUL, (type_,)): ["wgmma|mma.sync", "dp4a"]
        for type_ in ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "NVFP4")
    },
    KernelSpec(ops.MATMUL, ("F16",)): [
        "wgmma|mma.sync",
        "ld.global.nc.L1::no_allocate.v4.u32",
        "ld.global.v4.f32",
        "fma.rn.f32",
    ],
    KernelSpec(ops.PRODUCTS, ("Q4_K",)): [*IN_BULK, "dp4a.u32.s32", "st.global.f32"],
    KernelSpec(ops.PRODUCT_NORM, ("Q8_0",)): [
        *IN_BULK,
        "dp4a.s32.s32",
        "rsqrt.approx",
        "st.global.u8|st.global.b8",
    ],
    KernelSpec(ops.PRODUCT_GATE, ("Q4_K", "silu")): [*IN_BULK, "dp4a.u32.s32", "ex2.approx"],
    KernelSpec(ops.STAGED_PRODUCTS, ("Q5_0", "norm")): [
        *IN_BULK,
        "mma.sync",
        "st.shared.v4.u32",
        "shfl.sync.bfly",
    ],
    KernelSpec(ops.STAGED_PRODUCTS, ("Q4_K", "packed")): [*IN_BULK, "mma.sync", "ld.global.v4.u32"],
    KernelSpec(ops.STAGED_GATE, ("Q6_K", "silu", "norm")): [*IN_BULK, "mma.sync", "ex2.approx"],
    KernelSpec(ops.PRODUCT_ROPE_APPEND, ("Q8_0", 0)): [*IN_BULK, "st.global.u16|st.global.b16"],
    KernelSpec(ops.PRODUCT_ROPE_APPEND, ("Q4_K", 1)): [*IN_BULK, "st.global.u16|st.global.b16"],
    KernelSpec(ops.MOE_ROUTE, ("softmax",)): [
        "shfl.sync.bfly",
        "redux.sync.min.s32",
        "ex2.approx",
    ],
    KernelSpec(ops.MOE_ROUTE, ("softplus",)): ["shfl.sync.idx", "sqrt"],
    KernelSpec(ops.MOE_GROUPS, ()): ["st.global"],
    KernelSpec(ops.STREAM_WEIGHTS, ()): ["ld.global.f32", "ex2.approx", "st.global.f32"],
    KernelSpec(ops.STREAM_MIX, ()): ["ld.global.f32", "fma.rn.f32", "st.global.f32"],
    KernelSpec(ops.RESIDUAL_MIX, ()): ["shfl.sync", "bar.sync", "ex2.approx", "st.global.f32"],
    KernelSpec(ops.MOE_BIAS, ()): ["ld.global.f32", "st.global.f32"],
    KernelSpec(ops.MOE_MATMUL, ("Q4_K",)): [
        "wgmma|mma.sync",
        "cp.async.(bulk|cg)",
        "st.shared.v4.u32",
        "atom.*shared",
        "dp4a.u32.s32",
    ],
    KernelSpec(ops.MOE_MATMUL, ("F32",)): ["wgmma|mma.sync", "st.shared.v4.u32", "shfl.sync.bfly"],
    KernelSpec(ops.MOE_SUM, ()): ["ld.global.f32", "st.global.f32"],
    KernelSpec(ops.PACK_ROWS, ("quantised", "norm")): ["st.global.u16|st.global.b16", "bar.sync"],
    KernelSpec(ops.RMS_NORM, (0,)): ["shfl.sync", "bar.sync"],
    KernelSpec(ops.LAYER_NORM, ()): ["shfl.sync", "bar.sync", "sqrt.rn.f32"],
    KernelSpec(ops.MAP_ROWS, ("tanh", 0)): ["ex2.approx", "st.global.f32"],
    KernelSpec(ops.MAP_ROWS, ("gelu_erf", 1)): ["ld.global.f32", "st.global.f32"],
    KernelSpec(ops.ROPE_HEADS, (64, 1, "rope")): ["shfl.sync", "st.global.f32"],
    KernelSpec(ops.PLACE_HEADS, ()): ["ld.global.f32", "st.global.f32"],
    KernelSpec(ops.ADD_POSITIONS, ()): ["ld.global.f32", "st.global.f32"],
    KernelSpec(ops.ROPE_TABLE, ()): ["f64"],
    KernelSpec(ops.ROPE_APPEND, (64, 0, *F16)): ["st.global.u16|st.global.b16"],
    KernelSpec(ops.ROPE_APPEND, (64, 1, "q8_0", "q4_0")): ["st.global.u8", "mul.rn.f32", "redux"],
    KernelSpec(ops.ATTEND, (64, 3, 1, *F16)): [
        "ld.global.nc.v4.u32",
        "mma.sync",
        "ex2.approx",
        "shfl.sync.bfly",
    ],
    KernelSpec(ops.ATTEND, (64, 3, 16, *F16)): [
        r"wgmma.*\{%r|mma.sync",
        "wgmma|ldmatrix",
        "mbarrier|x4.trans",
        "cp.async",
    ],
    # Keys that are multiplied as bytes, values that become float16 between registers and
    # matrix units; or both before shared memory.
    KernelSpec(ops.ATTEND, (128, 4, 1, "q8_0", "q4_0")): [
        "ld.global.nc.v2.u32",
        "mma.sync.*s8.s8",
        "lop3.b32",
        "mul.rn.f16x2",
        "mma.sync.*f16.f16",
    ],
    KernelSpec(ops.ATTEND, (96, 1, 1, "q4_0", "q8_0")): [
        "ld.global.nc.u16",
        "mma.sync.*s8.s8",
        r"prmt.*0x64646464",
        "mul.rn.f16x2",
        "mma.sync.*f16.f16",
    ],
    KernelSpec(ops.ATTEND, (64, 3, 16, "q8_0", "q4_0")): [
        "ld.global.nc.u32",
        r"prmt.*0x64646464",
        "st.shared.v4.u32",
        "fence.proxy.async|ldmatrix",
    ],
    KernelSpec(ops.ATTEND_PACK, (128, 4, *F16)): [
        "ld.global.nc.v4.u32",
        "mma.sync",
        "st.global.u8|st.global.b8",
    ],
    KernelSpec(ops.ATTEND_SCORE_MOD, (64, 3, 16, *F16)): ["ld.global.nc", "ex2.approx", "bar.sync"],
    KernelSpec(ops.ATTEND_SCORE_MOD, (64, 3, 1, "q8_0", "q4_0")): ["ex2.approx", "bar.sync"],
    KernelSpec(ops.ATTEND_MERGE, (64, 16)): ["ex2.approx"],
    KernelSpec(ops.SCALE_BY_POSITION, ()): ["fma.rn.f32", "st.global.f32"],
    KernelSpec(ops.ATTEND_SINK, ()): ["ex2.approx"],
    KernelSpec(ops.AUDIT_HEADS, (64, *F16)): ["ld.global.nc.v4", "ex2.approx", "sqrt.rn.f64"],
    KernelSpec(ops.AUDIT_HEADS, (64, "q8_0", "q4_0")): ["ld.global.nc.u32", "sqrt.rn.f64"],
    KernelSpec(ops.GATE, ("silu",)): ["ex2.approx"],
    KernelSpec(ops.GATE_CLAMPED, ("gpt_oss",)): ["ex2.approx", "min.f32", "max.f32"],
    KernelSpec(ops.LOGIT_PARTS, ()): ["atom.*shared", "vote.sync.ballot", "ex2.approx"],
    KernelSpec(ops.LOGIT_BEST, ()): ["atom.*shared", "vote.sync.ballot", "ex2.approx"],
    KernelSpec(ops.SELECT_WINDOW, ()): ["st.global.u32"],
    KernelSpec(ops.SCORE_KEYS, (64, 3, 3, "f16")): ["ld.global.nc.v4.u32", "mma.sync"],
    KernelSpec(ops.SCORE_KEYS, (128, 4, 4, "q8_0")): ["ld.global.nc.v2.u32", "mma.sync.*s8.s8"],
    KernelSpec(ops.SCORE_COPY, (128, 4, 4, "f16", 4)): [
        "mma.sync.*u8.s8",
        "ld.global.v4.u32",
        "st.global.f32",
    ],
    KernelSpec(ops.SCORE_COPY, (80, 7, 1, "q8_0", 8)): ["mma.sync.*s8.s8", "st.global.f32"],
    KernelSpec(ops.COPY_CANDIDATES, (128, 4, 4, "f16")): [
        "atom.*shared",
        "atom.global.add.u32",
        "ld.global.nc.v4",
        "shfl.sync.bfly",
    ],
    KernelSpec(ops.SELECT_BEST, ()): ["atom.*shared", "red.global.or", "popc"],
    KernelSpec(ops.SELECT_TOP_K, ()): ["atom.*shared", "vote.sync.ballot", "popc"],
    KernelSpec(ops.SELECT_UNION, ()): ["red.global.or", "popc"],
    KernelSpec(ops.SELECT_PACK, ()): ["st.global.u32"],
    KernelSpec(ops.SELECT_JOIN, ()): ["atom.*shared.*or|red.*shared.*or", "popc"],
    KernelSpec(ops.SLASH_LINES, (64, 2)): ["mma.sync", "ex2.approx", "atom.*shared"],
    KernelSpec(ops.SLASH_SELECT, ()): ["atom.*shared.*or|red.*shared.*or", "popc"],
    KernelSpec(ops.QUEST_BOUNDS, (64, "f16")): ["ld.global.nc", "st.global.u16|st.global.b16"],
    KernelSpec(ops.QUEST_BOUNDS, (64, "q8_0")): ["ld.global.nc", "st.global.u16|st.global.b16"],
    KernelSpec(ops.QUEST_SCORE, (64, 3, 1)): ["ld.global.nc.v4.u32", "mma.sync"],
    KernelSpec(ops.DELTA_ROWS, ()): ["st.global.u64"],
    KernelSpec(ops.DELTA_ADD, (64,)): ["ld.global.f32", "st.global.f32"],
    KernelSpec(ops.HIP_ESTIMATE, (64, 3)): ["ld.global.nc.v4.u32", "mma.sync", "vote.sync.ballot"],
    KernelSpec(ops.HIP_MEANS, (64, "f16")): ["ld.global.nc", "st.global.u8", "shfl.sync.bfly"],
    KernelSpec(ops.HIP_SEARCH, (64, 3, "f16")): ["mma.sync.*s8.s8", "ld.global.nc", "ex2.approx"],
    KernelSpec(ops.HIP_MEANS, (64, "q8_0")): ["ld.global.nc", "st.global.u8", "shfl.sync.bfly"],
    KernelSpec(ops.HIP_SEARCH, (64, 3, "q8_0")): ["mma.sync.*s8.s8", "ld.global.nc"],
    KernelSpec(ops.HIP_SELECT, ()): ["st.global.u32", "bar.sync"],
    KernelSpec(ops.SELECT_PSAW, ()): ["st.global.u32"],
    KernelSpec(ops.CIS_GATE, (64, 4, 1)): ["shfl.sync.bfly", "bar.sync"],
    KernelSpec(ops.CIS_SETS, ()): ["atom.*shared", "red.global.or", "popc"],
    KernelSpec(ops.COPY_ROWS, ()): ["st.global.f32"],
    KernelSpec(ops.TAIL_SIZE, (64, 7, *F16)): ["shfl.sync.bfly", "ld.global.nc.v4"],
    KernelSpec(ops.TAIL_SIZE, (128, 1, "q8_0", "q8_0")): ["shfl.sync.bfly", "cvt.rn.f32.s32"],
    KernelSpec(ops.TAIL_PLAN, ()): ["cvt.rzi.s64.f64", "st.global"],
    KernelSpec(ops.TAIL_DRAW, ()): ["cvt.rzi.s64.f64", "fma.rn.f64|fma.rn.f32"],
    KernelSpec(ops.TAIL_MERGE, ()): ["st.global.f32|st.global.b32"],
    KernelSpec(ops.TWILIGHT_WEIGH, (64, 7, "f16")): ["ld.global.nc", "bar.sync"],
    KernelSpec(ops.TWILIGHT_WEIGH, (128, 1, "q8_0")): ["ld.global.nc", "bar.sync"],
    KernelSpec(ops.TWILIGHT_PRUNE, (7,)): ["ex2.approx", "shfl.sync.bfly", "bar.sync"],
    KernelSpec(ops.CLUSTER_VALUES, (64, "f16", "f16")): ["ld.global.nc", "st.global"],
    KernelSpec(ops.CLUSTER_ZONES, (7,)): ["ex2.approx", "red.global.or", "bar.sync"],
    KernelSpec(ops.CLUSTER_ESTIMATE, (128, 4)): ["ex2.approx", "shfl.sync.bfly"],
    KernelSpec(ops.METER_SAMPLE, (128, 4)): ["ld.global.nc.v4.u32", "dp4a.s32.s32", "f64"],
    KernelSpec(ops.METER_WEIGH, (128, 4, 1, "f16")): ["ld.global.nc.v4", "redux.sync.min.s32"],
    KernelSpec(ops.METER_WEIGH, (64, 7, 1, "q8_0")): ["ld.global.nc", "shfl.sync.bfly"],
    KernelSpec(ops.METER_WIDEN, ()): ["bar.sync", "st.global.u32"],
    KernelSpec(ops.METER_TAKE, (64,)): ["ld.global.f32", "st.global.f32"],
    KernelSpec(ops.TACTIC_SEED, (64,)): ["shfl.sync.bfly", "st.global.u16|st.global.b16"],
    KernelSpec(ops.TACTIC_ASSIGN, (64,)): ["ld.global.nc.v4.u32", "mma.sync"],
    KernelSpec(ops.TACTIC_MEAN, (64,)): ["vote.sync.ballot", "popc"],
    KernelSpec(ops.TACTIC_SCORE, (64, 3)): ["ld.global.nc.v4.u32", "mma.sync"],
    KernelSpec(ops.TACTIC_RANK, ()): ["atom.*shared", "f64", "ex2.approx"],
    KernelSpec(ops.TACTIC_BUDGET, (64,)): ["mma.sync", "f64", "ex2.approx"],
    KernelSpec(ops.TACTIC_JOINT_RANK, (64, 3)): ["vote.sync.ballot", "mma.sync", "ex2.approx"],
    KernelSpec(ops.TACTIC_JOINT, (64, 3)): ["mma.sync", "f64", "ex2.approx"],
    KernelSpec(ops.TACTIC_MARK, (3,)): ["vote.sync.ballot", "st.global.u64", "popc"],
    KernelSpec(ops.TACTIC_SELECT, ()): ["popc"],
    KernelSpec(ops.LFPS_KEEP, (64,)): ["ld.global.f32", "st.global.u64"],
    KernelSpec(ops.LFPS_START, (64, 4, 4)): ["mma.sync", "ex2.approx", "f64", "vote.sync.ballot"],
    KernelSpec(ops.LFPS_PROPOSE, ()): ["f64", "popc"],
    KernelSpec(ops.LFPS_SETS, (64, 4, 4)): ["mma.sync", "atom.*shared", "red.global.and", "f64"],
    KernelSpec(ops.LFPS_BYPASS, (64, 4, 4)): ["shfl.sync.bfly", "f64"],
    KernelSpec(ops.SHORT_CONV, ("silu",)): ["ex2.approx", "st.global.f32"],
    KernelSpec(ops.GATE_ROWS, ("sigmoid",)): ["ex2.approx"],
    KernelSpec(ops.BOUNDED_DECAY, ()): ["ex2.approx", "st.global.f32"],
    KernelSpec(ops.DECAY, ()): ["ex2.approx", "st.global.f32"],
    KernelSpec(ops.L2_NORM, ()): ["sqrt.rn.f32", "shfl.sync.bfly"],
    KernelSpec(ops.GATED_NORM, ("norm", "silu")): ["sqrt.rn.f32", "ex2.approx", "bar.sync"],
    KernelSpec(ops.SELECTIVE_SCAN, (16,)): ["ld.shared.f32", "st.shared.f32", "ex2.approx"],
    KernelSpec(ops.LINEAR_SCAN, ("delta", "head", 128, 128)): ["st.shared.f32", "bar.sync"],
    KernelSpec(ops.LINEAR_SCAN, ("add", "channel", 64, 64)): ["st.shared.f32", "bar.sync"],
    KernelSpec(ops.KV_ALLOCATE, ()): ["ld.global.v4.u32", "st.global.v4.u32", NO_CONSTANT],
    KernelSpec(ops.KV_WRITE_BACK, ()): ["ld.global.v4.u32", "st.global.v4.u32", NO_CONSTANT],
    KernelSpec(ops.KV_MARK, ()): ["st.global.u32"],
    **{
        KernelSpec(ops.KV_EVICT, (reader,)): ["atom.*shared", "match.any.sync", "popc"]
        for reader in ops.KV_READERS
    },
    KernelSpec(ops.INDEX_SCORE, (96, 32, "f16")): ["shfl.sync.bfly", "st.global.f32"],
    KernelSpec(ops.HEAD_SCORE, (96, 32, "q8_0")): ["shfl.sync.bfly", "st.global.f32"],
    **{
        KernelSpec(op, ()): ["bar.sync", "st.global.(u|b)32"]
        for op in (ops.INDEX_CHOOSE, ops.HEAD_CHOOSE, ops.ENTRY_CHOOSE)
    },
    KernelSpec(ops.WKV, (64,)): ["bar.sync", "fma.rn.f32", "st.global.f32"],
    KernelSpec(ops.POOL_KEYS, ()): ["ex2.approx", "st.global.f32"],
    KernelSpec(ops.HASH_NGRAMS, ()): ["xor.b64", "rem.u64"],
    KernelSpec(ops.STREAM_GATE, ()): ["sqrt", "shfl.sync.bfly"],
    KernelSpec(ops.BANK_BEGIN, ()): ["bar.sync", "st.global.u64"],
    KernelSpec(ops.BANK_LOOKUP, ()): ["atom.global.exch.b32", "atom.*shared", "red.global.add.u64"],
    KernelSpec(ops.BANK_FETCH, ()): ["ld.global.v4.u32", "st.global.v4.u32"],
    KernelSpec(ops.KV_FETCH, ()): ["ld.global.v4.u32", "st.global.v4.u32", NO_CONSTANT],
    KernelSpec(ops.COPY_KV, (64, *F16)): ["st.global.u16|st.global.b16"],
    KernelSpec(ops.COPY_KV, (64, "q8_0", "q4_0")): ["st.global.u16|st.global.b16"],
}


# On sm_90a kernels differ in their first instructions, products in what multiplies, and a search
# takes clusters of blocks.
BOTH = {ops.MATMUL, ops.MOE_MATMUL, ops.PACK_ROWS, ops.ATTEND, ops.HIP_SEARCH}
# And these are launched by no other GPU: see fusion.py.
FUSED = set(ops.LAUNCHED)
ON = {"sm_80": set(BY_NAME.values()) - FUSED, "sm_90a": BOTH | FUSED}
COMPILED = [(spec, target) for spec in MEANT for target in TARGETS if spec.op in ON[target]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compiled(spec, target's name): the target and the launches of an op, by two compilers."""
    pytest.importorskip("numba_cuda", reason="needs tamis[cuda]")
    folders = {name: tmp_path_factory.mktemp(name) for name in TARGETS}
    for name, folder in folders.items():
        command = Command(folder, "tamis.jit_kernels.cuda.runtime.compiler", name, {})
        compile_specs(command, [spec for spec, target in COMPILED if target == name], 2)
    return lambda spec, name: (TARGETS[name], json.loads(read_object(folders[name], spec.symbol)))


def test_every_op_that_is_offered_is_tested_here():
    assert {spec.op.name for spec in MEANT} == cuda_kernels.OPS <= set(BY_NAME)


@pytest.mark.parametrize(("spec", "name"), COMPILED, ids=lambda x: getattr(x, "symbol", x))
def test_an_op_compiles_to_the_ptx_that_is_meant(compiled, spec, name):
    target, launches = compiled(spec, name)
    text = "\n".join(launch["ptx"] for launch in launches)
    for what in MEANT[spec]:
        assert re.search(what, text), what
    for launch in launches:
        head = launch["ptx"].split(".visible .entry ")
        assert len(head) == 2
        assert head[1].startswith(f"{launch['name']}(")
        assert f".target {target.name}\n" in head[0]
        assert f".version {target.ptx}\n" in head[0]
        assert head[1].split(")")[0].count(".param .") == len(spec.op.fields) + 1
        assert "NumbaEnv" not in launch["ptx"]


@pytest.mark.parametrize(("spec", "name"), COMPILED, ids=lambda x: getattr(x, "symbol", x))
def test_ptxas_takes_it_and_almost_nothing_spills(compiled, spec, name, tmp_path):
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("needs ptxas of the CUDA toolkit")
    target, launches = compiled(spec, name)
    for launch in launches:
        file = tmp_path / "kernel.ptx"
        file.write_text(launch["ptx"])
        command = [ptxas, "-v", "-arch", target.name, str(file), "-o", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert max(int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr)) <= 128
        # the most that a block has: 163 KB before Hopper, there 227
        assert launch["shared"] <= (227 if target.name == "sm_90a" else 160) << 10


def test_a_kernel_must_take_the_fields_of_its_op(monkeypatch):
    pytest.importorskip("numba_cuda", reason="needs tamis[cuda]")
    compiler = importlib.import_module("tamis.jit_kernels.cuda.runtime.compiler")
    activation = importlib.import_module("tamis.jit_kernels.cuda.linear.activation")
    other = compiler.Launch(lambda tid, n_thread, step, gate, up, n, y: None)
    monkeypatch.setattr(activation, "gate", lambda activation: [other])
    with pytest.raises(TypeError, match="the contract says"):
        compiler.launches(KernelSpec(ops.GATE, ("silu",)))


# --- the library ---------------------------------------------------------------------------------


class StandIn:
    """A device that keeps what it is given to load."""

    target, loaded = TARGETS["sm_80"], []

    def load(self, ptx):
        self.loaded.append(ptx)

    def function(self, module, launch):
        return launch["name"]


def test_ptx_is_kept_in_the_kernel_library(tmp_path):
    pytest.importorskip("numba_cuda", reason="needs tamis[cuda]")
    spec = KernelSpec(ops.GATE, ("silu",))
    seen = []
    library = PtxLibrary(StandIn(), tmp_path)
    library.load([spec], lambda done, total: seen.append((done, total)))
    assert seen[-1] == (1, 1)
    assert library.functions(spec) == [f"{spec.symbol}_0"]
    again = PtxLibrary(StandIn(), tmp_path)
    again.load([spec], lambda done, total: pytest.fail("nothing is missing"))
    assert again.functions(spec) == library.functions(spec)


def test_an_op_without_a_kernel_is_named(tmp_path):
    pytest.importorskip("numba_cuda", reason="needs tamis[cuda]")
    with pytest.raises(CompileError, match="no kernel yet for column_sums, kept_sets"):
        PtxLibrary(StandIn(), tmp_path).load(
            [KernelSpec(ops.COLUMN_SUMS, (64, 4, 4)), KernelSpec(ops.KEPT_SETS, ())]
        )


def test_targets_have_folders_of_their_own():
    pytest.importorskip("numba_cuda", reason="needs tamis[cuda]")
    names = [fingerprint(target) for target in TARGETS.values()]
    assert len({*names, fingerprint()}) == len(names) + 1


@pytest.mark.parametrize(
    ("capability", "name"),
    [((7, 5), None), ((8, 0), "sm_80"), ((8, 9), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "sm_80")],
)
def test_a_gpu_gets_the_best_code_that_it_runs(capability, name):
    assert target_of(capability) == (TARGETS[name] if name else None)


# --- what is missing -----------------------------------------------------------------------------


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(CudaError, match=r"pip install 'tamis\[cuda\]'"):
        Device()


def test_without_a_gpu_it_is_said_what_is_missing():
    try:
        Device()
    except CudaError as error:
        assert re.search(r"pip install|driver", str(error))  # noqa: PT017 - a GPU may be there
    else:
        pytest.skip("there is a GPU")


def test_a_device_of_another_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="device is 'tpu', expected one of cpu, cuda"):
        Engine.load(tmp_path / "none.gguf", device="tpu")


def test_nothing_of_cuda_is_imported_unless_it_is_asked_for():
    program = "import sys, tamis.engine.engine, tamis.engine.session; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {name for name in done.stdout.split() if re.match(r"(cuda|numba|nvidia)(\.|$)", name)}
    assert not loaded
