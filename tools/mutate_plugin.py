"""A pytest plugin of tamis.tools.mutate: one collection, then a forked process for each fault.

It records the lines that each test runs, or plants faults: the functions of the fault's source get
the code of the source with the fault, and the tests that ran its line are run until one fails.
Nothing is imported or collected twice. `python -m tamis.tools.mutate_plugin JOB` runs in a copy of
the tree.
"""

import contextlib
import functools
import gc
import gzip
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

MEMORY = 8 << 30  # bytes that a process with a fault may allocate
# the limit by the clock is this many times that in processor seconds, as others use the machine
WAIT = 3
CLOCK = time.monotonic  # of tests that were run: they may replace the module's
REPEATS = 1000  # lines of a code object, none of them new, after which it is traced no more
OPTIONS = ("-n", "0", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider")
OTHERS = ("formats", "jit_kernels", "bindings", "tools")  # of tamis, beside runner

KILLED, LATE, SURVIVED, UNPATCHED = "killed", "time limit", "survived", "unpatched"
# a limit ended it, and its tests without a fault, too: nothing is shown
UNKNOWN = "not known"

Lines = dict[str, set[int]]


def source_of(filename: str, view: str) -> str:
    """The source below the root of the tree for a module's file in the view of the package."""
    if not filename.startswith(view):
        return ""
    name = filename[len(view) :]
    return name if name.partition("/")[0] in OTHERS else "runner/" + name


def digest(data: bytes) -> str:
    """The digest that names a version of a file."""
    return hashlib.sha256(data).hexdigest()[:16]


def file_of(nodeid: str) -> str:
    """The file of a test."""
    return nodeid.partition("::")[0]


class _Seen:
    """The lines of one code object that ran."""

    def __init__(self, code: CodeType, lines: set[int], told: Callable[[int], None]) -> None:
        self.code, self._lines, self._left, self._told = code, lines, REPEATS, told
        self.line: Any = self._line

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_lineno not in self._lines:
            self._lines.add(frame.f_lineno)
            self._told(frame.f_lineno)
            self._left = REPEATS
        self._left -= 1
        return self.line if self._left > 0 else None


class Tracer:
    """Records which lines of the package run, in every thread.

    A code object that has run REPEATS lines since its last new one is traced no more.
    """

    def __init__(self, view: str) -> None:
        self.lines: Lines = defaultdict(set)
        self._view = view
        self._sources: dict[str, str] = {}
        self._seen: dict[int, _Seen] = {}  # by the id of a code object, which each keeps
        self._forked = False

    def follow(self, path: Path) -> None:
        """Write lines that forks of this process run to a file, as started programs do."""
        self._path = path
        os.register_at_fork(after_in_child=self._begin_fork)

    def _begin_fork(self) -> None:
        self.clear()
        self._forked = True

    def _tell(self, source: str, line: int) -> None:
        if self._forked:  # which may close all descriptors, and may be refused to write
            with contextlib.suppress(OSError), self._path.open("a") as file:
                file.write(f"{source}:{line}\n")

    def clear(self) -> None:
        """Begin with no lines."""
        self.lines.clear()
        self._seen.clear()

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        """The tracer of a call's lines, or None if they are not the package's."""
        code = frame.f_code
        if (seen := self._seen.get(id(code))) is None:
            name = code.co_filename
            if (source := self._sources.get(name)) is None:
                source = self._sources[name] = source_of(name, self._view)
            if not source:
                return None
            told = functools.partial(self._tell, source)
            seen = self._seen[id(code)] = _Seen(code, self.lines[source], told)
        return seen.line(frame, event, arg)


class Record:
    """The lines that each test of a file runs, and those of its fixtures and servers."""

    def __init__(self, view: str) -> None:
        self._tracer = Tracer(view)
        self.tests: dict[str, tuple[float, Lines]] = {}
        self.shared: Lines = defaultdict(set)
        self._before: Lines = {}
        self._setup, self._failed = 0.0, set[str]()

    def start(self, child_lines: Path) -> None:
        """Trace this thread and those that it starts; the lines of forks go to a file."""
        self._tracer.follow(child_lines)
        threading.settrace(self._tracer)
        sys.settrace(self._tracer)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Assign lines before a call to the file: a later test may use the same fixture."""
        self._tracer.clear()
        yield
        self._before = {source: set(lines) for source, lines in self._tracer.lines.items()}
        self._merge(self._before)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Assign lines of a call to the test."""
        self._tracer.clear()
        start = CLOCK()
        yield
        lines = {source: set(found) for source, found in self._tracer.lines.items()}
        for source, found in self._before.items():
            lines.setdefault(source, set()).update(found)
        self.tests[item.nodeid] = (CLOCK() - start, lines)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure: a test that fails without a fault proves nothing."""
        self._setup += report.duration if report.when == "setup" else 0
        if not report.passed:
            self._failed.add(report.nodeid)

    def _merge(self, lines: Lines) -> None:
        for source, found in lines.items():
            self.shared[source] |= found

    def write(self, path: Path, child_lines: Path) -> None:
        """Write the recorded lines, with those of started programs."""
        if child_lines.exists():
            for text in child_lines.read_text().splitlines():
                source, _, number = text.rpartition(":")
                self.shared[source].add(int(number))
        tests = {
            name: [seconds, {source: sorted(lines) for source, lines in found.items()}]
            for name, (seconds, found) in self.tests.items()
            if name not in self._failed
        }
        shared = {source: sorted(lines) for source, lines in self.shared.items()}
        sources = {source: digest(Path(source).read_bytes()) for source in shared}
        kept = {"setup": self._setup, "shared": shared, "tests": tests, "sources": sources}
        with gzip.open(path, "wt", compresslevel=1) as file:
            json.dump(kept, file)


class Stop:
    """Ends the process at the first failing test, after writing its name."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """End the process at a failure."""
        if report.failed:
            self._path.write_text(report.nodeid)
            os._exit(1)


class Planting:
    """Takes over pytest's loop: each entry of the job is run in a process of its own."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job = job
        self._state = Path(job["state"])
        # of files with a fault: all differ, otherwise old bytecode would be used
        self._stamp = 1 << 30

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the job. Returns True: pytest runs nothing else."""
        if self._job["kind"] == "record":
            self._record(session)
        else:
            items = {item.nodeid: item for item in session.items}
            for entry in self._job["faults"]:
                self._plant(entry, items)
        return True

    def _record(self, session: pytest.Session) -> None:
        files: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            files[file_of(item.nodeid)].append(item)
        for file, items in files.items():
            path, lines = self._state / "records" / self._job["names"][file], self._state / "lines"
            lines.unlink(missing_ok=True)
            os.environ["MUTATE_LINES"] = str(lines)

            def work(items: list[pytest.Item] = items, path: Path = path) -> None:
                record = Record(self._job["view"])
                session.config.pluginmanager.register(record)
                record.start(self._state / "lines")
                run(items)
                sys.settrace(None)
                record.write(path, self._state / "lines")

            status = forked(work, self._job["file_seconds"])
            print(f"{file}: {len(items)} tests, {status}", file=sys.stderr, flush=True)
        os.environ.pop("MUTATE_LINES", None)

    def _plant(self, entry: dict[str, Any], items: dict[str, pytest.Item]) -> None:
        killer = self._state / "killer"
        killer.unlink(missing_ok=True)
        start = time.monotonic()
        status = self._planted(entry, items, killer)
        if status == LATE:
            needed = self._seconds(entry, items)
            if needed is None:
                status = UNKNOWN
            elif needed > entry["seconds"]:
                status = self._planted(entry | {"seconds": needed}, items, killer)
        found = {"key": entry["key"], "status": status, "seconds": time.monotonic() - start}
        found["test"] = killer.read_text() if killer.exists() else ""
        with (self._state / "results.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(
            f"{status:10} {found['seconds']:6.1f} s  {entry['said']}", file=sys.stderr, flush=True
        )

    def _seconds(self, entry: dict[str, Any], items: dict[str, pytest.Item]) -> float | None:
        """A limit in seconds after a time-out, from what its tests need now without a fault.

        They were timed when lines were recorded; the machine may be slower since. None where they
        do not end, or fail.
        """
        chosen = [items[name] for name in entry["tests"] if name in items]

        def work() -> None:
            chosen[0].config.pluginmanager.register(Stop(self._state / "failed"))
            run(chosen)

        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.monotonic()
        if not chosen or forked(work, 30 * entry["seconds"]) != 0:
            return None
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        # a fresh import takes some time
        return 10 + 2 * max(used, (time.monotonic() - start) / WAIT)

    def _planted(self, entry: dict[str, Any], items: dict[str, pytest.Item], killer: Path) -> str:
        path, original = Path(entry["file"]), Path(entry["file"]).read_bytes()
        stamp = path.stat()
        try:
            path.write_text(entry["source"])
            self._stamp += 2
            os.utime(path, (self._stamp, self._stamp))
            status = UNPATCHED if entry["fresh"] else self._patched(entry, items, killer)
            if status == UNPATCHED:
                status = fresh(entry["tests"], entry["seconds"])
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        return status

    def _patched(self, entry: dict[str, Any], items: dict[str, pytest.Item], killer: Path) -> str:
        chosen = [items[name] for name in entry["tests"] if name in items]
        if not chosen:
            return SURVIVED

        def work() -> None:
            if not patch(self._job["view"], entry["file"], entry["source"]):
                os._exit(3)
            chosen[0].config.pluginmanager.register(Stop(killer))
            run(chosen)

        status = forked(work, entry["seconds"])
        return {0: SURVIVED, 3: UNPATCHED, None: LATE}.get(status, KILLED)


def run(items: Sequence[pytest.Item]) -> None:
    """Run tests as pytest's own loop does."""
    for item, after in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)


def forked(work: Callable[[], None], seconds: float) -> int | None:
    """The exit status of a process that does the work; None where it took longer than that.

    The seconds are of the processor; by the clock it has WAIT times as many, if it only waits.
    """
    if not (child := os.fork()):
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (round(seconds) + 1, round(seconds) + 2))
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + WAIT * seconds
    status = None
    while status is None and time.monotonic() < end:
        found, code = os.waitpid(child, os.WNOHANG)
        if found:
            status = code
        else:
            time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # includes servers that its tests started
    if status is None:
        os.waitpid(child, 0)
        return None
    code = os.waitstatus_to_exitcode(status)
    return None if code == -signal.SIGXCPU else code


def fresh(tests: list[str], seconds: float) -> str:
    """The result of the tests of a fault that only a fresh import executes."""
    if not tests:
        return SURVIVED
    command = [sys.executable, "-P", "-m", "pytest", *OPTIONS, "-x", *tests]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            status = process.wait(WAIT * seconds)
        except subprocess.TimeoutExpired:
            status = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return LATE if status is None else KILLED if status else SURVIVED


def patch(view: str, file: str, source: str) -> bool:
    """Replace the code of a file's functions by that of another text.

    Returns whether all could be.
    """
    module = sys.modules.get(module_of(file))
    if module is None or module.__file__ is None:
        return False
    wanted = {
        (code.co_qualname, code.co_firstlineno): code
        for code in codes(compile(source, module.__file__, "exec", dont_inherit=True))
    }
    for found in gc.get_objects():  # compared by type: isinstance would ask proxies of dead objects
        if type(found) is FunctionType and found.__code__.co_filename == module.__file__:
            code = wanted.get((found.__code__.co_qualname, found.__code__.co_firstlineno))
            if code is None or code.co_freevars != found.__code__.co_freevars:
                return False
            if code != found.__code__:
                found.__code__ = code
        elif type(found) is functools._lru_cache_wrapper and found.__module__ == module.__name__:
            found.cache_clear()
    return True


def module_of(file: str) -> str:
    """The name of the module of a source of the tree."""
    folder, _, rest = file.removesuffix(".py").removesuffix("/__init__").partition("/")
    parts = ["tamis", *(() if folder == "runner" else (folder,)), *rest.split("/")]
    return ".".join(part for part in parts if part)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Code and all code in it."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from codes(constant)


def main() -> None:
    """Run the job whose file is the argument."""
    job = json.loads(Path(sys.argv[1]).read_text())
    status = pytest.main([*OPTIONS, *job["options"], *job["files"]], plugins=[Planting(job)])
    sys.exit(0 if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else 1)


if __name__ == "__main__":
    main()
