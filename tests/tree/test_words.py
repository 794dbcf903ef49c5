"""The field's words: home-made ones stay out of code, comments, messages and docs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("runner", "jit_kernels", "formats", "bindings", "tools", "tests", "examples", "docs")
# Home-made words as regular expressions, and what to write in their place.
WORDS = {
    r"keys and values": "KV cache, K and V",
    r"turned and kept|(?:heads?|keys?|queries) (?:is|are|were) turned|turned keys": "rotated; RoPE",
    r"kept in the pages": "appended to the KV cache",
    r"brought in|brings? in|whose home": "fetched, prefetched, backing store",
    r"asks? (?:memory|for what)|in a bad minute|that minute|of that hour": "prefetch; under load",
    r"on (?:its|their) way": "in flight",
    r"both ends of": "prologue, epilogue",
    r"whoever": "dynamic scheduling; the caller, the reader",
    r"by turns|take[sn]? turns|takes? [\w ,]{1,40} in turn": "alternating; stride over; fair",
    r"side by side|what is left (?:of|over)": "interleaved, in parallel; the remainder",
    r"a lane finds|one block's|by its digits": "per lane, one block per row; radix select",
    r"let go|lets? go of": "released; programmatic dependent launch",
    r"goes on from|read of late": "resumes; recently used",
    r"changes sides|hops?": "device, transfer",
    r"fade[sd]?": "alpha, the online softmax's rescaling",
    r"forgets?|forgot|forgotten": "dropped, truncated, evicted",
    r"knows? nothing of|at once (?:with|where)": "is independent of",
    r"(?:is|are) told": "is passed, reported, logged",
    r"broken off": "cancelled",
    r"bent": "score modification (score_mod)",
    r"last words|longest beginning|text's beginning": "prompt lookup; prefix",
}  # fmt: skip
PATTERN = re.compile(rf"(?<![\w-])(?:{'|'.join(WORDS)})(?![\w-])", re.IGNORECASE)
# "file:words": the reason why they stay.
ALLOWED = {
    "tools/load_serve.py:broken off": "a key of the JSON that it prints",
    "runner/evals/tasks/tracking.py:hop": "RULER's name of a step of variable tracking",
    "runner/evals/tasks/niah.py:is told": "RULER's prompt, word by word",
    "runner/evals/tasks/words.py:faded": "a list of words for prompts",
    "runner/evals/tasks/words.py:forgot": "a list of words for prompts",
}

# Names that say nothing of what they are, and folders that are free of them.
EMPTY_NAMES = {"found", "own"}
NAMED_FOLDERS = ("runner/select", "runner/kv", "runner/engine")


def found(text: str) -> Iterator[tuple[int, str]]:
    """Home-made words of a text: line numbers and the words."""
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, match[0]) for match in PATTERN.finditer(line.replace("_", " ")))


def sources() -> Iterator[Path]:
    """Python and Markdown, without the notebook and this list."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    for path in (*paths, *ROOT.glob("*.md")):
        if path.suffix in (".py", ".md") and not path.is_relative_to(ROOT / "docs" / "lab"):
            yield path


def test_no_home_made_words() -> None:
    seen, wrong = set(), []
    for path in sources():
        if path == Path(__file__):
            continue
        name = path.relative_to(ROOT).as_posix()
        for number, words in found(path.read_text()):
            seen.add(f"{name}:{words.lower()}")
            if f"{name}:{words.lower()}" not in ALLOWED:
                wrong.append(f"{name}:{number}: {words!r}: {remedy(words)}")
    assert not wrong, "\n".join(wrong)
    assert seen >= ALLOWED.keys(), "an exception that is no longer needed"


def remedy(words: str) -> str:
    """What to write in place of home-made words."""
    patterns = {p: text for p, text in WORDS.items() if re.fullmatch(p, words, re.IGNORECASE)}
    return "write " + next(iter(patterns.values()))


@pytest.mark.parametrize("folder", NAMED_FOLDERS)
def test_names_say_what_they_are(folder: str) -> None:
    """Variables, parameters and functions; keywords of ops are the ops'."""
    wrong = []
    for path in sorted((ROOT / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = getattr(node, "id", None) if stored else getattr(node, "name", None)
            name = node.arg if isinstance(node, ast.arg) else name
            if name in EMPTY_NAMES:
                wrong.append(f"{path.name}:{getattr(node, 'lineno', 0)}: {name}")
    assert not wrong


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n# Keys and values, on their way", [(2, "Keys and values"), (2, "on their way")]),
        ("def test_a_prompt_is_told(): ...", [(1, "is told")]),
        ("threads take KV heads in turn", [(1, "take KV heads in turn")]),
        ("a shop, a sidebar, unfaded, benthic, hop-by-hop", []),
    ],
)
def test_the_words_are_found(text: str, words: list[tuple[int, str]]) -> None:
    assert list(found(text)) == words
    assert all(remedy(found_words) for _, found_words in words)
