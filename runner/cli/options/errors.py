"""Errors as the command line reports them: one line, with flags in place of library parameters."""

import re

from tamis.cli.terminal import printable

FLAGS = {
    "n_ctx": "--ctx",
    "n_gpu_layers": "-ngl",
    "device='cuda'": "--device cuda",
    "offload_kqv=False": "-nkvo",
    "attn": "--attn",
    "prefill": "--prefill",
    "type_k": "--cache-type-k",
    "type_v": "--cache-type-v",
    "kv_ram": "--kv-ram",
    "kv_dir": "--kv-dir",
    "kv_vram": "--kv-vram",
    "kv_unit": "--kv-unit",
    "draft_max": "--draft-max",
    "min_mass": "--min-mass",
    "audit": "--audit",
    "key_copy": "--key-copy",
    "n_words": "--length",  # of a summary
}
# The user's own words are in quotes and stay; an apostrophe within a word is not a quote.
_QUOTED = r"""(?<![\w=])'[^']*'|(?<![\w=])"[^"]*\""""
_NAMES = "|".join(sorted(map(re.escape, FLAGS), key=len, reverse=True))
_PATTERN = re.compile(rf"{_QUOTED}|(?<![\w./-])(?P<name>{_NAMES})(?![\w/'\"-]|\.\w)")


def with_flags(text: str) -> str:
    """An error's text for a user of the command line: flags replace parameters."""
    return _PATTERN.sub(lambda found: FLAGS.get(found["name"], found[0]), text)


class UsageError(ValueError):
    """The command line is not valid: exit code 2."""


def address(name: str) -> str:
    """What to do where an address of the web is given in place of a file; "" if it is none."""
    found = re.match(r"(https?|ftp):/+(.+)", name)  # a Path has one slash
    if not found:
        return ""
    url = f"{found[1]}://{found[2]}"
    _, _, file = found[2].split("?")[0].partition("/")
    return f"{url} is an address, files are read: curl -Lo {_saved(file)} '{url}'"


def _saved(path: str) -> str:
    """A name for what is fetched: the path's last one, if it has a suffix and plain letters."""
    name = path.rpartition("/")[2]
    return name if re.fullmatch(r"\w[\w.-]*\.\w+", name) else "page.html"


def one_line(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, FileNotFoundError) and (text := address(str(error.filename))):
        return printable(text)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return printable(f"{error.filename}: {error.strerror}")
    text = with_flags(printable(" ".join(str(error).split())))
    if isinstance(error, MemoryError):
        return text or "out of memory: lower --ctx or take a smaller model"
    if isinstance(error, ValueError | RuntimeError | OSError | ImportError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text} (a bug of tamis; --traceback shows where)"
