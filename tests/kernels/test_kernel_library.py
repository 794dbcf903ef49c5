"""The kernel library on disk and in the process: what is compiled, when, and what is trusted."""

import ctypes
import mmap
import os
import platform
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import op_tests
import pytest
from guarded import fork_and_wait

from tamis.jit_kernels.backends.cpu import RUN, WORKER
from tamis.jit_kernels.compile import store
from tamis.jit_kernels.compile.library import CompileError, KernelLibrary
from tamis.jit_kernels.compile.store import KernelStoreError, fingerprint, open_folder, read_object
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec, Program

GATE, GELU = KernelSpec(ops.GATE, ("silu",)), KernelSpec(ops.GATE, ("gelu",))


def gate(library, spec=GATE):
    """Run a loaded GATE without a team; 2 at gate 0 .. 3 and up 2."""
    x, up = np.arange(4, dtype=np.float32), np.full(4, 2, np.float32)
    y, step = np.zeros(4, np.float32), np.array([1, 0, 0])
    fields = [step, x, up, y]
    args = np.array([0, *(a.ctypes.data for a in fields), 4], np.int64)  # 0: see layout.TURNS
    library.function(spec)(0, 1, args.ctypes.data)
    return y


def check_gate(library):
    x = np.arange(4)
    np.testing.assert_allclose(gate(library), 2 * x / (1 + np.exp(-x)), rtol=1e-6)


def compiled(folder):
    """Names of what lies in a folder of kernels."""
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A root whose folder holds one compiled kernel; tests copy it."""
    root = tmp_path_factory.mktemp("kernels")
    KernelLibrary(root).load([GATE])
    return root


@pytest.fixture
def own(root, tmp_path):
    """A copy of `root`, and the folder in it."""
    shutil.copytree(root, tmp_path / "kernels")
    return tmp_path / "kernels", open_folder(tmp_path / "kernels")


# --- the folder ----------------------------------------------------------------------------------


def test_an_edit_of_any_kernel_source_names_another_folder(tmp_path, monkeypatch):
    sources = tmp_path / "jit_kernels"
    shutil.copytree(store.SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(store, "SOURCES", sources)
    seen = {fingerprint()}
    files = sorted(p for name in ("contract", "cpu") for p in (sources / name).rglob("*.py"))
    assert {"matmul.py", "op.py", "compiler.py"} <= {file.name for file in files}
    for i, file in enumerate(files):
        file.write_text(file.read_text() + f"# {i}\n")
        seen.add(fingerprint())
    (sources / "cpu" / "more.py").write_text("")
    seen.add(fingerprint())
    files[-1].rename(files[-1].with_name("renamed.py"))
    seen.add(fingerprint())
    assert len(seen) == 1 + len(files) + 2
    (sources / "backends" / "cpu.py").write_text("")  # of no kernel
    assert fingerprint() in seen  # the same sources, the same folder


def test_the_next_run_sees_the_edit(own, tmp_path, monkeypatch):
    root, folder = own
    assert not KernelLibrary(root).missing([GATE])
    sources = tmp_path / "jit_kernels"
    shutil.copytree(store.SOURCES, sources)
    monkeypatch.setattr(store, "SOURCES", sources)
    (sources / "cpu" / "linear" / "activation.py").write_text("# another kernel\n")
    assert KernelLibrary(root).missing([GATE]) == [GATE]
    assert open_folder(root) != folder


def test_the_folder_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = open_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path, mode):
    open_folder(tmp_path).chmod(mode)
    with pytest.raises(KernelStoreError, match="changed by others"):
        KernelLibrary(tmp_path)


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelStoreError, match="set XDG_CACHE_HOME"):
        KernelLibrary(tmp_path / "file")


# --- damaged files -------------------------------------------------------------------------------


DAMAGE = {
    "empty": lambda data: b"",
    "half the digest": lambda data: data[:16],
    "half the code": lambda data: data[: len(data) // 2],
    "a byte short": lambda data: data[:-1],
    "a byte more": lambda data: data + b"\0",
    "a flipped bit of code": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "a flipped bit of the digest": lambda data: bytes([data[0] ^ 1]) + data[1:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object_file_counts_as_missing(own, damage):
    root, folder = own
    file = folder / f"{GATE.symbol}.o"
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    assert read_object(folder, GATE.symbol) is None
    assert KernelLibrary(root).missing([GATE]) == [GATE]


def test_a_damaged_object_file_is_compiled_again(own):
    root, folder = own
    file = folder / f"{GATE.symbol}.o"
    file.write_bytes(file.read_bytes()[:-7])
    library = KernelLibrary(root)
    library.load([GATE])
    check_gate(library)
    assert read_object(folder, GATE.symbol) is not None
    assert compiled(folder) == [file.name]


def test_a_file_of_another_kernel_counts_as_missing(own):
    root, folder = own
    shutil.copy(folder / f"{GATE.symbol}.o", folder / f"{GELU.symbol}.o")
    assert read_object(folder, GELU.symbol) is None
    assert KernelLibrary(root).missing([GATE, GELU]) == [GELU]


def test_code_that_lacks_its_symbol_is_an_error(own):
    root, folder = own
    code = read_object(folder, GATE.symbol)
    store.write_object(folder, GELU.symbol, code)
    with pytest.raises(CompileError, match=GELU.symbol):
        KernelLibrary(root).load([GELU])


# --- compiling -----------------------------------------------------------------------------------


def test_progress_counts_what_is_compiled(own):
    root, folder = own
    seen = []
    library = KernelLibrary(root)
    library.load([GATE, GELU], lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 1)
    assert seen[-1] == (1, 1)
    library.load([GATE, GELU], lambda done, total: pytest.fail("nothing is missing"))
    check_gate(library)
    assert not np.array_equal(gate(library, GELU), gate(library))
    assert len(compiled(folder)) == 2


def test_a_kernel_that_does_not_compile_says_why_and_harms_no_other(own):
    root, folder = own
    library = KernelLibrary(root)
    library.load([GATE])
    with pytest.raises(CompileError, match=r"(?si)compiling kernels failed.*error.*nope"):
        library.load([KernelSpec(ops.MATMUL, ("NOPE",))])
    check_gate(library)
    library.load([GATE])
    assert compiled(folder) == [f"{GATE.symbol}.o"]


def test_a_compiler_that_cannot_start_is_an_error_too(own, monkeypatch):
    root, _ = own
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(CompileError):
        KernelLibrary(root).load([GELU])


FULL = """#!{python}
import os, sys
from tamis.jit_kernels.cpu.runtime import compiler

def full(*names):
    raise OSError(28, "No space left on device")

os.replace = full
compiler.main(*sys.argv[5:7])
"""


def test_a_full_disk_is_said_with_its_folder_and_no_traceback(own, tmp_path, monkeypatch):
    root, folder = own
    (tmp_path / "python").write_text(FULL.format(python=sys.executable))
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(CompileError) as error:
        KernelLibrary(root).load([GELU])
    assert str(error.value) == (
        f"compiling kernels failed:\ncannot write to {folder}: No space left on device; free some "
        "space or set XDG_CACHE_HOME to an absolute folder elsewhere"
    )


STUCK = """#!{python}
import os, pathlib, sys, time
from tamis.jit_kernels.cpu.runtime import compiler

os.replace = lambda *names: (pathlib.Path({mark!r}).write_text("now"), time.sleep(60))
compiler.main(*sys.argv[5:7])
"""


def stuck_compiler(tmp_path, monkeypatch):
    """Workers stop for good between writing a file and naming it; the file that says they did."""
    script, mark = tmp_path / "python", tmp_path / "mark"
    script.write_text(STUCK.format(python=sys.executable, mark=str(mark)))
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    return mark


def wait_for(mark):
    while not mark.exists():
        time.sleep(0.02)


def test_a_killed_worker_leaves_no_file(own, tmp_path, monkeypatch):
    root, folder = own
    mark = stuck_compiler(tmp_path, monkeypatch)

    def interrupt(done, total):
        wait_for(mark)
        assert len(compiled(folder)) == 2  # the half-written file is there
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        KernelLibrary(root).load([GELU], interrupt)
    assert compiled(folder) == [f"{GATE.symbol}.o"]


def test_a_fork_does_not_wait_for_its_parents_compiler(own, tmp_path, monkeypatch):
    root, _ = own
    library = KernelLibrary(root)
    library.load([GATE])
    mark, executable, release = tmp_path / "mark", sys.executable, threading.Event()
    stuck_compiler(tmp_path, monkeypatch)

    def load():
        with pytest.raises(InterruptedError):
            library.load([GELU], lambda done, total: interrupt())

    def interrupt():
        release.wait()
        raise InterruptedError

    thread = threading.Thread(target=load)
    thread.start()
    try:
        wait_for(mark)
        monkeypatch.setattr(sys, "executable", executable)
        fork_and_wait(lambda: (check_gate(library), library.load([GATE, GELU]), gate(library)))
    finally:
        release.set()
        thread.join()


LOAD = """
import sys
import numpy as np
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.contract.program import Program

x, y = np.linspace(-3, 3, 99, dtype=np.float32), np.zeros(99, np.float32)
program = Program()
step = np.array([1, 0, 0])
program.add(ops.GATE, ("silu",), step=step, gate=x, up=x, y=y, n=99)
program.add(ops.MOE_SUM, step=step, x=x, weights=x[:1], y=y, n=99, n_used=1, add=1)
backend = CpuBackend(2)
backend.run(backend.link(program))
backend.close()
assert np.allclose(y, x * x / (1 + np.exp(-x)) - 3 * x, atol=1e-5), y
sys.exit("numba" in sys.modules or "llvmlite" in sys.modules)
"""


def start(cache):
    env = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.Popen([sys.executable, "-c", LOAD], env=env)


def test_two_processes_compile_at_once_and_the_compilers_stay_out_of_them(tmp_path):
    processes = [start(tmp_path) for _ in range(2)]
    assert [process.wait(120) for process in processes] == [0, 0]
    folder = open_folder(tmp_path / "tamis" / "kernels")
    team = [f"{RUN.symbol}.o", f"{WORKER.symbol}.o"]
    assert compiled(folder) == sorted([f"{GATE.symbol}.o", "tamis_moe_sum.o", *team])
    assert start(tmp_path).wait(60) == 0  # and not where all is compiled


def test_python_threads_load_at_once(own):
    library = KernelLibrary(own[0])
    threads = [threading.Thread(target=library.load, args=([GATE],)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_gate(library)


def leave_one_hole(size):
    """Fill this process's address space near what is mapped, but for one hole of `size` bytes.

    What does not fit into the hole is mapped more than 2 GiB from it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

    def reserve(size):  # nothing may read or write there, so it costs no memory
        address = libc.mmap(None, size, 0, flags, -1, 0)
        assert address != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        return address

    def fill():  # the holes of all sizes between what is mapped; new maps then go below all
        for step in (1 << bit for bit in range(36, 11, -1)):
            lowest = reserve(1 << 36)
            while reserve(step) > lowest:
                pass

    fill()
    hole = reserve(size)
    reserve(3 << 30)
    fill()
    libc.munmap(hole, size)


@pytest.mark.parametrize("n_page", [1, 2])
def test_code_and_its_constants_stay_together_in_a_crowded_process(root, n_page):
    def child():
        library = KernelLibrary(root)
        leave_one_hole(n_page * mmap.PAGESIZE)
        library.load([GATE])
        check_gate(library)

    fork_and_wait(child)


# --- object files --------------------------------------------------------------------------------

TESTED = op_tests.kernels()
# What a kernel may need of the process: libm, the C library's memory functions, the futex call, and
# to read the file of a KV cache.
ALLOWED = {
    "cos",
    "exp",
    "expf",
    "log",
    "log1pf",
    "logf",
    "memcpy",
    "memmove",
    "memset",
    "posix_fadvise64",
    "pread64",
    "preadv2",
    "sin",
    "sincos",
    "syscall",
}


def symbols(code):
    """Undefined and public names of an ELF64 object file."""
    (sections_at,) = struct.unpack_from("<Q", code, 0x28)
    size, n = struct.unpack_from("<HH", code, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", code, sections_at + size * i) for i in range(n)]
    undefined, public = set(), set()
    for _, kind, _, _, offset, length, link, *_ in headers:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = headers[link][4]
        for at in range(offset, offset + length, 24):
            name_at, info, _, section = struct.unpack_from("<IBBH", code, at)
            end = code.index(b"\0", names + name_at)
            name = code[names + name_at : end].decode()
            if info >> 4 != 0:  # not STB_LOCAL
                (undefined if section == 0 else public).add(name)
    return undefined, public


@pytest.fixture(scope="module")
def objects():
    """Object code of every kernel that the op tests run."""
    library = KernelLibrary()
    specs = [*TESTED, RUN, WORKER]
    library.load(specs)
    folder = open_folder(store.user_folder())
    return {spec: read_object(folder, spec.symbol) for spec in specs}


def test_every_op_has_a_kernel_in_these_tests():
    declared = set(ops.declared().values())
    of_gpus = {*ops.LAUNCHED, ops.SCORE_COPY, ops.COPY_CANDIDATES}  # tests/cuda has theirs
    assert {spec.op for spec in [*TESTED, RUN, WORKER]} == declared - of_gpus


@pytest.mark.skipif(platform.system() != "Linux", reason="ELF")
def test_an_object_file_defines_its_kernel_and_needs_little(objects):
    for spec, code in objects.items():
        undefined, public = symbols(code)
        assert public == {spec.symbol}
        assert undefined <= ALLOWED, spec.symbol
        for name in undefined:
            assert ctypes.CDLL(None)[name], name  # the process has it


def test_an_argument_that_is_not_of_the_op_is_refused():
    with pytest.raises(AssertionError, match="gate: "):
        Program().add(ops.GATE, ("silu",), step=None)
    every_other = np.zeros(8, np.float32)[::2]
    with pytest.raises(AssertionError, match="contiguous"):
        Program().add(ops.GATE, ("silu",), step=0, gate=every_other, up=0, y=0, n=4)


def test_folders_follow_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert store.user_folder() == Path("/somewhere/tamis/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert store.user_folder() == Path.home() / ".cache" / "tamis" / "kernels"
