"""The table of docs/reference/architectures.md; run as a program, it writes the page anew."""

import re
from pathlib import Path

from kit_models import specs

from tamis.arch.load import arch_of, known
from tamis.model.arch import Arch

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "architectures.md"
REAL = {
    "llama": "SmolLM2",
    "gemma3": "Gemma 3 270M",
    "qwen2": "Qwen2.5 Coder 0.5B",
    "bert": "MiniLM",
}  # files of trained models that tests run
MAX_COLUMNS = 110
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


def table() -> str:
    """The rows, in Markdown."""
    checked = {spec["arch"] for spec in specs().values()}
    head = ["architecture", "what is special", "checked", "CPU", "CUDA", "methods", "lines"]
    rows = [head, ["---"] * len(head)]
    for name in sorted(known()):
        file = ROOT / "runner" / "arch" / f"{name}.py"
        text = file.read_text()
        special = text.split('"""')[1].split("\n")[0].rstrip(".")
        by = [*["L"] * (name in checked), *[REAL[n] for n in [name] if n in REAL]]
        lines = str(len(text.splitlines()))
        methods = "its own" if has_indexer(name) else of_methods(arch_of(name), special)
        rest = [" ".join(by) or "-", "yes", "yes", methods, lines]
        room = MAX_COLUMNS - len(row_of([f"`{name}`", "", *rest])) + 1
        rows.append([f"`{name}`", shortened(special, room), *rest])
    return "".join(map(row_of, rows))


def row_of(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |\n"


def shortened(text: str, room: int) -> str:
    """What follows the models' names, as many of its parts as fit."""
    text = text.partition(": ")[2] or text
    while len(text) > room:
        text = re.split(r"[,;] (?=[^,;]*$)| (?=\S*$)", text)[0]
    return text


def has_indexer(name: str) -> bool:
    """Whether the model itself chooses keys."""
    return "attention.indexer.top_k" in arch_of(name).keys


def of_methods(arch: Arch, special: str) -> str:
    """Which methods of sparse attention apply."""
    if arch.is_encoder:
        return "none"
    attends = re.sub("(no|in place of) attention", "", special)
    if arch.recurrent is not None and "attention" not in attends:
        return "none"
    return "all"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
