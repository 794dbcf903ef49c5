"""The digest that object code is kept under names all that a kernel is made of."""

import json
import subprocess
import sys

from tamis.jit_kernels.compile import store
from tamis.jit_kernels.compile.shipped import Shipped
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.tools import kernel_sources, ship_kernels

IMPORTED = """
import importlib, json, sys
from tamis.jit_kernels.contract import ops
ops.declared()
before = set(sys.modules)
importlib.import_module(sys.argv[1])
print(json.dumps([m for m in sys.modules.keys() - before if m.startswith("tamis.")]))
"""
MATMUL = "tamis.jit_kernels.cpu.linear.matmul"


def test_every_module_that_a_kernel_imports_is_named():
    done = subprocess.run([sys.executable, "-c", IMPORTED, MATMUL], capture_output=True, check=True)
    imported = set(json.loads(done.stdout))
    assert {MATMUL, "tamis.jit_kernels.cpu.lang.simd", "tamis.platform.waiting"} <= imported
    packages = {m for m in imported if kernel_sources._file(m).name == "__init__.py"}
    assert imported - packages <= kernel_sources._closure(MATMUL)


def test_a_kernel_is_not_made_of_other_methods_kernels_and_ops():
    names = kernel_sources._made_of("tamis.jit_kernels.cpu.select.hip", "cpu")
    assert "tamis.jit_kernels.cpu.select.hip" in names
    assert "tamis.jit_kernels.contract.op" in names  # of STEP
    assert not [name for name in names if name.endswith((".tactic", ".quest", "linear.moe"))]


def test_the_digest_changes_with_a_file_of_the_kernel_and_no_other(tmp_path, monkeypatch):
    file = kernel_sources._file

    def digests():
        kernel_sources.digest_of.cache_clear()
        return [kernel_sources.digest_of("cpu", op) for op in (ops.MATMUL, ops.HIP_SEARCH)]

    before = digests()
    edited = tmp_path / "gemv.py"
    edited.write_text(file("tamis.jit_kernels.cpu.linear.gemv").read_text() + "# edited\n")
    monkeypatch.setattr(
        kernel_sources, "_file", lambda m: edited if m.endswith("linear.gemv") else file(m)
    )
    after = digests()
    kernel_sources.digest_of.cache_clear()
    assert (after[0] != before[0], after[1] == before[1]) == (True, True)


def test_after_an_edit_only_its_kernels_are_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    specs, compiled = [KernelSpec(op, c) for op, c in GATE_AND_NORM], []

    def stand_in(command, wanted, n_worker, progress):
        compiled.extend(spec.op for spec in wanted)
        for spec in wanted:
            store.write_object(command.folder, spec.symbol, b"code %d" % len(compiled))

    def ship(sources):
        """As in a tree whose kernels have these sources."""
        monkeypatch.setattr(store, "sources", lambda kind: sources)
        (path,) = ship_kernels.ship_kernels(
            tmp_path, specs, ["avx2"], vendors=["AuthenticAMD"], n_worker=1
        )
        return [Shipped(path).read(spec.symbol) for spec in specs]

    monkeypatch.setattr(ship_kernels, "compile_specs", stand_in)
    first = ship("a")
    assert compiled == [ops.GATE, ops.RMS_NORM]
    digest_of = kernel_sources.digest_of
    monkeypatch.setattr(
        ship_kernels, "digest_of", lambda k, op: "new" if op is ops.GATE else digest_of(k, op)
    )
    assert ship("b") == [b"code 3", first[1]]
    assert compiled[2:] == [ops.GATE]


GATE_AND_NORM = [(ops.GATE, ("silu",)), (ops.RMS_NORM, (0,))]


def test_all_files_of_the_contract_count_where_a_name_is_made_by_none():
    assert len(kernel_sources._declaring("KV_READERS")) > 20
    assert kernel_sources._declaring("HIP_SEARCH") == ("tamis.jit_kernels.contract.ops.select.hip",)
