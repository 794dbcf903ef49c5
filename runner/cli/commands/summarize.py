"""`tamis summarize`: a summary or an answer for each document, of any length."""

import argparse
import contextlib
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tamis.cli.options import common, samplers
from tamis.cli.options.errors import UsageError, one_line
from tamis.cli.terminal import note
from tamis.cli.terminal.answer import AnswerOutput, open_answer, visible
from tamis.cli.terminal.progress import columns, duration
from tamis.jit_kernels.backends import on_host
from tamis.platform.private_files import write_whole
from tamis.platform.processes import usable_cpus

N_WORDS = 150
NOT_FOUND = 3  # exit status
N_QUOTE = 240  # characters of a quote in text output; JSON has all of it
DRAW_EVERY = 0.1  # seconds
SAY_EVERY = 30.0  # seconds without a line, where there is no terminal
BAR = 20  # characters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="document to read: text, Markdown, HTML or PDF; a folder: all that are in it; -: "
        "standard input",
    )
    wish = parser.add_mutually_exclusive_group()
    wish.add_argument(
        "--ask",
        type=common.text,
        metavar="QUESTION",
        help="answer this question about the document instead of summarizing it",
    )
    wish.add_argument(
        "--instruction",
        type=common.text,
        metavar="TEXT",
        help="follow this instruction instead of summarizing",
    )
    _add_evidence_arguments(parser)
    parser.add_argument(
        "--length",
        type=common.count,
        default=N_WORDS,
        metavar="WORDS",
        help=f"approximate length of the answer in words (default: {N_WORDS})",
    )
    parser.add_argument(
        "--format",
        choices=["text", "json"],
        default="text",
        help="text, or json: one JSON object on each line for each document (default: text)",
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write the answers to this file, which is complete at any time (default: standard "
        "output)",
    )
    parser.add_argument(
        "--workers",
        type=common.count,
        default=1,
        metavar="N",
        help="number of documents that are read at the same time (default: %(default)s)",
    )
    add_cache_arguments(parser)
    common.add_model_arguments(parser, auto=True)
    common.add_kv_arguments(parser)
    common.add_vram_argument(parser)
    common.add_rope_arguments(parser)
    samplers.add_arguments(parser)


def _add_evidence_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --cite and --audit."""
    parser.add_argument(
        "--cite",
        action="store_true",
        help="give each sentence of a summary the passage that says it; an answer to --ask always "
        "has its sources",
    )
    parser.add_argument(
        "--audit",
        action="store_true",
        help="with --ask: also decode the answer once more and report the attention of its tokens "
        "to each passage that supports it",
    )


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of where answers and KV caches are stored."""
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="folder in which answers and KV caches are stored (default: in the user's cache "
        "folder)",
    )
    parser.add_argument(
        "--cache-size",
        type=_gigabytes,
        metavar="GB",
        help="most disk space of that folder in gigabytes (default: 4)",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="neither use nor store anything in the cache folder",
    )
    parser.add_argument(
        "--kv-keep",
        type=_kvzip,
        metavar="SHARE",
        help="compress the KV cache that is kept of a text to this share of its positions, such as "
        "0.33, by KVzip: the text is read twice, further questions read less (default: all is "
        "kept)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the summaries; returns 1 if a document failed, after all others are done.

    Returns 3 if no document answers the question.
    """
    names = arguments.files = documents_of(arguments.files)
    settings = settings_of(arguments, min(arguments.workers, len(names)))
    output = _Output(arguments, n_document=len(names))
    work = _Work(arguments, settings, names, output)
    n_done = n_failed = n_found = 0
    terminated = _interrupted_by_sigterm()
    try:
        with contextlib.closing(work.outcomes()) as outcomes:
            for outcome in outcomes:
                output.add(outcome)
                n_done += 1
                n_failed += "error" in outcome
                n_found += outcome.get("found", False)
    except KeyboardInterrupt:
        work.line.clear()
        if n_done < len(names):
            kept = "; what was read is kept: the same command resumes here"
            note(f"{n_done} of {len(names)} done{'' if arguments.no_cache else kept}")
        if terminated:
            return 128 + signal.SIGTERM
        raise
    finally:
        work.close()
    if n_failed:
        return 1
    return 0 if n_found else NOT_FOUND


def documents_of(files: list[str]) -> list[str]:
    """The files, each once; in place of a folder the documents in it and its folders, by path.

    Hidden files and folders are left out. Raises UsageError for a folder without a document.
    """
    from tamis.formats.documents import ENDINGS

    found: dict[str, None] = {}
    for name in files:
        if not Path(name).is_dir():
            found[name] = None
            continue
        inside = sorted(
            str(path)
            for path in Path(name).rglob("*")
            if path.suffix.lower() in ENDINGS
            and path.is_file()
            and not any(part.startswith(".") for part in path.relative_to(name).parts)
        )
        if not inside:
            endings = ", ".join(sorted(ENDINGS))
            raise UsageError(f"{name} is a folder without documents ({endings}): name a file")
        found |= dict.fromkeys(inside)
    return list(found)


def _interrupted_by_sigterm() -> list[int]:
    """Make SIGTERM an interruption as Ctrl-C is; the list has the signal once it came."""
    came: list[int] = []

    def end(number: int, _frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)
    return came


def _gigabytes(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 1e-9 <= value < 1e9:  # at least one byte: 0 bytes would mean the default
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of gigabytes above 0")
    return int(value * 1e9)


def _kvzip(text: str) -> Any:
    """The compression of an argument: a share, or kvzip:keep=SHARE and more."""
    from tamis.select.kvzip import KVzip

    try:
        return KVzip.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def settings_of(arguments: argparse.Namespace, n_session: int) -> Any:
    """The settings of the flags. Raises UsageError before anything is loaded."""
    from tamis.summary.plan import Settings
    from tamis.summary.prompts import Task

    for flag in ("ask", "instruction"):
        if getattr(arguments, flag) is not None and not getattr(arguments, flag).strip():
            raise UsageError(f"--{flag} is empty: write what you want to know")
    audits = getattr(arguments, "audit", False)
    if audits and arguments.ask is None:
        raise UsageError("--audit is of the passages of an answer: give --ask QUESTION")
    if not hasattr(arguments, "temp"):
        arguments.temp = 0.0
    if arguments.kv_keep is not None and arguments.no_cache:
        raise UsageError("--kv-keep is of what the cache keeps: leave out --no-cache")
    prefill = "dense" if arguments.prefill == "auto" else arguments.prefill
    common.check_methods(arguments.attn, prefill)
    return Settings(
        task=Task(arguments.length, arguments.instruction, arguments.ask),
        params=samplers.params(arguments),
        n_ctx=arguments.ctx,
        attn=arguments.attn,
        min_mass=arguments.min_mass,
        prefill=arguments.prefill,
        type_k=arguments.cache_type_k,
        type_v=arguments.cache_type_v,
        kv_ram=arguments.kv_ram,
        kv_dir=_kv_folder(arguments),
        kv_vram=arguments.kv_vram,
        n_session=n_session,
        cite=arguments.cite,
        audit=audits,
        rope=common.rope_scaling(arguments),
        zip=arguments.kv_keep,
    )


def cache_of(
    arguments: argparse.Namespace, settings: Any, say: Callable[[str], None]
) -> tuple[Any, Any]:
    """The cache that the flags ask for, None for --no-cache, and settings that use its folder.

    Without --kv-dir the KV cache that memory has no room for goes there. say: gets a line for the
    person.
    """
    from tamis.summary.cache import MAX_BYTES, Cache

    if arguments.no_cache:
        return None, settings
    folder = None if arguments.cache_dir is None else Path(arguments.cache_dir)
    cache = Cache(folder, arguments.cache_size or MAX_BYTES, say)
    return cache, settings if settings.kv_dir else replace(settings, kv_dir=cache.folder)


def _kv_folder(arguments: argparse.Namespace) -> Path | None:
    """The folder for a KV cache that exceeds memory; None: see _Work. Raises UsageError."""
    if arguments.kv_dir is None:
        if arguments.kv_ram is not None and arguments.no_cache:
            raise UsageError("--kv-ram with --no-cache needs --kv-dir: where the rest goes")
        return None
    folder = Path(arguments.kv_dir)
    if not folder.is_dir():
        raise UsageError(f"--kv-dir {arguments.kv_dir} is no folder: make it first")
    return folder


class _Line:
    """Progress of all documents, in one line on standard error if that is a terminal.

    Elsewhere a line is written after SAY_EVERY seconds without one.
    """

    def __init__(self, meter: Any) -> None:
        self._meter, self._progress = meter, common.Progress()
        self._lock, self._drawn, self.silent = threading.Lock(), 0.0, not sys.stderr.isatty()
        self._said = time.monotonic()

    def draw(self, name: str) -> None:
        """Show the progress, at most ten times per second."""
        if not sys.stderr.isatty():
            self._tell(name)
            return
        with self._lock:
            if self.silent or time.monotonic() - self._drawn < DRAW_EVERY:
                return
            self._drawn, left = time.monotonic(), self._meter.left()
            how = ": reading"
            if left is not None:
                bar = "#" * int(left[0] * BAR)
                how = f" [{bar:.<{BAR}}] {100 * left[0]:.0f} %, {duration(left[1])} left"
            sys.stderr.write(f"\r\x1b[K{_fitting(visible(name), how)}")
            sys.stderr.flush()

    def _tell(self, name: str) -> None:
        left = self._meter.left()
        if left is not None and time.monotonic() - self._said >= SAY_EVERY:
            self.say(f"{name}: {100 * left[0]:.0f} % done, {duration(left[1])} left")

    def clear(self) -> None:
        """Erase the line."""
        if not self.silent:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def part(self, name: str, done: int, total: int) -> None:
        """Without a terminal: a line for each part of a document that was read."""
        if sys.stderr.isatty():
            return
        left = self._meter.left()
        rest = "" if left is None or done == total else f", {duration(left[1])} left"
        self.say(f"{name}: {done} of {total} parts read{rest}")

    def say(self, text: str) -> None:
        """Write a line for the user, in place of the progress."""
        with self._lock:
            self._said = time.monotonic()
            self.clear()
            note(visible(text))


def _fitting(name: str, how: str) -> str:
    """A name and its progress in one line of the terminal; a long name loses its start.

    A wrapped line could not be redrawn.
    """
    n = columns() - 1
    room = max(n - len(how), 8)
    short = name if len(name) <= room else f"...{name[3 - room :]}"
    return f"{short}{how}"[:n]


def _writable(out: str, documents: list[str]) -> Path:
    """The file that --out names, with links resolved.

    Raises UsageError if it must not be replaced.
    """
    path = Path(out)
    if out == "-" or (path.exists() and not path.is_file()):
        # A device or a pipe would be replaced by a file: for root even /dev/stdout and /dev/null.
        raise UsageError(f"--out {out} is no file: name one, or redirect standard output")
    path = path.resolve()
    if path.exists() and any(os.path.exists(d) and path.samefile(d) for d in documents):
        raise UsageError(f"--out {out} is a document to be read: name another file")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"--out {out} cannot be written: name a file in a folder of yours")
    return path


class _Output:
    """Writes outcomes in order to standard output, or to a file that is complete at any time."""

    def __init__(self, arguments: argparse.Namespace, n_document: int) -> None:
        self._json, self._titled = arguments.format == "json", n_document > 1
        self._path = None if arguments.out is None else _writable(arguments.out, arguments.files)
        self._text = ""
        # The answer is streamed if one user sees one answer, and no sources are asked for.
        raw = arguments.ask is None and not arguments.cite
        alone = not (self._json or self._path or self._titled)
        self.streams = sys.stdout.isatty() and raw and alone

    def add(self, outcome: dict[str, Any]) -> None:
        """Write a document's answer, unless it was streamed."""
        shown = outcome.pop("shown", False)
        if self._json:
            text = json.dumps(outcome, ensure_ascii=False) + "\n"
        elif shown or "error" in outcome:
            return
        else:
            title = f"# {outcome['name']}\n\n" if self._titled else ""
            text = ("\n" if self._text else "") + f"{title}{outcome['text']}\n"
            text += _sources(outcome)
        self._text += text
        if self._path is None:
            sys.stdout.write(visible(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()
            return
        # The name of a document may not be UTF-8; this is its escape in JSON.
        data = self._text.encode(errors="backslashreplace")
        try:
            with write_whole(self._path, durable=False, shared=True) as file:
                file.write(data)
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"--out {self._path}") from error


def _sources(outcome: dict[str, Any]) -> str:
    """The sources below an answer, one per line; "" without sources."""
    if not outcome["sources"]:
        return ""
    lines = ["", "Sources:" if outcome["found"] else "Nearest passages:"]
    for i, source in enumerate(outcome["sources"], 1):
        where = "page" if "page" in source else "line"
        quote = " ".join(source["quote"].split())
        if len(quote) > N_QUOTE:
            quote = quote[: N_QUOTE - 3] + "..."
        lines.append(f'[{i}] {source["file"]}, {where} {source[where]}: "{quote}"')
        if "attention" in source:
            lines.append(f"    {_attended(source['attention'])}")
    return "\n".join(lines) + "\n"


def _attended(found: dict[str, Any]) -> str:
    """The attention of an answer's tokens to a passage, in words."""
    times = found["mass"] / max(found["even"], 1e-9)
    return (
        f"attention {found['mass']:.4f}, {times:.1f} times an even share; most of it in layer "
        f"{found['layer']}, head {found['head']}: {found['head_mass']:.2f}"
    )


class _Work:
    """All documents; each is summarized by one of the workers."""

    def __init__(
        self, arguments: argparse.Namespace, settings: Any, names: list[str], output: _Output
    ) -> None:
        from tamis.summary.meter import WorkMeter

        self._arguments, self._settings, self._names = arguments, settings, names
        self._output, self._meter = output, WorkMeter(settings.n_session)
        self.line, self._progress = _Line(self._meter), common.Progress()
        self._lock, self._own, self._stop = threading.Lock(), threading.local(), threading.Event()
        self._engines: list[Any] = []
        self._model = common.model_file(arguments.model, self._progress)
        self._cache, self._settings = cache_of(arguments, settings, self.line.say)

    def outcomes(self) -> Generator[dict[str, Any], None, None]:
        """Yield the result of each document, in order: a Summary's fields, or name and error.

        Workers are threads, one too: an interruption comes to the main thread, and they stop
        between two chunks, where what they have read can be kept.
        """
        for name in self._names:
            self._guess(name)
        with ThreadPoolExecutor(self._settings.n_session) as pool:
            futures: list[Future[dict[str, Any]]] = []
            try:
                futures += [pool.submit(self._outcome, name) for name in self._names]
                for future in futures:
                    yield future.result()
            finally:
                self._stop.set()
                pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """Free the engines."""
        for engine in self._engines:
            engine.close()

    def _guess(self, name: str) -> None:
        """Give the meter an estimate for a document that is not read yet: four bytes per token."""
        from tamis.summary.meter import Work

        with contextlib.suppress(OSError):
            n = Path(name).stat().st_size // 4
            self._meter.expect(name, [Work(n, self._settings.task.n_token)])

    def _outcome(self, name: str) -> dict[str, Any]:
        from tamis.formats.documents import read_document
        from tamis.summary.summarize import finished

        called = "standard input" if name == "-" else name
        try:
            try:
                common.check_is_file(name)
                data = common.standard_input() if name == "-" else Path(name).read_bytes()
                document = read_document(called, data)
                found = finished(self._cache, self._model, document, self._settings)
            except (OSError, ValueError, ImportError) as error:
                return self._failed(called, error)
            if found is None:
                return self._summarized(document)
            self.line.say(f"{document.name}: answered before; --no-cache makes it anew")
            return asdict(found)
        finally:
            self._meter.finish(name)

    def _summarized(self, document: Any) -> dict[str, Any]:
        summarizer = self._summarizer()
        stream = _Stream(self.line) if self._output.streams else None
        try:
            watch = self._watch(document.name, _nothing if stream is None else stream.write)
            summary = summarizer.summarize(document, watch)
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            return self._failed(document.name, error)
        finally:
            self._meter.finish(document.name)
            self.line.clear()
            if stream is not None:
                stream.close()
        if summary.n_cut:
            what = "the answer" if summary.finish == "length" else "answers about parts"
            self.line.say(
                f"{document.name}: {what} had to end after {self._settings.task.n_token} tokens, "
                f"the most for {self._settings.task.n_words} words: raise --length"
            )
        return asdict(summary) | {"shown": stream is not None and stream.shown}

    def _summarizer(self) -> Any:
        """The summarizer of this thread, made when its first document is not in the cache."""
        from tamis.summary.summarize import Summarizer

        if not hasattr(self._own, "summarizer"):
            with self._lock:
                engine = self._engine()
            self._own.summarizer = Summarizer(engine, self._settings, self._cache)
        return self._own.summarizer

    def _engine(self) -> Any:
        """An engine for a worker, with its share of the threads; the weights are mapped once.

        Two engines of one thread do more than one of two. On a GPU all workers share one engine.
        """
        from tamis.engine.engine import Engine

        where, n_threads = common.devices(self._arguments), self._arguments.threads
        common.warn_of_threads(n_threads)
        if not on_host(where["device"]) and self._engines:
            return self._engines[0]
        if self._settings.n_session > 1:
            n_threads = min(n_threads or usable_cpus(), usable_cpus())
            n_threads = max(1, n_threads // self._settings.n_session)
        engine = Engine.load(
            self._model,
            n_threads=n_threads,
            rope=self._settings.rope,
            progress=self._progress,
            **where,
        )
        self._progress.clear()
        self._engines.append(engine)
        return engine

    def _watch(self, name: str, write: Callable[[str], None]) -> Any:
        from tamis.summary.reader import Watch

        def check() -> None:
            if self._stop.is_set():
                raise KeyboardInterrupt
            self.line.draw(name)

        part = functools.partial(self.line.part, name)
        return Watch(name, self._meter, self.line.say, write, self._progress, check, part)

    def _failed(self, name: str, error: Exception) -> dict[str, Any]:
        text = one_line(error)
        self.line.say(f"tamis: error: {text if name in text else f'{name}: {text}'}")
        return {"name": name, "error": text}


class _Stream:
    """An answer that is shown on the terminal while it is generated."""

    def __init__(self, line: _Line) -> None:
        self._line, self._stack = line, contextlib.ExitStack()
        self._answer: AnswerOutput | None = None

    @property
    def shown(self) -> bool:
        """Whether any text was shown."""
        return self._answer is not None

    def write(self, text: str) -> None:
        """Show more text; the first of it ends the progress line."""
        if self._answer is None:
            self._line.clear()
            self._line.silent = True  # this was the only document
            self._answer = self._stack.enter_context(open_answer())
        self._answer.write(text)

    def close(self) -> None:
        """End the answer's line."""
        self._stack.close()


def _nothing(_text: str) -> None:
    """Do nothing: the answer is written when it is complete."""
