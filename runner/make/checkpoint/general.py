"""What a converted file says of itself: its name, its parts, a label of its size, sampling."""

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import Source

# Keys of generation_config.json, and the names under general.sampling.
SAMPLING = {
    "sequence": ("sequence", "str"), "top_k": ("top_k", "i32"), "top_p": ("top_p", "f32"),
    "min_p": ("min_p", "f32"), "xtc_probability": ("xtc_probability", "f32"),
    "xtc_threshold": ("xtc_threshold", "f32"), "temperature": ("temp", "f32"),
    "penalty_last_n": ("penalty_last_n", "i32"), "penalty_repeat": ("penalty_repeat", "f32"),
    "mirostat": ("mirostat", "i32"), "mirostat_tau": ("mirostat_tau", "f32"),
    "mirostat_eta": ("mirostat_eta", "f32"),
}  # fmt: skip
_SIZE = re.compile(
    r"(([A]|\d+[x])?\d+([._]\d+)?[KMBT][\d]?|small|mini|medium|large|x?xl)", re.IGNORECASE
)
_VERSION = re.compile(r"(v|iter)?\d+([.]\d+)*", re.IGNORECASE)
_TYPE = re.compile(r"i?q\d(_\w)*|b?fp?(16|32)", re.IGNORECASE)
_FINETUNE = re.compile(r"chat|instruct|vision|lora", re.IGNORECASE)


class Shape(NamedTuple):
    """A tensor's name and dimensions, from the outer one."""

    name: str
    shape: tuple[int, ...]


class Name(NamedTuple):
    """The parts of a model's name, such as Qwen2.5-7B-Instruct; None for what it lacks."""

    name: str | None = None
    organization: str | None = None
    basename: str | None = None
    finetune: str | None = None
    version: str | None = None
    size_label: str | None = None


def add_general(source: Source, keys: Keys, tensors: Sequence[Shape]) -> None:
    """Set what stands under `general`, by the folder's name and generation_config.json."""
    keys.set("general.type", "str", "model")
    sampling = source.json("generation_config.json")
    if "repetition_penalty" in sampling:
        sampling.setdefault("penalty_repeat", sampling["repetition_penalty"])
    for key, (name, kind) in SAMPLING.items():
        value = sampling.get(key)
        keys.set(f"general.sampling.{name}", kind, int(value) if kind == "i32" and value else value)
    add_names(source.folder, source.config.get("_name_or_path"), keys, tensors)


def add_names(folder: Path, given: object, keys: Keys, tensors: Sequence[Shape]) -> None:
    """Set the parts of a model's name, by its folder's and the one that its config gives it."""
    total, shared, expert, n_expert = _counts(tensors)
    first = parts(given, total) if isinstance(given, str) and given.count("/") <= 1 else Name()
    pairs = zip(first, parts(folder.name, total), strict=True)
    found = Name(*(a if a is not None else b for a, b in pairs))
    label = found.size_label
    if label is None and total > 0:
        label = f"{n_expert}x{_count(shared + expert)}" if n_expert else _count(total)
    keys.set("general.name", "str", title(found.name or folder.name))
    keys.set("general.version", "str", found.version)
    keys.set(
        "general.organization", "str", title(found.organization) if found.organization else None
    )
    keys.set("general.finetune", "str", found.finetune)
    keys.set("general.basename", "str", found.basename)
    keys.set("general.size_label", "str", label)


def title(text: str) -> str:
    """A name as people read it: words in lower case get a capital, others stay."""
    words = text.strip().replace("-", " ").split()
    plain = [w for w in words if w.islower() and not re.match(r"^(v\d+(?:\.\d+)*|\d.*)$", w)]
    return " ".join(word.title() if word in plain else word for word in words)


def parts(name: str, n_params: int) -> Name:
    """The parts of a name such as org/Base-1.5-7B-Instruct.

    n_params: a size far from it is no size but, say, a context length; below 0: an adapter's.
    """
    if not name:
        return Name()
    if " " in name:
        return Name(name)
    before, slash, full = name.rpartition("/")
    organization = before if slash and not before.startswith(".") else None
    words = [word for word in full.split("-") if word]
    kinds = [_kinds(words, i, n_params) for i in range(len(words))]
    sizes = [i for i, kind in enumerate(kinds) if "size_label" in kind]
    if any(c.isdecimal() for i in sizes for c in words[i]):
        for i in sizes:
            if words[i].isalpha():
                kinds[i].remove("size_label")
    _mark_basename(words, kinds)

    def joined(kind: str, but: str = "") -> str | None:
        chosen = [w for w, k in zip(words, kinds, strict=True) if kind in k and but not in k]
        return "-".join(dict.fromkeys(chosen) if kind == "size_label" else chosen) or None

    basename, version = joined("basename"), joined("version", "basename")
    size, finetune = joined("size_label"), joined("finetune")
    if not (size or finetune or version):
        basename = None
    return Name(full, organization, basename, finetune, version, size)


def _kinds(words: list[str], i: int, n_params: int) -> set[str]:
    """What a word of a name may be; writes sizes and types in one way."""
    word = words[i]
    if _VERSION.fullmatch(word):
        return {"version"}
    if _TYPE.fullmatch(word):
        words[i] = word.upper()
        return {"type"}
    if i and _SIZE.fullmatch(word):
        word = word.replace("_", ".")
        if word[-1].isdecimal():  # 7b1
            word = f"{word[:-2]}.{word[-1]}{word[-2]}"
        if len(word) > 1 and word[-2].isdecimal() and word[-1] in "kmbt":
            word = word[:-1] + word[-1].upper()
        kind = "size_label"
        if n_params and _is_far(word, n_params):
            kind, word = "finetune", word[:-1] + word[-1].lower()
        words[i] = word
        return {kind}
    if i and _FINETUNE.fullmatch(word):
        return {"type" if n_params < 0 and word.lower() == "lora" else "finetune"}
    return set()


def _is_far(label: str, n_params: int) -> bool:
    try:
        n = float(label[:-1]) * 1000.0 ** " KMBT".find(label[-1])
    except ValueError:
        return False
    if n_params < 0:  # adapters need not have all layers
        return n < -n_params // 8
    return abs(n - n_params) > 7 * n_params // 8


def _mark_basename(words: list[str], kinds: list[set[str]]) -> None:
    at_start = True
    for word, kind in zip(words, kinds, strict=True):
        if at_start and ((not kind and word[0].isalpha()) or "version" in kind):
            kind.add("basename")
        else:
            at_start = False
            if not kind:
                kind.add("finetune")
    for kind in reversed(kinds):
        if "basename" not in kind or len(kind) == 1:
            break
        kind.remove("basename")


def _counts(tensors: Sequence[Shape]) -> tuple[int, int, int, int]:
    """Parameters in all, those of no expert, those of one expert, and the number of experts.

    In all: below 0 of an adapter, as of the matrices that it changes.
    """
    total = shared = expert = n_sum = n_tensor = 0
    sign, n_column = 1, 0
    for name, shape in tensors:
        if name.endswith(".lora_a"):
            sign, n_column = -1, shape[-1]
            continue
        if name.endswith(".lora_b"):
            shape = (*shape[:-1], n_column)
        size = prod(shape)
        total += size
        if "_exps." in name and len(shape) >= 3:
            n = shape[-2 if ".bias" in name else -3]
            expert += size // n
            n_sum, n_tensor = n_sum + n, n_tensor + 1
        else:
            shared += size
    return sign * total, shared, expert, n_sum // n_tensor if n_tensor else 0


def _count(n: int) -> str:
    """A number of parameters in two digits, such as 7.6B."""
    sizes = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (0.0, "K"))
    limit, letter = next(size for size in sizes if n >= size[0])
    value = n / (limit or 1e3)
    digits = max(2 - len(str(round(value)).lstrip("0")), 0)
    return f"{value:.{digits}f}{letter}"
