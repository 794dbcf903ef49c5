"""What a release is made with: archives of the same bytes, checked kernels, and its own lists."""

import csv
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import tamis
from tamis.jit_kernels.compile.shipped import write_shipped
from tamis.jit_kernels.compile.store import sources
from tamis.tools import build_binary, dependencies, release
from tamis.tools.ship_kernels import LEVELS, SUFFIX, check_shipped, vendors_of

NEW = "## Unreleased\n\n### Added\n- a thing\n\n## 0.1.0\n\nFirst.\n"


@pytest.fixture(scope="module", autouse=True)
def dated():
    """A commit's date is not known in every checkout; releases are made of the tree."""
    root = Path(__file__).resolve().parents[2]
    release.ROOT, dependencies.ROOT, build_binary.HERE = root, root, root / "tools"
    dependencies.LOCK = root / "tools" / "requirements.lock"
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = "1700000000"
    yield
    del os.environ["SOURCE_DATE_EPOCH"]
    if before is not None:
        os.environ["SOURCE_DATE_EPOCH"] = before


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    made_of = sources("cpu")
    assert made_of is not None
    write_shipped(folder / f"avx2{SUFFIX}", {"a": b"code"}, sources=made_of, compiler="")
    return folder


@pytest.fixture(scope="module")
def wheel(kernels, tmp_path_factory):
    return release.wheel(tmp_path_factory.mktemp("wheel"), kernels)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- the changelog -------------------------------------------------------------------------------


def test_the_changelog_says_what_is_new_in_a_development_version():
    release.check_changelog(NEW, "0.2.0.dev1")
    with pytest.raises(release.ReleaseError, match="no section ## Unreleased"):
        release.check_changelog(NEW.replace("## Unreleased", "## Later"), "0.2.0.dev1")


@pytest.mark.parametrize(
    ("text", "version", "what"),
    [
        (NEW, "0.2.0", "no section ## 0.2.0"),
        (NEW, "0.1.0", "changes under Unreleased"),
        ("## 0.2.0\n\n## 0.1.0\n", "0.2.0", "no section ## 0.2.0 with what is new"),
        ("# Changelog\n", "0.2.0.dev1", "no section ## Unreleased"),
    ],
)
def test_a_changelog_that_lacks_a_version_keeps_it_from_being_released(text, version, what):
    with pytest.raises(release.ReleaseError, match=what):
        release.check_changelog(text, version)


# --- archives ------------------------------------------------------------------------------------


def test_the_wheel_has_the_kernels_and_a_true_record(wheel, kernels):
    assert wheel.name.startswith(f"tamis-{tamis.__version__}-py3-none-manylinux_2_17_")
    with zipfile.ZipFile(wheel) as file:
        content = {name: file.read(name) for name in file.namelist()}
    name = f"tamis/jit_kernels/compile/kernels/avx2{SUFFIX}"
    assert content[name] == (kernels / f"avx2{SUFFIX}").read_bytes()
    (record,) = (name for name in content if name.endswith("/RECORD"))
    rows = {row[0]: row[2] for row in csv.reader(io.StringIO(content[record].decode()))}
    assert rows.keys() == content.keys()
    assert all(len(content[name]) == int(size) for name, size in rows.items() if size)
    about = content[record.replace("RECORD", "WHEEL")].decode()
    assert "Root-Is-Purelib: false" in about
    assert f"Tag: {wheel.stem.split('-', 2)[2]}" in about


def test_archives_of_the_same_tree_have_the_same_bytes(wheel, kernels, tmp_path):
    assert digest(release.wheel(tmp_path, kernels)) == digest(wheel)
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    one, two = release.sdist(tmp_path / "1"), release.sdist(tmp_path / "2")
    assert digest(one) == digest(two)
    with tarfile.open(one) as file:
        assert {member.mtime for member in file.getmembers()} == {1700000000}
        assert any(name.endswith("/runner/__init__.py") for name in file.getnames())


def test_a_wheel_is_of_the_machine_that_its_kernels_are_of(tmp_path):
    made_of = sources("cpu")
    assert made_of is not None
    write_shipped(tmp_path / f"neon{SUFFIX}", {"a": b"code"}, sources=made_of, compiler="")
    found = release.wheel(tmp_path, tmp_path)
    assert found.name.endswith("-py3-none-manylinux_2_17_aarch64.whl")
    with zipfile.ZipFile(found) as file:
        (info,) = [name for name in file.namelist() if name.endswith("/WHEEL")]
        assert "Tag: py3-none-manylinux_2_17_aarch64" in file.read(info).decode()
    write_shipped(tmp_path / f"avx2{SUFFIX}", {"a": b"code"}, sources=made_of, compiler="")
    with pytest.raises(release.ReleaseError, match="avx2, neon are of two machines"):
        release.wheel(tmp_path, tmp_path)


def test_ptx_is_in_a_wheel_of_its_own(kernels, tmp_path):
    assert release.cuda_wheel(tmp_path, kernels) is None
    (tmp_path / "k").mkdir()
    shutil.copy(kernels / f"avx2{SUFFIX}", tmp_path / "k")
    made_of = sources("cuda")
    assert made_of is not None
    write_shipped(tmp_path / "k" / f"sm_80{SUFFIX}", {"b": b"ptx"}, sources=made_of, compiler="")
    found = [release.wheel(tmp_path, tmp_path / "k"), release.cuda_wheel(tmp_path, tmp_path / "k")]
    inside = []
    for path in found:
        with zipfile.ZipFile(path) as file:
            names = file.namelist()
            (about,) = [name for name in names if name.endswith(".dist-info/METADATA")]
            version = Parser().parsestr(file.read(about).decode())["Version"]
        assert path.name.startswith(f"tamis-{version}-py3-none-manylinux")
        assert about == f"tamis-{version}.dist-info/METADATA"
        assert sum(".dist-info/METADATA" in name for name in names) == 1
        inside.append((version, sorted(Path(n).name for n in names if n.endswith(SUFFIX))))
    (tmp_path / "k" / f"avx2{SUFFIX}").unlink()
    with pytest.raises(release.ReleaseError, match="has kernels of no CPU"):
        release.wheel(tmp_path, tmp_path / "k")
    assert inside == [
        (tamis.__version__, [f"avx2{SUFFIX}"]),
        (f"{tamis.__version__}+cuda", [f"avx2{SUFFIX}", f"sm_80{SUFFIX}"]),
    ]


def test_no_kernels_no_wheel(tmp_path):
    with pytest.raises(release.ReleaseError, match="has no kernels"):
        release.wheel(tmp_path, tmp_path)


def test_checksums_are_those_that_sha256sum_checks(tmp_path):
    (tmp_path / "a b").write_bytes(b"x")
    release.checksums(tmp_path)
    done = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=tmp_path, check=True,
                          capture_output=True, text=True)  # fmt: skip
    assert done.stdout == "a b: OK\n"


# --- dependencies --------------------------------------------------------------------------------


def test_the_lock_file_has_a_version_and_hashes_of_every_requirement():
    found = dependencies.locked()
    assert all(hashes for _, hashes in found.values())
    for text in dependencies.requirements():
        name = text.split(">")[0].split("=")[0].replace("_", "-").lower()
        assert name in found, "run python -m tamis.tools.release lock"
    assert not {"numba", "llvmlite", "setuptools"} & found.keys()


def test_the_bill_of_materials_names_what_is_locked():
    text = dependencies.materials("1.2.3", 1700000000)
    found = json.loads(text)
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    assert found["metadata"]["component"]["purl"] == "pkg:pypi/tamis@1.2.3"
    versions = {part["name"]: part["version"] for part in found["components"]}
    assert versions == {name: version for name, (version, _) in dependencies.locked().items()}
    assert text == dependencies.materials("1.2.3", 1700000000)


def test_levels_that_only_one_vendor_has_are_made_once():
    assert {level: len(vendors_of(level)) for level in LEVELS} == {
        "avx2": 2, "avx2-vnni": 1, "avx512": 1, "avx512-vnni": 2,
        "neon": 1, "neon-dotprod": 1, "neon-i8mm": 1,
    }  # fmt: skip


# --- the program in one file ---------------------------------------------------------------------

TOOLS = all(shutil.which(name) for name in ("cc", "readelf"))
PYTHON = """#!/bin/sh
# Stands for Python: unpacks nothing, then tells its arguments.
case "$3" in */unpack.pyc) echo >> {log}; exit {fails};; esac
echo "$0|$2|$3|$HOME"
"""


@pytest.fixture
def program(tmp_path, request):
    """A launcher with a shell script where Python would be; a log of how often it unpacked."""
    if not TOOLS:
        pytest.skip("needs a C compiler and readelf")
    log, stand_in = tmp_path / "log", tmp_path / "python3"
    stand_in.write_text(PYTHON.format(log=log, fails=getattr(request, "param", 0)))
    stand_in.chmod(0o755)
    (tmp_path / "rest").write_text("rest")
    target = tmp_path / "program"
    head = build_binary._launcher(tmp_path)
    build_binary._write(target, head, {"bin/python3": stand_in}, {"rest": tmp_path / "rest"})
    return target, log


def call(program, **environment):
    return subprocess.run(
        [program, "a b"], env=environment, capture_output=True, text=True, check=False
    )


def test_the_program_unpacks_once_into_a_folder_of_its_own(program, tmp_path):
    target, log = program
    first = call(target, XDG_CACHE_HOME=str(tmp_path / "cache"), HOME="/h")
    again = call(target, XDG_CACHE_HOME=str(tmp_path / "cache"), HOME="/h")
    assert first.stdout == again.stdout
    python, script, word, home = first.stdout.strip().split("|")
    assert Path(python).parts[-4:-2] == ("tamis", Path(python).parts[-3])
    assert (Path(script).name, word, home) == ("tamis.pyc", "a b", "/h")
    assert len(log.read_text()) == 1
    (folder,) = (tmp_path / "cache" / "tamis").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_not_run_from(program, tmp_path):
    target, log = program
    call(target, XDG_CACHE_HOME=str(tmp_path / "cache"), HOME=str(tmp_path / "home"))
    (folder,) = (tmp_path / "cache" / "tamis").iterdir()
    folder.chmod(0o777)
    done = call(target, XDG_CACHE_HOME=str(tmp_path / "cache"), HOME=str(tmp_path / "home"))
    assert str(tmp_path / "home" / ".cache") in done.stdout
    assert len(log.read_text()) == 2


@pytest.mark.parametrize("program", [1], indirect=True)
def test_what_cannot_be_unpacked_is_an_error_and_leaves_nothing(program, tmp_path):
    done = call(program[0], XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "set XDG_CACHE_HOME to a folder" in done.stderr
    assert not list((tmp_path / "cache" / "tamis").iterdir())


def test_half_a_program_says_so(program, tmp_path):
    target, _ = program
    target.write_bytes(target.read_bytes()[:-40])
    done = call(target, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert (done.returncode, "fetch it again" in done.stderr) == (1, True)


def install(release, folder):
    script = build_binary.HERE / "install.sh"
    return subprocess.run(
        ["sh", script, str(release), str(folder)], capture_output=True, text=True, check=False
    )


def test_the_program_is_installed_from_a_release_and_not_where_it_was_changed(tmp_path):
    name = f"tamis-1.2.3-linux-{platform.machine()}"
    (tmp_path / "release").mkdir()
    program = tmp_path / "release" / name
    program.write_text("#!/bin/sh\necho 1.2.3\n")
    release.checksums(tmp_path / "release")
    done = install(tmp_path / "release", tmp_path / "bin")
    assert done.stdout.strip() == str(tmp_path / "bin" / "tamis"), done.stderr
    assert subprocess.check_output([tmp_path / "bin" / "tamis"]) == b"1.2.3\n"
    program.write_text("#!/bin/sh\necho other\n")
    done = install(tmp_path / "release", tmp_path / "bin")
    assert (done.returncode, f"{name} is not what SHA256SUMS says" in done.stderr) == (1, True)
    assert subprocess.check_output([tmp_path / "bin" / "tamis"]) == b"1.2.3\n"


def test_kernels_are_checked_against_the_sources_of_their_kind(tmp_path):
    """An edit of a GPU's kernels leaves those of CPUs as they are."""
    for name, kind in (("avx2", "cpu"), ("sm_80", "cuda"), ("sm_90a", "cpu")):
        made_of = sources(kind)
        assert made_of is not None
        write_shipped(tmp_path / f"{name}{SUFFIX}", {}, sources=made_of, compiler="")
    wrong = check_shipped(sorted(tmp_path.iterdir()))
    assert [text.split(":")[0] for text in wrong] == [f"sm_90a{SUFFIX}"]
