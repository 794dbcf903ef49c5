"""Shared fixtures. Tests marked `model` use the real models, fetched on first use."""

import contextlib
import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tamis.fetch import registry as models
from tamis.fetch.base import Unreachable
from tamis.jit_kernels.compile.library import shared
from tamis.jit_kernels.compile.workers import CompileError
from tamis.jit_kernels.contract.program import KernelSpec

ROOT = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the working directory first: from the root of the tree, `runner` would be
# importable beside the installed `tamis`, and a module would exist twice.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# A shell without a terminal starts what is to run in the background so that it ignores Ctrl-C, and
# so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def model_path() -> Callable[[str], Path]:
    """model_path("smollm2"): the file of a real model, fetched once into the per-user folder.

    Without a network the test is skipped; where the environment variable CI is set, it fails, so
    that a green run always means that the real models were run.
    """

    def path_of(name: str) -> Path:
        try:
            return models.pull(name)
        except Unreachable as e:
            if os.environ.get("CI"):
                pytest.fail(f"{name} cannot be fetched: {e}")
            pytest.skip(f"{name} cannot be fetched: {e}")

    return path_of


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the kernels of all modules of op tests that will run, with one start of compilers."""
    if session.config.option.collectonly:
        return
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    listed = [kernel for module in modules for kernel in getattr(module, "KERNELS", ())]
    specs = {KernelSpec(op, tuple(constants)) for op, constants in listed}
    with (Path(tempfile.gettempdir()) / f"tamis-tests-{os.getuid()}.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # the second process finds what the first has compiled
        if missing := shared().missing(specs):
            session.config.get_terminal_writer().line(f"compiling {len(missing)} kernels")
        with contextlib.suppress(CompileError):  # the tests that need the kernel will say so
            shared().load(specs)
