"""What commands share: arguments, progress on standard error, loading a model."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from tamis.models import DEFAULT, pull, resolve

KIB, MIB = 1 << 10, 1 << 20


class Progress:
    """A progress line on standard error, only where that is a terminal."""

    def __init__(self) -> None:
        self._shown = False
        self._start = time.monotonic()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        """Show stage, share done and time; the line goes when the stage is complete."""
        if not sys.stderr.isatty():
            return
        if done == 0 or not self._shown:
            self._start = time.monotonic()
        share = f"{100 * done // total:3d} %" if total else f"{done / MIB:.1f} MiB"
        spent = time.monotonic() - self._start
        left = f", {spent * (total - done) / done:.0f} s left" if total and done else ""
        sys.stderr.write(f"\r\x1b[K{stage}: {share}{left}")
        self._shown = True
        if total and done >= total:
            self.clear()
        sys.stderr.flush()

    def tokens(self, done: int, total: int) -> None:
        """Progress of a prefill."""
        self("reading the prompt", done, total)

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            self._shown = False


def note(text: str) -> None:
    """A line for the person, on standard error."""
    sys.stderr.write(text + "\n")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """-m, -t, -c and --attn."""
    parser.add_argument("-m", "--model", help=f"path or short name of a model (default: {DEFAULT})")
    parser.add_argument("-t", "--threads", type=int, help="threads (default: all cores)")
    parser.add_argument("-c", "--ctx", type=int, help="context in tokens")
    parser.add_argument("--attn", default="dense", help="attention method, as window:recent=512")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """The usual sampler settings; the defaults are SamplerParams' own."""
    for flag, type_ in (
        ("temp", float),
        ("top-k", int),
        ("top-p", float),
        ("min-p", float),
        ("repeat-penalty", float),
        ("seed", int),
    ):
        parser.add_argument(f"--{flag}", type=type_, default=argparse.SUPPRESS)


def sampler_params(arguments: argparse.Namespace) -> Any:
    """SamplerParams of the flags that were given."""
    from tamis.sampler import SamplerParams

    names = ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
    given = {n: getattr(arguments, n) for n in names if hasattr(arguments, n)}
    return SamplerParams(**given)


def model_file(name: str | None, progress: Progress) -> Path:
    """The file of a model; with no name the default one, fetched after saying so."""
    if name is not None:
        return resolve(name)
    try:
        return resolve(DEFAULT)
    except ValueError:
        note(f"no model named: fetching {DEFAULT} (98 MB, Apache-2.0)")
        path = pull(DEFAULT, progress=progress)
        progress.clear()
        return path


def load_engine(arguments: argparse.Namespace, progress: Progress) -> Any:
    """The engine of -m and -t."""
    from tamis.engine import Engine

    path = model_file(arguments.model, progress)
    return Engine.load(path, n_threads=arguments.threads, progress=progress)


def open_session(engine: Any, arguments: argparse.Namespace, progress: Progress) -> Any:
    """A session of --ctx and --attn, compiling kernels where they are missing."""
    session = engine.session(n_ctx=arguments.ctx, attn=arguments.attn, progress=progress)
    progress.clear()
    return session
