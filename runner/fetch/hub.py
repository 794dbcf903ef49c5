"""Models of the Hugging Face hub: choose the file of a repository by quantisation and fetch it.

huggingface_hub (the extra `hub`) is imported only when something is fetched.
"""

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from tamis.fetch.base import (
    ModelError,
    Progress,
    Unreachable,
    put_in_place,
    require_space,
    sha256_of,
)

_SPEC = re.compile(
    r"hf:(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<quant>\w[\w.-]*)|/(?P<path>[^:]+\.gguf))?", re.ASCII
)
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_PROBE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class HubSpec:
    """The parsed form of `hf:owner/repo:QUANT` or `hf:owner/repo/file.gguf`."""

    repo: str
    quant: str | None
    path: str | None

    @classmethod
    def parse(cls, text: str) -> "HubSpec":
        """Read a spec. Raises ModelError."""
        match = _SPEC.fullmatch(text)
        if match is None or ".." in text:
            raise ModelError(
                f"cannot read {text!r}: expected hf:owner/repo:QUANT or hf:owner/repo/file.gguf, "
                "for example hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M"
            )
        return cls(match["repo"], match["quant"], match["path"])

    def __str__(self) -> str:
        return f"hf:{self.repo}" + (f":{self.quant}" if self.quant else f"/{self.path or ''}")


class HubFile(NamedTuple):
    """A file of a repository, as the hub lists it."""

    path: str
    n_bytes: int
    sha256: str | None  # None: a small file, for which the hub lists no digest


class Listing(NamedTuple):
    """The files of one commit of a repository, by path."""

    repo: str
    commit: str
    files: dict[str, HubFile]


def pick(names: Sequence[str], spec: HubSpec) -> list[str]:
    """The file among `names` that `spec` asks for, or all parts in order if it is split.

    A quantisation matches as a whole word and in any case: Q4_K does not match Q4_K_M. Raises
    ModelError, which lists the candidates, unless exactly one model matches.
    """
    models = groups(names)
    if spec.path is not None:
        found = [first for first, parts in models.items() if spec.path in parts]
    else:
        # Files beside the model: image projectors and importance matrices are not language models.
        found = [first for first in models if not re.search(r"mmproj|imatrix", first, re.I)]
        if spec.quant is not None:
            word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(spec.quant)}(?![A-Za-z0-9_])", re.I)
            found = [first for first in found if word.search(first)]
    if len(found) != 1:
        what = "matches more than one of" if found else "matches nothing in"
        listed = ", ".join(found or models) or "a repository without .gguf files"
        raise ModelError(f"{spec} {what}: {listed}; name one as hf:{spec.repo}/<file>")
    parts = models[found[0]]
    split = _SPLIT.fullmatch(parts[0])
    if split is not None and len(parts) != int(split["count"]):
        raise ModelError(f"{spec} is split in {int(split['count'])} parts, but only {parts} exist")
    return parts


def groups(names: Sequence[str]) -> dict[str, list[str]]:
    """The models among file names: the parts of each in order, by the name of its first part."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf"):
            split = _SPLIT.fullmatch(name)
            first = f"{split['stem']}-00001-of-{split['count']}.gguf" if split else name
            models.setdefault(first, []).append(name)
    return models


def list_files(repo: str, timeout: float = 10.0) -> Listing:
    """The files of the repository's main branch; `timeout` in seconds. Raises ModelError."""
    hub = _library()
    with _translated(repo):
        info = hub.HfApi().model_info(repo, files_metadata=True, timeout=timeout)
    files = {}
    for file in info.siblings or []:
        # The name becomes a path on this machine: it must not lead out of the model's folder.
        parts = file.rfilename.split("/")
        if "\\" in file.rfilename or any(part in ("", ".", "..") for part in parts):
            raise ModelError(
                f"{repo} lists a file named {file.rfilename!r}, which is no plain path"
            )
        sha256 = file.lfs.sha256 if file.lfs else None
        files[file.rfilename] = HubFile(file.rfilename, file.size or 0, sha256)
    return Listing(repo, info.sha, files)


def probe(repo: str) -> Listing | None:
    """The listing of a repository, or None if the hub does not return it within three seconds.

    Silent by design: there is another source. The thread is for name look-ups, which have no
    time-out of their own.
    """
    answers: list[Listing] = []

    def ask() -> None:
        with contextlib.suppress(Exception):  # whatever the error is, the other source decides
            answers.append(list_files(repo, timeout=_PROBE_SECONDS))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_PROBE_SECONDS)
    return answers[0] if answers else None


def fetch(
    listing: Listing, wanted: Sequence[tuple[HubFile, Path]], partial: Path, progress: Progress
) -> None:
    """Fetch files of a listing to their targets, in order, checked by size and SHA-256.

    An unfinished file stays in `partial` and the next call resumes it; an existing target is kept.
    Raises ModelError, Unreachable.
    """
    total, done = sum(file.n_bytes for file, _ in wanted), 0
    for file, target in wanted:
        if not target.exists():

            def report(n: int, before: int = done) -> None:
                progress("download", before + n, total)

            part = partial / f"{(file.sha256 or listing.commit)[:16]}-{target.name}.part"
            _download(listing, file, part, report)
            _check(file, part, progress)
            put_in_place(part, target)
        done += file.n_bytes
        progress("download", done, total)


def _download(listing: Listing, file: HubFile, part: Path, report: Callable[[int], None]) -> None:
    hub = _library()
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    with part.open("r+b") as out, _translated(listing.repo), _quiet():
        there = out.seek(0, 2)
        if there > file.n_bytes:
            there = out.truncate(0)
            out.seek(0)
        require_space(part.parent, file.n_bytes - there)
        report(there)
        # hf_hub_download starts anew after an interruption; http_get, which it calls, resumes.
        http_get(
            hub.hf_hub_url(listing.repo, file.path, revision=listing.commit),
            out,
            resume_size=there,
            headers=build_hf_headers(),
            expected_size=file.n_bytes,
            tqdm_class=_bar(report),
        )


def _check(file: HubFile, part: Path, progress: Progress) -> None:
    n_bytes = part.stat().st_size
    if n_bytes == file.n_bytes:
        if file.sha256 is None:
            return
        sha256 = sha256_of(part, progress)
        if sha256 == file.sha256:
            return
        what = f"SHA-256 {sha256}, expected {file.sha256}"
    else:
        what = f"{n_bytes} bytes, expected {file.n_bytes}"
    part.unlink()
    raise ModelError(f"{file.path} from the hub has {what}: it was removed; pull again")


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError as e:
        raise ModelError(
            "models of the Hugging Face hub need the package huggingface_hub: "
            "run pip install tamis[hub]"
        ) from e
    return huggingface_hub


@contextlib.contextmanager
def _translated(repo: str) -> Iterator[None]:
    """Turn the library's errors into ModelError; those of the file system are not changed."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as e:
        raise ModelError(
            f"{repo} is gated: accept its terms on the hub, then run `hf auth login`"
        ) from e
    except errors.RepositoryNotFoundError as e:
        raise ModelError(
            f"the hub has no {repo}, or it is private: check the name, or run `hf auth login`"
        ) from e
    except (errors.OfflineModeIsEnabled, errors.HTTPError) as e:
        response = getattr(e, "response", None)
        why = f"HTTP status {response.status_code}" if response is not None else e
        raise Unreachable(
            f"the hub does not answer for {repo} ({why}): check the network (and HF_ENDPOINT, "
            "HF_HUB_OFFLINE where set), then pull again; what was fetched so far is kept"
        ) from e
    except ValueError as e:
        raise ModelError(f"the hub's library refuses {repo}: {e}") from e
    except OSError as e:
        if e.errno is not None:
            raise
        # The library's own check of sizes: the connection ended early or the file changed.
        raise Unreachable(f"the hub did not send all of {repo} ({e}): pull again") from e


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the library's warnings about lost connections, which it restores itself."""
    import logging

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _bar(report: Callable[[int], None]) -> type:
    """A substitute for tqdm that draws nothing and reports bytes."""

    class Bar:
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            self.n = initial

        def update(self, n: int = 1) -> None:
            self.n += n
            report(self.n)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None:
            return None

        def close(self) -> None:
            return None

    return Bar
