"""Programs that PyInstaller freezes: modules, kernels and child processes come along."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.__pyinstaller import get_hook_dirs
from tamis.__pyinstaller.kernels import write_kernels
from tamis.jit_kernels.compile import code as codes
from tamis.jit_kernels.compile import store
from tamis.jit_kernels.compile.shipped import FOLDER, Shipped
from tamis.jit_kernels.compile.store import KernelStoreError, fingerprint, write_object
from tamis.jit_kernels.cpu.lang.features import LEVELS

HOOKS = Path(get_hook_dirs()[0])
# The first lines of the guide, for any model.
PROGRAM = """
import sys

from tamis import Engine, SamplerParams

with Engine.load(sys.argv[1]) as engine:
    prompt = engine.encode_chat([{"role": "user", "content": "the hand"}])
    with engine.session(n_ctx=512) as session:
        for piece in session.generate(prompt, SamplerParams(temp=0), max_tokens=8):
            print(piece.token_id, end=" ")
"""
SPEC = """
EXTRAS = ["hypothesis", "langchain_community", "llama_index", "mcp", "mkdocs", "mypy", "openai",
    "prompt_toolkit", "pytest", "setuptools", "starlette", "textual", "uvicorn"]
found = Analysis(["app.py"], excludes=EXTRAS)
modules = PYZ(found.pure)
folder = EXE(modules, found.scripts, [], exclude_binaries=True, name="app")
COLLECT(folder, found.binaries, found.datas, name="app")
EXE(modules, found.scripts, found.binaries, found.datas, [], name="one")
"""


@pytest.mark.skipif(any(FOLDER.glob("*.kernels")), reason="kernels came with the package")
def test_kernels_that_were_compiled_come_along_by_level(tmp_path):
    kept = {"avx2": {"a": b"code", "b": b"more"}, "avx512": {"a": b"wide"}}
    for level, objects in kept.items():
        folder = tmp_path / "kernels" / fingerprint(LEVELS[level])
        folder.mkdir(parents=True)
        for symbol, data in objects.items():
            write_object(folder, symbol, data)
        (folder / "damaged.o").write_bytes(b"x" * 99)
    found = write_kernels(tmp_path, tmp_path / "kernels")
    assert [path.name for path in found] == ["avx2.kernels", "avx512.kernels"]
    for path in found:
        shipped = Shipped(path)
        assert {s: shipped.read(s) for s in ("a", "b", "damaged") if s in shipped} == kept[
            path.stem
        ]


def test_a_frozen_program_compiles_nothing_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert not store.can_compile("cpu")
    monkeypatch.setattr(store, "find_spec", lambda name: None)
    with pytest.raises(KernelStoreError, match=r"run the program once .* before it is frozen"):
        codes.KernelCode(LEVELS["avx2"], tmp_path, 1)


def test_a_frozen_program_that_is_started_as_a_module_is_that_module():
    hook = HOOKS / "rthooks" / "pyi_rth_tamis.py"
    module = ["-P", "-m", "tamis.sampling.grammar"]
    done = subprocess.run([sys.executable, hook, *module], input=b"\xff", capture_output=True)
    assert done.returncode != 0  # no grammar
    done = subprocess.run([sys.executable, hook, "-P", "-m", "pip"], capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def libraries_of(folder):
    """The system's libraries that the files of a folder need."""
    files = [path for path in folder.rglob("*") if ".so" in path.name or os.access(path, os.X_OK)]
    found = set()
    for path in files:
        listed = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        found |= set(re.findall(r"(/\S+\.so\S*) \(0x", listed))
    return {Path(path) for path in found if not Path(path).is_relative_to(folder)}


@pytest.fixture
def elsewhere(tmp_path):
    """A root folder without Python, with the system's libraries and what Linux tells of itself."""
    root = tmp_path / "root"
    for path in ("/proc/cpuinfo", "/proc/meminfo", "/proc/self/uid_map"):
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        (root / path[1:]).write_bytes(Path(path).read_bytes())
    for name in ("tmp", "root"):
        (root / name).mkdir()
    return root


@pytest.mark.slow
def test_the_programs_of_a_folder_and_of_one_file_run_without_python(root, tmp_path, elsewhere):
    pytest.importorskip("PyInstaller")
    if os.geteuid() or not shutil.which("chroot", path="/usr/sbin:/sbin:/bin"):
        pytest.skip("only root may change the root folder")
    view = tmp_path / "packages"
    copied = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "runner", view / "tamis", ignore=copied)
    for name in ("jit_kernels", "formats", "bindings"):
        shutil.copytree(root / name, view / "tamis" / name, ignore=copied)
    model = write_tiny_model(tmp_path / "tiny.gguf", TinySpec())
    (tmp_path / "app.py").write_text(PROGRAM)
    (tmp_path / "app.spec").write_text(
        SPEC.replace("],", f"], pathex=[{str(view)!r}], hookspath=[{str(HOOKS)!r}],", 1)
    )
    expected = subprocess.run(
        [sys.executable, "app.py", model], cwd=tmp_path, capture_output=True, check=True
    ).stdout
    freeze = [sys.executable, "-m", "PyInstaller", "--noconfirm", "app.spec"]
    env = os.environ | {"PYTHONPATH": str(view), "PYINSTALLER_CONFIG_DIR": str(tmp_path / "config")}
    done = subprocess.run(freeze, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shutil.copytree(tmp_path / "dist", elsewhere, dirs_exist_ok=True, symlinks=True)
    shutil.copy(model, elsewhere)
    for path in libraries_of(tmp_path / "dist"):
        (elsewhere / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, elsewhere / path.relative_to("/"))
    chroot = shutil.which("chroot", path="/usr/sbin:/sbin:/bin")
    for program in ("/app/app", "/one"):
        command = [chroot, elsewhere, program, "/tiny.gguf"]
        done = subprocess.run(command, env={"HOME": "/root"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.encode() == expected
