"""Build the files of a release; the same tree gives the same bytes.

`python -m tamis.tools.release all OUT` in a clone makes the source archive, the wheels with kernels
inside, the program in one file, a bill of materials and SHA256SUMS. `kernels`, `wheel`, `sdist`,
`binary` make one of them, `lock` renews the hashes of dependencies. It needs the extra `test`, a C
compiler for the program, and hours of processor time for the kernels, which are kept.
"""

import argparse
import base64
import contextlib
import csv
import gzip
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tamis.jit_kernels.cpu.lang.features import VENDORS
from tamis.tools import build_binary, dependencies, ship_kernels
from tamis.tools.dependencies import ROOT, source_date
from tamis.tools.kernel_set import HEADS, STORED, kernel_set
from tamis.version import __version__

FOLDERS = ("bindings", "formats", "jit_kernels", "runner", "tools")
FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")
KERNELS = "tamis/jit_kernels/compile/kernels"
# the script that fetches the program, given the address of a release
INSTALL = Path(__file__).with_name("install.sh")
LOCAL = "+cuda"  # part of the version of a wheel with PTX
TAG = "py3-none-manylinux_2_17_{}"  # kernels need at most this version of the C library


class ReleaseError(RuntimeError):
    """The reason why the tree cannot be released."""


def check_changelog(text: str, version: str) -> None:
    """Raise ReleaseError unless the changelog has a section of the version, with its news.

    For a development version that is Unreleased.
    """
    found = {
        name.strip("[]"): text.strip()
        for name, text in re.findall(r"^## (\S+).*\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
    }
    wanted = "Unreleased" if ".dev" in version else version
    if not found.get(wanted):
        raise ReleaseError(f"CHANGELOG.md has no section ## {wanted} with what is new")
    if wanted == version and found.get("Unreleased"):
        raise ReleaseError(f"CHANGELOG.md has changes under Unreleased: they go to ## {version}")


def sdist(out: Path) -> Path:
    """The source archive; its files have one owner, one date and sorted names."""
    with _built("--sdist") as path:
        target = out / path.name
        with tarfile.open(path) as source, target.open("wb") as file:
            members = sorted(source.getmembers(), key=lambda m: m.name)
            with (
                gzip.GzipFile("", "wb", 9, file, mtime=source_date()) as packed,
                tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
            ):
                for member in members:
                    member.mtime, member.uid, member.gid = source_date(), 0, 0
                    member.uname = member.gname = ""
                    member.mode = 0o755 if member.isdir() else 0o644
                    member.pax_headers = {}
                    archive.addfile(member, source.extractfile(member))
    return target


def wheel(out: Path, kernels: Path) -> Path:
    """The wheel for the machine of a folder's kernels, with those of its CPUs inside.

    Raises ReleaseError if they were made of other sources than the tree's, or for two machines.
    """
    files = [path for path in _checked(kernels) if path.stem not in ship_kernels.TARGETS]
    if not files:
        raise ReleaseError(f"{kernels} has kernels of no CPU: name one of its levels with --levels")
    return _wheel(out, files)


def cuda_wheel(out: Path, kernels: Path) -> Path | None:
    """A wheel of the version VERSION+cuda with PTX inside, too; None if the folder has none.

    It is a separate wheel because few users have such a GPU and all would download it.
    """
    files = _checked(kernels)
    if not any(path.stem in ship_kernels.TARGETS for path in files):
        return None
    return _wheel(out, files, LOCAL)


def _checked(kernels: Path) -> list[Path]:
    files = sorted(kernels.glob(f"*{ship_kernels.SUFFIX}"))
    if not files:
        raise ReleaseError(f"{kernels} has no kernels: make them with `release kernels {kernels}`")
    if wrong := ship_kernels.check_shipped(files):
        raise ReleaseError(f"{kernels}: " + "; ".join(wrong))
    return files


def _wheel(out: Path, files: list[Path], local: str = "") -> Path:
    tag = TAG.format(_machine_of(files))
    with _built("--wheel") as path, zipfile.ZipFile(path) as source:
        content = {name: source.read(name) for name in source.namelist()}
    (info,) = {name.split("/")[0] for name in content if ".dist-info/" in name}
    named = info.removesuffix(".dist-info") + local
    content = {name.replace(info, f"{named}.dist-info", 1): d for name, d in content.items()}
    info = f"{named}.dist-info"
    content |= {f"{KERNELS}/{file.name}": file.read_bytes() for file in files}
    version = f"\nVersion: {__version__}"
    for name, old, new in (
        ("METADATA", version, version + local),
        ("WHEEL", "Root-Is-Purelib: true", "Root-Is-Purelib: false"),
        ("WHEEL", "Tag: py3-none-any", f"Tag: {tag}"),
    ):
        text = content[f"{info}/{name}"].decode()
        assert old in text
        content[f"{info}/{name}"] = text.replace(old, new, 1).encode()
    content[f"{info}/RECORD"] = _record(content, f"{info}/RECORD")
    target = out / f"{named}-{tag}.whl"
    write_zip(target, content)
    return target


def _machine_of(files: list[Path]) -> str:
    """The machine of the kernel files' CPUs; this machine if all are for GPUs."""
    levels = {path.stem for path in files} & {*ship_kernels.LEVELS}
    machines = {"aarch64" if name in ship_kernels.OF_ARM else "x86_64" for name in levels}
    if len(machines) > 1:
        raise ReleaseError(
            f"kernels of {', '.join(sorted(levels))} are of two machines: a wheel is of one"
        )
    return machines.pop() if machines else platform.machine()


def write_zip(path: Path, content: dict[str, bytes]) -> None:
    """A zip file of these files, dated `source_date`, in the order of their names."""
    date = time.gmtime(source_date())[:6]
    with zipfile.ZipFile(path, "w") as file:
        for name in sorted(content):
            entry = zipfile.ZipInfo(name, date)
            entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
            entry.external_attr = 0o644 << 16
            file.writestr(entry, content[name], compresslevel=9)


def _record(content: dict[str, bytes], own: str) -> bytes:
    """The table of a wheel's files: name, digest, size."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name in sorted(content.keys() - {own}):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content[name]).digest()).rstrip(b"=")
        rows.writerow([name, f"sha256={digest.decode()}", len(content[name])])
    rows.writerow([own, "", ""])
    return text.getvalue().encode()


@contextlib.contextmanager
def _built(kind: str) -> Iterator[Path]:
    """The output of the build backend for a copy of the tree, which stays clean."""
    with tempfile.TemporaryDirectory() as folder:
        tree, dist = Path(folder) / "tree", Path(folder) / "dist"
        for name in FOLDERS:
            ignored = shutil.ignore_patterns("__pycache__", f"*{ship_kernels.SUFFIX}")
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        for name in FILES:
            shutil.copy(ROOT / name, tree)
        command = [sys.executable, "-P", "-m", "build", kind, "--no-isolation", "-o", str(dist)]
        done = subprocess.run(
            [*command, "--skip-dependency-check"],
            cwd=tree,
            env={**os.environ, "SOURCE_DATE_EPOCH": str(source_date())},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise ReleaseError(f"the build failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        (path,) = dist.iterdir()
        yield path


def checksums(out: Path) -> Path:
    """SHA256SUMS of the files in a folder, in the format of sha256sum."""
    target = out / "SHA256SUMS"
    files = sorted(path for path in out.iterdir() if path.is_file() and path != target)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    target.write_text("".join(lines))
    return target


class Wanted(NamedTuple):
    """The kernels to make, and the number of processes."""

    heads: list[tuple[int, int]]  # empty: all of HEADS
    types: list[str]  # of weights; empty: all
    levels: list[str]  # of CPUs, and targets of GPUs
    vendors: list[str]  # of CPUs; empty: all that a level has
    n_worker: int


def everything(out: Path, kernels: Path, wanted: Wanted) -> None:
    """Build all of a release. Raises ReleaseError and what compiling raises."""
    check_changelog((ROOT / "CHANGELOG.md").read_text(), __version__)
    make_kernels(kernels, wanted)
    found = wheel(out, kernels)
    cuda_wheel(out, kernels)
    sdist(out)
    build_binary.build(out, found, source_date())
    materials = dependencies.materials(__version__, source_date())
    (out / f"tamis-{__version__}.cdx.json").write_text(materials)
    shutil.copy(dependencies.LOCK, out / "requirements.lock")
    shutil.copy(INSTALL, out)
    checksums(out)


def make_kernels(out: Path, wanted: Wanted) -> None:
    """Write the files of kernels; those that are not stored from before are compiled."""

    def tell(name: str, done: int, total: int) -> None:
        print(f"{name}: {done} of {total} kernels", file=sys.stderr)

    specs = kernel_set(wanted.heads or HEADS, wanted.types)
    how: dict[str, Any] = {"n_worker": wanted.n_worker, "progress": tell}
    levels = [name for name in wanted.levels if name in ship_kernels.LEVELS]
    ship_kernels.ship_kernels(out, specs, levels, vendors=wanted.vendors, **how)
    ship_kernels.ship_ptx(out, specs, [n for n in wanted.levels if n not in levels], **how)


def _heads(text: str) -> tuple[int, int]:
    head_dim, group = text.split("x")
    return int(head_dim), int(group)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["all", "kernels", "wheel", "sdist", "binary", "lock"])
    parser.add_argument("out", type=Path, nargs="?", help="folder; of lock: the file in the tree")
    parser.add_argument("--kernels", type=Path, help="folder of kernels (default: OUT/kernels)")
    parser.add_argument(
        "--heads", type=_heads, nargs="*", default=[], metavar="DIMxGROUP",
        help="kernels of these heads only, such as 64x3: a trial, no release",
    )  # fmt: skip
    parser.add_argument(
        "--types", choices=STORED, nargs="*", default=[], metavar="TYPE",
        help="kernels of these types of weights only, such as Q4_K: likewise",
    )  # fmt: skip
    levels = [*ship_kernels.LEVELS, *ship_kernels.TARGETS]
    of_cpus = ship_kernels.OF_ARM if platform.machine() == "aarch64" else ship_kernels.OF_X86
    here = [*of_cpus, *ship_kernels.TARGETS]
    parser.add_argument("--levels", nargs="*", choices=levels, default=here, help="likewise")
    parser.add_argument("--vendors", nargs="*", choices=VENDORS, default=[], help="likewise")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    if args.what == "lock":
        dependencies.renew_lock()
        return 0
    if args.out is None:
        parser.error(f"{args.what} needs OUT")
    args.out.mkdir(parents=True, exist_ok=True)
    kernels = args.kernels or args.out / "kernels"
    wanted = Wanted(args.heads, args.types, list(args.levels), args.vendors, args.workers)
    try:
        if args.what == "all":
            everything(args.out, kernels, wanted)
        elif args.what == "kernels":
            make_kernels(args.out, wanted)
        elif args.what == "wheel":
            if not kernels.is_dir():
                make_kernels(kernels, wanted)
            print(wheel(args.out, kernels))
            if found := cuda_wheel(args.out, kernels):
                print(found)
        elif args.what == "binary":
            print(build_binary.build(args.out, wheel(args.out, kernels), source_date()))
        else:
            print(sdist(args.out))
    except ReleaseError as error:
        sys.exit(f"error: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
