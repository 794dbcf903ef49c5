"""Kernels that come with the package: the file, what a start takes from it, and what it refuses."""

import json
import os
import subprocess
import sys
from typing import ClassVar

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.jit_kernels.compile import code, shipped, store
from tamis.jit_kernels.compile import library as libraries
from tamis.jit_kernels.compile.library import CompileError, KernelLibrary
from tamis.jit_kernels.compile.shipped import Shipped, ShippedError, write_shipped
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cpu.lang import features
from tamis.tools import kernel_set, release
from tamis.tools.ship_kernels import SUFFIX, check_shipped

CODE = {"b": b"bb" * 900, "a": b"a" * 700, "c": b"", "c@AuthenticAMD": b"own"}
GATE = KernelSpec(ops.GATE, ("silu",))
GELU = KernelSpec(ops.GATE, ("gelu",))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / f"avx2{SUFFIX}"
    write_shipped(path, CODE, sources="s" * 64, compiler="numba 1", block=1000)
    return path


def test_a_file_has_what_was_written(file):
    found = Shipped(file)
    assert [found.read(symbol) for symbol in "abc"] == [CODE[symbol] for symbol in "abc"]
    assert found.read("d") is None
    assert (found.sources, found.compiler, len(found)) == ("s" * 64, "numba 1", 4)


def test_a_vendor_may_have_a_kernel_of_its_own(file):
    found = Shipped(file, "AuthenticAMD")
    assert (found.read("c"), found.read("a")) == (b"own", CODE["a"])


def test_the_same_kernels_give_the_same_bytes(file, tmp_path):
    again = dict(reversed(CODE.items()))
    write_shipped(tmp_path / "2", again, sources="s" * 64, compiler="numba 1", block=1000)
    assert (tmp_path / "2").read_bytes() == file.read_bytes()


def read_all(file):
    return [Shipped(file).read(symbol) for symbol in CODE]


@pytest.mark.parametrize("at", [0, 20, 40, 60, 120, -1])
def test_a_flipped_bit_anywhere_is_found_and_the_file_named(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)
    with pytest.raises(ShippedError, match=f"{file.name}.*install it again"):
        read_all(file)


@pytest.mark.parametrize("size", [0, 10, 50, 150])
def test_a_file_that_ends_early_is_refused(file, size):
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ShippedError, match="install it again"):
        Shipped(file).read("b")


def test_kernels_of_one_block_are_read_in_any_order(tmp_path):
    code = {f"k{i}": os.urandom(997 * (i + 1)) for i in range(6)}
    write_shipped(tmp_path / "k", code, sources="s" * 64, compiler="numba 1")
    found = Shipped(tmp_path / "k")
    order = ["k3", "k0", "k5", "k5", "k1", "k4", "k2"]
    assert [found.read(symbol) for symbol in order] == [code[symbol] for symbol in order]


def test_a_place_past_a_blocks_end_is_refused(file):
    found = Shipped(file)
    found._places["b"][2] += 10_000
    with pytest.raises(ShippedError, match="block"):
        found.read("b")


# --- a start -------------------------------------------------------------------------------------

START = """
import json, pathlib, sys
# An import of these fails: a compiler, and what costs a start time without being of use to it.
for name in ("numba", "llvmlite", "importlib.metadata", "concurrent.futures", "logging"):
    sys.modules[name] = None
from tamis.jit_kernels.compile import shipped
shipped.FOLDER = pathlib.Path(sys.argv[1])
from tamis.engine.engine import Engine
engine = Engine.load(sys.argv[2], n_threads=2)
session = engine.session(n_ctx=128, **json.loads(sys.argv[3]))
session.prefill(list(range(1, 40)))
print(json.dumps([float(x) for x in session.decode(3)]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("m") / "m.gguf", TinySpec(type_="Q8_0"))


class Noting(KernelLibrary):
    """Notes which kernels it is asked for."""

    specs: ClassVar[set[KernelSpec]] = set()

    def load(self, specs, progress=None):
        self.specs |= {*specs}
        super().load(specs, progress)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The kernels of a dense session of the model, as a release has them."""
    folder, library = tmp_path_factory.mktemp("kernels"), Noting()
    engine = Engine.load(model, n_threads=2, library=library)
    session = engine.session(n_ctx=128)
    session.prefill(list(range(1, 40)))
    session.decode(3)
    engine.close()
    found = library._code.take(library.specs)
    path = folder / f"{features.host().name}{SUFFIX}"
    write_shipped(path, found, sources=store.sources("cpu"), compiler="")
    return folder


def start(folder, model, home, **options):
    """What a program without Numba does; nothing can be written to its kernel folder."""
    home.write_text("no folder")
    return subprocess.run(
        [sys.executable, "-c", START, str(folder), str(model), json.dumps(options)],
        env={"XDG_CACHE_HOME": str(home)}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_start_that_finds_its_kernels_needs_no_compiler_and_no_folder(folder, model, tmp_path):
    done = start(folder, model, tmp_path / "home")
    assert done.returncode == 0, done.stderr
    engine = Engine.load(model, n_threads=2)
    session = engine.session(n_ctx=128)
    session.prefill(list(range(1, 40)))
    assert json.loads(done.stdout) == [float(x) for x in session.decode(3)]
    engine.close()


def test_a_kernel_that_did_not_come_along_is_an_error_with_the_remedy(folder, model, tmp_path):
    done = start(folder, model, tmp_path / "home", attn="topk:k=20,recent=8")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "is not among those that come with tamis" in last
    assert "kernel tamis_" in last
    assert "pip install 'tamis[compile]'" in last


def test_no_kernels_and_no_compiler_is_an_error_with_the_remedy(model, tmp_path):
    (tmp_path / "empty").mkdir()
    done = start(tmp_path / "empty", model, tmp_path / "home")
    assert "pip install 'tamis[compile]'" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("came", "expected"),
    [
        (["avx2", "avx512", "avx512-vnni"], "avx512"),  # this machine lacks the last one's
        (["avx2", "neon"], "avx2"),
        (["avx2-vnni"], "avx512"),
        ([], "avx512"),
    ],
)
def test_without_a_compiler_the_highest_level_that_came_along_is_used(
    came, expected, tmp_path, monkeypatch
):
    """expected where nothing fits: the host's, whose error names the remedy."""
    lacks = {"avx512vnni", "avxvnni", "neon"}
    monkeypatch.setattr(features, "missing", lambda level: sorted(lacks & {*level.needs}))
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    for name in came:
        (tmp_path / f"{name}{SUFFIX}").touch()
    assert libraries.usual_level().name == "avx512"  # compiled where it is not there
    monkeypatch.setattr(libraries, "can_compile", lambda kind: False)
    assert libraries.usual_level().name == expected


# --- changed sources -----------------------------------------------------------------------------


def test_kernels_of_other_sources_are_compiled_here_and_refused_in_a_release(
    file, tmp_path, monkeypatch
):
    level = features.host().name
    path = file.rename(tmp_path / f"{level}{SUFFIX}")
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    assert shipped.shipped("cpu", level) is None
    assert KernelLibrary().missing([KernelSpec(ops.GATE, ("nope",))])  # that is: no error
    assert check_shipped([path]) == [
        f"{path.name}: made of other kernel sources: make its kernels again"
    ]
    with pytest.raises(release.ReleaseError, match="made of other kernel sources"):
        release.wheel(tmp_path, tmp_path)
    write_shipped(path, {GATE.symbol: b"x"}, sources=store.sources("cpu"), compiler="")
    assert shipped.shipped("cpu", level) is not None
    assert check_shipped([path]) == []


def test_without_sources_what_came_along_is_taken(file, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    monkeypatch.setattr(store, "SOURCES", tmp_path)
    assert shipped.shipped("cpu", "avx2") is not None


def test_what_did_not_come_along_is_compiled_where_that_is_possible(file, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    level = features.host().name
    write_shipped(
        tmp_path / f"{level}{SUFFIX}", {"x": b""}, sources=store.sources("cpu"), compiler=""
    )
    library = KernelLibrary()
    library.load([GATE])
    assert library.address(GATE)
    monkeypatch.setattr(code, "can_compile", lambda kind: False)
    with pytest.raises(CompileError, match=rf"{GATE.symbol} is not among those .* {level}: pip"):
        KernelLibrary().load([GATE])
    for order in ([GATE, GELU], [GELU, GATE]):  # the same message in every process
        with pytest.raises(CompileError, match=rf"{GELU.symbol} \(and 1 more\) is not among"):
            KernelLibrary().load(order)


# --- the set -------------------------------------------------------------------------------------


def test_every_op_of_a_cpu_is_in_the_set_with_every_type():
    found = kernel_set.kernel_set([(64, 3)])
    declared = {value for value in vars(ops).values() if isinstance(value, ops.Op)}
    of_gpu = {*ops.LAUNCHED, ops.KV_EVICT, ops.SCORE_KEYS, ops.SCORE_COPY, ops.COPY_CANDIDATES}
    assert declared - {spec.op for spec in found} == of_gpu
    of_types = {spec.constants[0] for spec in found if spec.op is ops.MATMUL}
    assert {"F32", "Q4_K", "Q4_Kx16", "IQ1_S", "TQ1_0"} <= of_types
    kv = {spec.constants[3:] for spec in found if spec.op is ops.ATTEND}
    assert {("f16", "f16"), ("q8_0", "f16"), ("q4_0", "q8_0")} <= kv
