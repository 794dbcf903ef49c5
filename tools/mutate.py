"""Plant small faults in the sources, one at a time, and print those that no test notices.

`python -m tamis.tools.mutate runner/kv bindings/serve/http/guard.py` chooses --count faults of each
folder or file named (a comparison, a condition, a number off by one, a removed statement or
`raise`), runs for each the tests that reach its line, the quickest first, and stops at the first
that fails. The current folder is the checkout; everything happens in a copy of it below --state,
and the checkout is never touched. A run started again resumes: the lines that tests reach are
recorded once for each file of tests, and a killed fault stays so until --fresh. --again plants the
survivors once more, for new tests.
"""

import argparse
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tamis.tools.mutate_edits import Fault, compiles, faults_of
from tamis.tools.mutate_plugin import KILLED, LATE, SURVIVED, UNKNOWN, digest

SOURCES = (
    "runner/kv", "runner/engine", "runner/select", "runner/sampling", "runner/text",
    "bindings/serve", "formats",
)  # fmt: skip
# tests of the sources' text rather than of their behaviour
NO_TESTS_OF = ("tests/tree", "tests/cuda", "tests/fuzz")
NOT_RUN = "no test runs it"
PACKAGES = ("formats", "jit_kernels", "bindings", "tools")  # of tamis, beside runner

# Imported by the programs that tests start: their lines are their tests' file's.
SITE = """import os, sys, threading
if out := os.environ.get("MUTATE_LINES"):
    sys.path.insert(0, {view!r})
    seen, file = set(), os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    def line(frame, event, arg):
        at = frame.f_code.co_filename, frame.f_lineno
        if at not in seen:
            seen.add(at)
            name = at[0][{n}:]
            if name.partition("/")[0] not in {packages!r}:
                name = "runner/" + name
            os.write(file, f"{{name}}:{{at[1]}}\\n".encode())
        return line
    def call(frame, event, arg):
        if frame.f_code.co_filename.startswith({package!r}):
            return line(frame, event, arg)
    threading.settrace(call)
    sys.settrace(call)
"""


def copied(root: Path, tree: Path) -> None:
    """Update the copy from the checkout, with a view of the package in it."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True)
    files = listed.stdout.decode().split("\0")
    names = {name for name in files if name and (root / name).is_file()}
    for name in names:
        source, target = root / name, tree / name
        if not target.is_file() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    for folder in (*PACKAGES, "runner", "tests"):
        for path in (tree / folder).rglob("*.py"):
            if path.relative_to(tree).as_posix() not in names:
                path.unlink()
    view = tree / ".cache" / "typed" / "tamis"
    shutil.rmtree(view, ignore_errors=True)
    view.mkdir(parents=True)
    for path in [*(tree / "runner").iterdir(), *(tree / name for name in PACKAGES)]:
        if path.name != "__pycache__":
            (view / path.name).symlink_to(path)
    package = f"{view}/"
    site = SITE.format(view=str(view.parent), n=len(package), packages=PACKAGES, package=package)
    (view.parent / "sitecustomize.py").write_text(site)


class Run:
    """Recording and planting in a copy of the tree."""

    def __init__(self, state: Path, tests: Sequence[str], slow: bool) -> None:
        self.state, self.tree = state.resolve(), state.resolve() / "tree"
        self._slow = slow
        (self.state / "records").mkdir(parents=True, exist_ok=True)
        (self.state / "models").mkdir(exist_ok=True)
        copied(Path.cwd(), self.tree)
        self.view = f"{self.tree / '.cache' / 'typed' / 'tamis'}/"
        self._names = {file: self._name(file) for file in self._files(tests)}

    def _files(self, tests: Sequence[str]) -> list[str]:
        found = [path for name in tests for path in self._below(name, "test_*.py")]
        return sorted(p for p in found if tests[0] != "tests" or not p.startswith(NO_TESTS_OF))

    def _below(self, name: str, pattern: str) -> list[str]:
        path = self.tree / name
        paths = path.rglob(pattern) if path.is_dir() else [path]
        return [found.relative_to(self.tree).as_posix() for found in paths]

    def _name(self, file: str) -> str:
        slow = "-slow" if self._slow else ""
        return f"{Path(file).stem}-{digest((self.tree / file).read_bytes())}{slow}.json.gz"

    def _job(self, kind: str, **entries: Any) -> None:
        tier = "not model and not gpu" if self._slow else "not slow"
        options = ["-m", tier, "--basetemp", str(self.state / "files")]
        job = {"kind": kind, "state": str(self.state), "view": self.view, "options": options}
        (self.state / "job.json").write_text(json.dumps(job | entries))
        env = os.environ | {
            "PYTHONPATH": str(Path(self.view).parent),
            "TAMIS_MODELS": str(self.state / "models"),  # a fault may delete models
        }
        command = [sys.executable, "-P", "-m", "tamis.tools.mutate_plugin"]
        command.append(str(self.state / "job.json"))
        with (self.state / "log").open("a") as log:
            subprocess.run(command, cwd=self.tree, env=env, stdout=log, check=True)

    def record(self) -> dict[str, Any]:
        """The lines that each file of tests reaches, by the file's name.

        Missing ones are recorded.
        """
        folder = self.state / "records"
        if missing := [f for f, name in self._names.items() if not (folder / name).exists()]:
            self._job("record", files=missing, names=self._names, file_seconds=900)
        found = {}
        for file, name in self._names.items():
            if (folder / name).exists():  # otherwise it took too long, or failed
                with gzip.open(folder / name, "rt") as packed:
                    found[file] = json.load(packed)
        return found

    def results(self) -> dict[str, dict[str, Any]]:
        """The last result of each fault, by its key."""
        path = self.state / "results.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return {found["key"]: found for found in map(json.loads, lines)}

    def plant(self, faults: Sequence[tuple[Fault, list[str], float]]) -> None:
        """Plant faults, each with its tests and their seconds; the results are appended."""
        entries = [
            {
                "key": fault.key,
                "file": fault.file,
                "source": fault.planted((self.tree / fault.file).read_text()),
                "fresh": not fault.where,
                "tests": tests,
                # the seconds were measured while lines were recorded, which is slower
                "seconds": 6 + 2 * seconds,
                "said": str(fault),
            }
            for fault, tests, seconds in faults
        ]
        files = sorted({name.partition("::")[0] for _, tests, _ in faults for name in tests})
        if entries:
            self._job("plant", files=files, faults=entries)


def chosen(
    tree: Path, names: Sequence[str], count: int, seed: int, inside: Sequence[str] = ()
) -> dict[str, list[Fault]]:
    """Choose `count` faults of each folder or file named, by the seed.

    Moved lines do not change it. With `inside`, only faults in functions of these names.
    """
    found: dict[str, list[Fault]] = {}
    for name in names:
        path, all_of = tree / name, list[Fault]()
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            all_of += faults_of(file.relative_to(tree).as_posix(), file.read_text())
        if inside:
            all_of = [f for f in all_of if not {*inside}.isdisjoint(f.where.split("."))]
        all_of.sort(key=lambda fault: hashlib.sha256(f"{seed} {fault.key}".encode()).digest())
        texts = {file.relative_to(tree).as_posix(): file.read_text() for file in files}
        found[name] = []
        for fault in all_of:
            if len(found[name]) == count:
                break
            if compiles(fault.planted(texts[fault.file])):
                found[name].append(fault)
    return found


class Matching:
    """The tests that reach a fault."""

    def __init__(self, tree: Path, records: dict[str, Any], seconds: float) -> None:
        self._records, self._seconds = records, seconds
        self._texts = {
            path.relative_to(tree).as_posix(): path.read_text()
            for folder in ("runner", *PACKAGES)
            for path in (tree / folder).rglob("*.py")
        }
        self._digests = {name: digest(text.encode()) for name, text in self._texts.items()}

    def tests(self, fault: Fault) -> tuple[list[str], float]:
        """The quickest tests of those that reach a fault, up to the seconds given.

        And their seconds.
        """
        places = self._places(fault)
        near, far = list[tuple[float, str, str]](), list[tuple[float, str, str]]()
        for file, record in self._records.items():
            here = self._reached(record, record["shared"], places)
            setup = record["setup"] if here else 0.0
            for name, (seconds, lines) in record["tests"].items():
                if self._reached(record, lines, places):
                    near.append((seconds + setup, file, name))
                elif here:
                    far.append((seconds + setup, file, name))
        picked, total, files = list[tuple[str, str]](), 0.0, set[str]()
        for seconds, file, name in [*sorted(near), *sorted(far)]:
            cost = seconds - (self._records[file]["setup"] if file in files else 0.0)
            if total and total + cost > self._seconds:
                continue
            total += max(cost, 0.0)
            files.add(file)
            picked.append((file, name))
        order = {file: i for i, file in enumerate(dict.fromkeys(file for file, _ in picked))}
        picked.sort(key=lambda pair: order[pair[0]])  # a file's fixtures are set up once
        return [name for _, name in picked], total

    def _places(self, fault: Fault) -> dict[str, set[int]]:
        """The lines of a fault: its own; of a module-level one its file's and uses of its names."""
        if fault.where:
            return {fault.file: set(range(fault.line, fault.line + fault.old.count("\n") + 1))}
        found: dict[str, set[int]] = defaultdict(set)
        found[fault.file] = set(range(1, self._texts[fault.file].count("\n") + 1))
        for source, text in self._texts.items():
            for number, line in enumerate(text.splitlines(), 1):
                if any(name in line for name in fault.names):
                    found[source].add(number)
        return found

    def _reached(self, record: Any, lines: Any, places: dict[str, set[int]]) -> bool:
        for source, wanted in places.items():
            if source in lines:
                if record["sources"].get(source) != self._digests[source]:
                    return True  # the file has changed since: any line may be this one
                if not wanted.isdisjoint(lines[source]):
                    return True
        return False


def report(found: dict[str, list[Fault]], results: dict[str, Any]) -> str:
    """The survivors, and a table by folder."""
    lines, rows = list[str](), list[str]()
    for name, faults in found.items():
        status = {f.key: results.get(f.key, {}).get("status", "not planted") for f in faults}
        said = {f.key: f"{status[f.key]}: {f}" for f in faults}
        lines += [said[key] for key in status if status[key] not in (KILLED, LATE)]
        n = Counter(status.values())
        killed = n[KILLED] + n[LATE]
        rate = f"{100 * killed / len(faults):.0f} %" if faults else ""
        rows.append(
            f"| `{name}` | {len(faults)} | {n[KILLED]} | {n[LATE]} | {n[SURVIVED]} | "
            f"{n[NOT_RUN]} | {n[UNKNOWN]} | {rate} |"
        )
    head = (
        "| folder | faults | killed by a test | by the time limit | survived | not run "
        "| not known | killed |"
    )
    return "\n".join([*lines, "", head, "|---|---|---|---|---|---|---|---|", *rows])


def plan(run: Run, faults: Iterable[Fault], seconds: float) -> list[tuple[Fault, list[str], float]]:
    """The faults with their tests; those without tests are results at once."""
    matching, found = Matching(run.tree, run.record(), seconds), []
    with (run.state / "results.jsonl").open("a") as file:
        for fault in faults:
            tests, total = matching.tests(fault)
            if tests:
                found.append((fault, tests, total))
            else:
                file.write(json.dumps({"key": fault.key, "status": NOT_RUN}) + "\n")
    return found


def main() -> None:
    """Plant faults as asked for; status 1 where one survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", default=SOURCES, help="folders and files of sources")
    parser.add_argument("--count", type=int, default=50, help="faults of each of them")
    parser.add_argument("--seed", type=int, default=0, help="chooses the faults")
    parser.add_argument("--inside", nargs="+", default=[], help="only functions of these names")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files and folders of tests")
    parser.add_argument("--slow", action="store_true", help="slow tests, too")
    parser.add_argument("--seconds", type=float, default=20, help="of tests for a fault")
    parser.add_argument("--state", type=Path, default=Path(".cache/mutate"))
    parser.add_argument("--fresh", action="store_true", help="drop results and records")
    parser.add_argument("--again", action="store_true", help="plant survivors again")
    given = parser.parse_args()
    if not Path("runner/__init__.py").exists():
        parser.error(f"{Path.cwd()} is no checkout of tamis: run this in its root folder")
    if given.fresh:
        shutil.rmtree(given.state, ignore_errors=True)
    run = Run(given.state, given.tests, given.slow)
    files = [name.rstrip("/") for name in given.files]
    found = chosen(run.tree, files, given.count, given.seed, given.inside)
    before = run.results()
    done = {k for k, v in before.items() if not given.again or v["status"] in (KILLED, LATE)}
    run.plant(
        plan(run, (f for fs in found.values() for f in fs if f.key not in done), given.seconds)
    )
    results = run.results()
    print(report(found, results))
    alive = [
        f for fs in found.values() for f in fs if results[f.key]["status"] not in (KILLED, LATE)
    ]
    sys.exit(1 if alive else 0)


if __name__ == "__main__":
    main()
