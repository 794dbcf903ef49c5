"""The fuzz targets without a fuzzer: their seeds, the corpus, and some changes of each."""

import random
from pathlib import Path

import pytest
from guarded import fork_and_wait

from tamis.tools import fuzz, fuzz_targets

CORPUS = Path(__file__).parent / "corpus"
N_CHANGED = 25  # of each input
AWKWARD = [
    b"\0",
    b"\xff" * 8,
    b"\x7f" + b"\xff" * 7,
    b"[" * 99,
    b"9" * 400,
    b"<![",
    b"{{",
    b"1e999",
]


def changed(data: bytes, source: random.Random) -> bytes:
    """The input with up to four of its parts changed, moved or taken out."""
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(data) + 1)
        end = min(len(data), at + source.choice([0, 1, 4, 8, 40]))
        piece = source.choice([source.randbytes(end - at), source.choice(AWKWARD), b"", data[:40]])
        data = data[:at] + piece + data[end:]
    return data


def reported(target, data: bytes) -> None:
    try:
        target(data)
    except BaseException:
        print(f"{target.__name__}: {data[:400]!r}", flush=True)
        raise


def inputs(name: str) -> list[bytes]:
    found = [*fuzz_targets.seeds(name)]
    return found + [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def test_the_command_has_all_targets():
    assert sorted(fuzz.NAMES) == sorted(fuzz_targets.TARGETS)
    assert {path.name for path in CORPUS.iterdir() if path.is_dir()} <= {*fuzz.NAMES}


@pytest.mark.parametrize("name", fuzz.NAMES)
def test_no_input_does_anything_but_be_read_or_refused(name):
    target, source = fuzz_targets.TARGETS[name], random.Random(name)
    right = inputs(name)
    fuzz_targets.engine()  # its kernels are compiled before the fork
    some = right + [changed(data, source) for data in right for _ in range(N_CHANGED)]

    for start in range(0, len(some), 40):  # a fork has 20 seconds
        part = some[start : start + 40]
        fork_and_wait(lambda part=part: [reported(target, data) for data in part])
