"""What belongs to one operating system is in runner/platform."""

import re
from pathlib import Path

SYSTEM = {
    "fcntl": r"\bimport fcntl\b",
    "fork": r"\bos\.fork\(",
    "/proc/": r"\"/proc/",
    "mmap": r"\bmmap\.mmap\(",
    "futex": r"\bfutex\(",
    "prctl": r"\.prctl\(",
    "rlimit": r"\bimport resource\b",
    "affinity": r"\bsched_getaffinity\b",
}


def test_the_system_is_spoken_to_in_one_place(root: Path) -> None:
    found: dict[str, set[str]] = {}
    for folder in ("runner", "jit_kernels", "formats", "bindings"):
        for path in (root / folder).rglob("*.py"):
            name, text = path.relative_to(root).as_posix(), path.read_text()
            words = {word for word, pattern in SYSTEM.items() if re.search(pattern, text)}
            if words and not name.startswith("runner/platform/"):
                found[name] = words
    assert not found
