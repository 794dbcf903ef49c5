"""Limits of compile processes: they end with their parent, and when memory or time runs out."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tamis.jit_kernels.compile import worker
from tamis.jit_kernels.compile.library import KernelLibrary
from tamis.jit_kernels.compile.workers import CompileError
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec

GELU = KernelSpec(ops.GATE, ("gelu",))

# Stands in for the interpreter: the worker's limits, and then a kernel that never ends.
WORKER = """#!{python}
import sys
from tamis.jit_kernels.compile import worker

worker.CPU_SECONDS, worker.MEMORY_BYTES = {seconds}, {memory}
worker.limit(int(sys.argv[7]))
worker.serve(None, lambda spec: {body})
"""


def stand_in(folder: Path, body: str, seconds: float = 60, memory: int = 4 << 30) -> str:
    script = folder / "python"
    script.write_text(
        WORKER.format(python=sys.executable, body=body, seconds=seconds, memory=memory)
    )
    script.chmod(0o700)
    return str(script)


def test_a_kernel_that_takes_too_long_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, "[0 for _ in iter(int, 1)]", 1))
    with pytest.raises(CompileError, match=f"kernel {GELU.symbol} took more than .* too large"):
        KernelLibrary(tmp_path / "kernels").load([GELU])


def test_a_kernel_that_takes_too_much_memory_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, "bytes(1 << 30)", memory=1 << 30))
    with pytest.raises(CompileError, match=r"(?s)took more than .* GiB.* too large"):
        KernelLibrary(tmp_path / "kernels").load([GELU])


def test_the_limits_are_set_in_a_worker(tmp_path, monkeypatch):
    """In a real one: what it prints instead of a symbol is its limits."""
    body = "sys.exit(repr([__import__('resource').getrlimit(i)[0] for i in (0, 9, 4)]))"
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path, body, 77, 3 << 30))
    with pytest.raises(CompileError) as error:
        KernelLibrary(tmp_path / "kernels").load([GELU])
    cpu, memory, core = eval(str(error.value).splitlines()[-1])
    assert 77 <= cpu < 77 + 30
    assert (memory, core) == (3 << 30, 0)
    assert worker.MEMORY_BYTES <= 4 << 30


PARENT = """
import os, sys, threading, time
from pathlib import Path
from tamis.jit_kernels.compile.library import KernelLibrary
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec

sys.executable = sys.argv[2]
KernelLibrary(Path(sys.argv[1])).load([KernelSpec(ops.GATE, ("gelu",))])
"""


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def test_a_worker_ends_with_its_parent_however_that_ends(tmp_path):
    mark = tmp_path / "mark"
    body = textwrap.dedent(f"""(
        __import__("pathlib").Path({str(mark)!r}).write_text(str(__import__("os").getpid())),
        [0 for _ in iter(int, 1)],
    )""")
    command = [sys.executable, "-c", PARENT, str(tmp_path / "k"), stand_in(tmp_path, body)]
    parent = subprocess.Popen(command)
    while not (mark.exists() and mark.read_text()):
        assert parent.poll() is None
        time.sleep(0.02)
    pid = int(mark.read_text())
    assert not gone(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < end, f"process {pid} is an orphan"
        time.sleep(0.02)


def test_a_worker_whose_parent_is_gone_does_not_begin():
    done = subprocess.run(
        [sys.executable, "-m", "tamis.jit_kernels.compile.worker", "no_such_module", "", "", "1"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    assert done.returncode == 1
    assert done.stderr == b""
