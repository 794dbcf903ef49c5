"""What the library's parameters are called on the command line: its errors name the parameters."""

import re

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
    "n_words": "--length",  # of a summary
}
# What somebody wrote is in quotes and stays; an apostrophe within a word is none.
_QUOTED = r"""(?<![\w=])'[^']*'|(?<![\w=])"[^"]*\""""
_NAMES = "|".join(sorted(map(re.escape, FLAGS), key=len, reverse=True))
_PATTERN = re.compile(rf"{_QUOTED}|(?<![\w./-])(?P<name>{_NAMES})(?![\w/'\"-]|\.\w)")


def with_flags(text: str) -> str:
    """An error's text for who typed a command line: with flags in place of parameters."""
    return _PATTERN.sub(lambda found: FLAGS.get(found["name"], found[0]), text)
