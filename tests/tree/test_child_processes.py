"""Child processes: every place that starts one; none imports from the working directory."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("runner", "jit_kernels", "formats", "bindings", "tools")
STARTS = (
    "subprocess.", "multiprocessing.", "pexpect.spawn", "os.system", "os.popen", "os.fork",
    "os.spawn", "os.posix_spawn", "os.exec", "pty.", "ProcessPoolExecutor", "context.Process",
)  # fmt: skip
# Every call that may start a process: the file, and why nothing of the working directory is run.
KNOWN = {
    "runner/platform/processes.py:os.fork": "no other program",
    "bindings/serve/helpers.py:subprocess.Popen": "-P, and / as working directory",
    "bindings/serve/http/listen.py:subprocess.Popen": "-P, and / as working directory",
    "bindings/serve/supervisor.py:subprocess.Popen": "-P, and / as working directory",
    "runner/cli/commands/config.py:subprocess.run": "the user's editor",
    "runner/sampling/grammar.py:subprocess.run": "-P, and / as working directory",
    "jit_kernels/compile/workers.py:subprocess.Popen": "-P, and a private working directory",
    "runner/fetch/packages.py:subprocess.Popen": "-P, and a working directory of its own",
    "tools/ask_evidence.py:subprocess.run": "man",
    "tools/build_binary.py:subprocess.run": "-P, or a compiler's tool",
    "tools/compare_llamacpp.py:multiprocessing.Pipe": "starts nothing",
    "tools/compare_llamacpp.py:multiprocessing.get_context": "PYTHONSAFEPATH",
    "tools/compare_llamacpp.py:context.Process": "PYTHONSAFEPATH",
    "tools/dependencies.py:subprocess.run": "-P",
    "tools/load_serve.py:subprocess.Popen": "-P",
    "tools/mutate.py:subprocess.run": "-P, or git",
    "tools/mutate_plugin.py:os.fork": "no other program",
    "tools/mutate_plugin.py:subprocess.Popen": "-P",
    "tools/page_markdown.py:subprocess.Popen": "/ as working directory",
    "tools/peer_server.py:os.execv": "-P",
    "tools/peer_suites.py:subprocess.run": "pip, -P",
    "tools/peer_suites.py:subprocess.Popen": "-P, in the suite's folder",
    "tools/record_chat.py:pexpect.spawn": "-P",
    "tools/release.py:subprocess.run": "-P, or git",
}


def starts(path):
    """The calls in a file that may start a process."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = ast.unparse(node.func)
            if name.startswith(STARTS) or name.endswith(STARTS):
                yield f"{path.relative_to(ROOT)}:{name}"


def test_every_child_process_is_known():
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert {start for path in files for start in starts(path)} == KNOWN.keys()


def test_the_modules_that_start_processes_are_imported_whole():
    """`from subprocess import run` would hide a call from the test above."""
    part = re.compile(r"^\s*from\s+(subprocess|multiprocessing|pexpect)\s+import", re.MULTILINE)
    assert part.search("\n    from subprocess import run")
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 100
    assert [path for path in paths if part.search(path.read_text())] == []


def test_an_entry_of_pythonpath_that_means_the_working_directory_is_left_out(monkeypatch):
    from tamis.platform.processes import child_environment

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", "/some/where", ".", "relative"]))
    assert child_environment({})["PYTHONPATH"] == "/some/where"
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    assert "PYTHONPATH" not in child_environment({"A": "b"})


COMPILE = """
import sys
from pathlib import Path
sys.path[:] = [p for p in sys.path if p]  # this process is not what is tested
from tamis.jit_kernels.compile.library import KernelLibrary
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec

KernelLibrary(Path(sys.argv[1])).load([KernelSpec(ops.GATE, ("silu",))])
"""


def test_compile_workers_run_nothing_of_the_working_directory(tmp_path):
    """Modules that Python and Numba import, a package named tamis, and Numba's own settings."""
    here = tmp_path / "here"
    (here / "tamis").mkdir(parents=True)
    trap = f"open({str(tmp_path / 'sprung')!r}, 'a').write(__name__)\n"
    names = ("tempfile", "random", "json", "numpy", "numba", "sitecustomize", "usercustomize")
    for name in names:
        (here / f"{name}.py").write_text(trap)
    (here / "tamis" / "__init__.py").write_text(trap)
    (here / ".numba_config.yaml").write_text("opt: 3\n")
    path = os.pathsep.join(["", "."])  # as `export PYTHONPATH=$PYTHONPATH:.` leaves it
    code = tmp_path / "code.py"
    code.write_text(COMPILE)
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-I", str(code), str(tmp_path / "kernels")]
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "sprung").exists()
