"""What a user gets: the wheel's contents, a cheap import, no reads of the environment."""

import ast
import json
import re
import shutil
import statistics
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

FOLDERS = {
    "runner": "tamis",
    "jit_kernels": "tamis/jit_kernels",
    "formats": "tamis/formats",
    "bindings": "tamis/bindings",
    "tools": "tamis/tools",
}
# The modules that may read the environment, each in one documented function.
MAY_READ_ENVIRONMENT = {
    "runner/platform/processes.py": "handed on to child processes",
    "jit_kernels/compile/store.py": "XDG_CACHE_HOME: the folder of compiled kernels",
    "runner/cli/terminal/answer.py": "NO_COLOR",
    "runner/cli/commands/config.py": "VISUAL, EDITOR",
    "runner/cli/options/settings.py": "TAMIS_...: flags of commands; XDG_CONFIG_HOME: their file",
    "runner/fetch/base.py": "TAMIS_MODELS, XDG_CACHE_HOME: the folder of models; handed to pip",
}


def test_every_folder_of_modules_is_a_package_that_is_installed(root: Path) -> None:
    """A clone imports what a wheel lacks: only a fresh install shows it."""
    there = {
        ".".join((inside.replace("/", "."), *file.parent.relative_to(root / folder).parts))
        for folder, inside in FOLDERS.items()
        for file in (root / folder).rglob("*.py")
        if not {"rthooks", "tamis_llama_cpp"} & {*file.parts}  # data, and a distribution of its own
    }
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(there) == sorted(listed)


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built without a network from a copy of the tree, which stays clean."""
    copy = tmp_path_factory.mktemp("tree")
    for name in FOLDERS:
        shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, copy)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = (copy / "dist").glob("*.whl")
    return built


def test_the_wheel_has_every_module_under_tamis_and_nothing_else(wheel: Path, root: Path) -> None:
    expected = {
        f"{package}/{path.relative_to(root / folder).as_posix()}"
        for folder, package in FOLDERS.items()
        for path in (root / folder).rglob("*.py")
        if "tamis_llama_cpp" not in path.parts  # a distribution of its own
    }
    with zipfile.ZipFile(wheel) as z:
        names = set(z.namelist())
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    data = {"tamis/py.typed", "tamis/bindings/serve/http/page.html"}
    data |= {"tamis/__pyinstaller/rthooks.dat"}
    assert names - info == expected | data
    assert any(name.endswith("/licenses/LICENSE") for name in info)


def test_importing_tamis_is_cheap_and_loads_no_compiler() -> None:
    """0.15 s is where a command line starts to feel slow; of processor time: others use it too."""
    code = (
        "import json, sys, time; t = time.process_time(); import tamis; "
        "print(json.dumps([time.process_time() - t, "
        "[m for m in ('numpy', 'numba', 'llvmlite') if m in sys.modules]]))"
    )
    times = []
    for _ in range(5):
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        seconds, loaded = json.loads(out)
        assert loaded == []
        times.append(seconds)
    assert statistics.median(times) < 0.15


def reads_environment(source: str) -> list[int]:
    """The lines that name os.environ or os.getenv."""
    words = {"environ", "environb", "getenv", "getenvb"}
    lines = []
    for node in ast.walk(ast.parse(source)):
        attribute = isinstance(node, ast.Attribute) and node.attr in words
        imported = isinstance(node, ast.ImportFrom) and any(a.name in words for a in node.names)
        if attribute or imported:
            lines.append(node.lineno)
    return lines


def test_the_environment_is_read_only_where_that_is_said(root: Path) -> None:
    found = [
        f"{path.relative_to(root).as_posix()}:{line}"
        for folder in ("runner", "jit_kernels")
        for path in sorted((root / folder).rglob("*.py"))
        if "tamis_llama_cpp" not in path.parts  # a distribution of its own
        if path.relative_to(root).as_posix() not in MAY_READ_ENVIRONMENT
        for line in reads_environment(path.read_text())
    ]
    assert not found, "pass what is needed as an argument, or say why in MAY_READ_ENVIRONMENT"


def test_every_permission_to_read_the_environment_is_used(root: Path) -> None:
    for file in MAY_READ_ENVIRONMENT:
        assert reads_environment((root / file).read_text()), file


def test_no_file_names_a_path_of_the_machine_it_was_written_on(root: Path) -> None:
    path_of_somebody = re.compile(r"(?<![\w.~])/(?:home|root|Users|work)/\w|[A-Z]:\\Users\\\w")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        capture_output=True,
        check=True,
    ).stdout
    found = []
    for name in listed.decode().split("\0"):
        path = root / name
        if not name or not path.is_file() or b"\0" in path.read_bytes()[:8192]:
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if path_of_somebody.search(line):
                found.append(f"{name}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


def test_the_readme_has_two_command_lines_and_ci_runs_the_second(root: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", (root / "README.md").read_text(), re.M | re.S)
    assert [block.splitlines() for block in blocks] == [
        ['python -m pip install ".[chat,compile]" && tamis chat'],
        ['python -m pip install ".[test]" && pytest -m "not slow"'],
    ]
