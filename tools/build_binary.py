"""Build tamis as one executable file, which contains the Python that runs this.

`python -m tamis.tools.build_binary OUT` needs a C compiler with a static C library, strip and
readelf. The file consists of tools/launcher.c, a few uncompressed files, and the rest compressed;
launcher.c describes the parts. Packages are those of tools/requirements.lock.
"""

import argparse
import hashlib
import lzma
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tamis.tools.dependencies import LOCK, source_date

HERE = Path(__file__).parent
MARKS = b"tamis program 1\0"
_TAIL, _ENTRY = struct.Struct("<QQQQ32s16s"), struct.Struct("<IIQ")
_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26}]
# Modules that the program never imports. readline and gdbm have incompatible licences.
WITHOUT = (
    "test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "pydoc_data",
    "site-packages", "config-*", "__pycache__", "turtle.py", "_tkinter.*", "_test*",
    "xx*", "*_test.*", "readline.*", "_gdbm.*", "_dbm.*", "_curses*", "nis.*",
    "ossaudiodev.*", "_sqlite3.*", "_xx*",
)  # fmt: skip
UNUSED = (
    "tests",
    "f2py",
    "*.pyi",
    "*.h",
    "*.c",
    "*.a",
    "*.pxd",
    "*.pyx",
    "py.typed",
    "bin",
    "*.whl",
)
# The C library is the system's; all other libraries are included.
_SYSTEM = re.compile(r"(ld-linux|lib(c|m|dl|pthread|rt|util|resolv|nsl)\.so)")
START = """import sys
from tamis.cli import main
sys.exit(main())
"""
UNPACK = """import lzma, os, struct, sys
file, at, size, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
unpacker = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=FILTERS)
end, have = at + size, b""
def take(n):
    global at, have
    while len(have) < n:
        data = b""
        if unpacker.needs_input:
            data = os.pread(file, min(1 << 20, end - at), at)
            at += len(data)
        have += unpacker.decompress(data, 1 << 22)
    found, have = have[:n], have[n:]
    return found
count, = struct.unpack("<Q", take(8))
for _ in range(count):
    n, mode, size = struct.unpack("<IIQ", take(16))
    path = os.path.join(folder, take(n).decode())
    os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as out:
        out.write(take(size))
"""


def build(out: Path, wheel: Path, date: int) -> Path:
    """The program made of a wheel. Raises subprocess.CalledProcessError with the tool's output."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        _copy_python(root)
        _install(root, wheel)
        _copy_libraries(root)
        _compile(root, date)
        files = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_file()}
        first = _first_files(root)
        head = _launcher(Path(folder))
        target = out / f"tamis-{wheel.name.split('-')[1]}-linux-{platform.machine()}"
        _write(
            target,
            head,
            {n: files[n] for n in first},
            {n: files[n] for n in files if n not in first},
        )
    return target


def _write(target: Path, head: bytes, first: dict[str, Path], rest: dict[str, Path]) -> None:
    """Write the launcher, uncompressed files, compressed ones, and their offsets."""
    plain = b"".join(_entry(name, first[name]) for name in sorted(first))
    # Files of a kind are adjacent, as they compress best together.
    order = sorted(rest, key=lambda name: (Path(name).suffix, name))
    many = b"".join([struct.pack("<Q", len(rest)), *(_entry(n, rest[n]) for n in order)])
    packed = lzma.compress(many, lzma.FORMAT_RAW, filters=_FILTERS)
    digest = hashlib.sha256(plain + packed).hexdigest()[:32].encode()
    tail = _TAIL.pack(len(head), len(first), len(head) + len(plain), len(packed), digest, MARKS)
    target.write_bytes(head + plain + packed + tail)
    target.chmod(0o755)


def _entry(name: str, path: Path) -> bytes:
    mode = 0o700 if os.access(path, os.X_OK) else 0o600
    data, text = path.read_bytes(), name.encode()
    return _ENTRY.pack(len(text), mode, len(data)) + text + data


def _copy_python(root: Path) -> None:
    """Copy the interpreter and its library so that they find each other in any folder."""
    library = Path(sysconfig.get_path("stdlib"))
    target = root / "lib" / library.name
    shutil.copytree(library, target, ignore=shutil.ignore_patterns(*WITHOUT))
    (root / "bin").mkdir()
    python = root / "bin" / "python3"
    shutil.copy(Path(sys.base_prefix) / "bin" / library.name, python)
    set_library_path(python, "$ORIGIN/../lib")
    for module in sorted((target / "lib-dynload").glob("*.so")):
        set_library_path(module, "$ORIGIN/../..")
    (root / "tamis.py").write_text(START)
    (root / "unpack.py").write_text(UNPACK.replace("FILTERS", repr(_FILTERS)))


def set_library_path(program: Path, to: str) -> None:
    """Make a program, and what it loads, find libraries in a folder beside it.

    It replaces the program's own path for them, which a Python built with shared libraries has.
    Raises ValueError if that one is too short.
    """
    text = _run("readelf", "-dW", str(program))
    found = re.search(r"0x0*(?:1d|f) \((?:RUNPATH|RPATH)\).*\[(.*)\]", text)
    if found is None:
        return
    old, new = found[1].encode(), to.encode()
    data = program.read_bytes()
    if len(old) < len(new) or data.count(old + b"\0") != 1:
        raise ValueError(f"{program}: no room for {to} where {found[1]} is")
    data = data.replace(old + b"\0", new.ljust(len(old) + 1, b"\0"))
    # DT_RUNPATH (29) applies to the program only, DT_RPATH (15) also to what it loads.
    offset, size = _dynamic(text, str(program))
    table = bytearray(data[offset : offset + size])
    for at in range(0, len(table), 16):
        if struct.unpack_from("<Q", table, at)[0] == 29:
            struct.pack_into("<Q", table, at, 15)
    program.write_bytes(data[:offset] + bytes(table) + data[offset + size :])


def _dynamic(text: str, program: str) -> tuple[int, int]:
    """The offset of a program's dynamic section in its file, and its bytes."""
    start = re.search(r"at offset (0x[0-9a-f]+) contains (\d+) entr", text)
    if start is None:
        raise ValueError(f"{program}: readelf shows no dynamic section")
    return int(start[1], 16), 16 * int(start[2])


def _install(root: Path, wheel: Path) -> None:
    """Install the wheel and the packages of the lock file, checked by their hashes."""
    (library,) = (root / "lib").iterdir()
    site = library / "site-packages"
    pip = [sys.executable, "-P", "-m", "pip", "install", "-q", "--no-compile", "--no-deps"]
    pip += ["--disable-pip-version-check", "--target", str(site), "--only-binary", ":all:"]
    subprocess.run([*pip, "--require-hashes", "-r", str(LOCK)], check=True)
    subprocess.run([*pip, "--upgrade", str(wheel)], check=True)
    for pattern in UNUSED:
        for path in list(site.rglob(pattern)):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):  # paths and dates
        for path in site.glob(f"*.dist-info/{name}"):
            path.unlink()


def _copy_libraries(root: Path) -> None:
    """Copy the system's libraries that Python's modules need, without symbols.

    Not the C library.
    """
    modules = sorted(path for path in root.rglob("*.so*") if path.is_file())
    have = {path.name for path in modules}
    environment = {**os.environ, "LD_LIBRARY_PATH": f"{sys.base_prefix}/lib"}
    for path in [root / "bin" / "python3", *modules]:
        text = _run("ldd", str(path), env=environment)
        for name, found in re.findall(r"^\s*(\S+) => (/\S+)", text, re.MULTILINE):
            if not _SYSTEM.match(name) and name not in have:
                have.add(name)
                shutil.copy(found, root / "lib" / name)
    own = [path for path in modules if "lib-dynload" in path.parts]
    for path in [root / "bin" / "python3", *(root / "lib").glob("*.so*"), *own]:
        _run("strip", "--strip-unneeded", str(path))


def _compile(root: Path, date: int) -> None:
    """Replace sources by bytecode, so that a start reads no sources."""
    code = (
        "import compileall, sys, py_compile; sys.exit(not compileall.compile_dir(sys.argv[1], "
        "quiet=1, legacy=True, stripdir=sys.argv[1], workers=1, "
        "invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": str(date)}
    subprocess.run([sys.executable, "-P", "-c", code, str(root)], env=environment, check=True)
    for path in root.rglob("*.py"):
        path.unlink()


def _first_files(root: Path) -> set[str]:
    """The files that Python needs to unpack the rest."""
    code = "import lzma, os, struct, sys; print(*(m.__name__ for m in sys.modules.values()))"
    names = _run(sys.executable, "-I", "-S", "-c", code).split()
    (library,) = (root / "lib").glob("python3*")
    found = {root / "unpack.pyc", root / "bin" / "python3", library / "os.pyc"}
    for name in names:
        path = library / name.replace(".", "/")
        found |= {path.with_suffix(".pyc"), path / "__init__.pyc"}
        found |= {*(library / "lib-dynload").glob(f"{name}.*so")}
    for path in [p for p in found if p.exists() and p.suffix != ".pyc"]:
        text = _run("readelf", "-dW", str(path))
        for needed in re.findall(r"\(NEEDED\).*\[(.*)\]", text):
            found.add(root / "lib" / needed)
    return {path.relative_to(root).as_posix() for path in found if path.is_file()}


def _launcher(folder: Path) -> bytes:
    target = folder / "launcher"
    flags = ["-static", "-Os", "-s", "-Wl,--build-id=none", "-Wno-format-truncation"]
    _run("cc", *flags, "-o", str(target), str(HERE / "launcher.c"))
    return target.read_bytes()


def _run(*command: str, env: dict[str, str] | None = None) -> str:
    """The standard output of a tool.

    Raises CalledProcessError; its errors go to our standard error.
    """
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout


def needs_libc(files: Iterable[Path]) -> str:
    """The lowest version of the C library with which programs and libraries run."""
    found = {(2, 0)}
    for path in files:
        text = _run("readelf", "-VW", str(path))
        found |= {(int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", text)}
    return ".".join(map(str, max(found)))


def main() -> int:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder")
    parser.add_argument("--wheel", type=Path, help="with kernels; built where left out")
    args = parser.parse_args()
    if args.wheel is None:
        command = [sys.executable, "-P", "-m", "tamis.tools.release", "binary", str(args.out)]
        return subprocess.run(command, check=False).returncode
    print(build(args.out, args.wheel, source_date()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
