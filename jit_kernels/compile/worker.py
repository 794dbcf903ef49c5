"""A compile process: reads which kernels to compile and writes files of the store, within limits.

Started by workers.py as a module, with the compiler's module, folder, target and parent process.
It ends with its parent, takes at most MEMORY_BYTES, and CPU_SECONDS for a kernel.
"""

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tamis.jit_kernels.compile.store import write_object
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.op import EACH, each
from tamis.jit_kernels.contract.program import KernelSpec

MEMORY_BYTES = 4 << 30  # of address space; the largest kernels of this package take 1.2 GB
CPU_SECONDS = 120  # of a kernel; the slowest takes some 10
_PR_SET_PDEATHSIG = 1


def serve(folder: Path, compile_kernel: Callable[[KernelSpec], bytes]) -> None:
    """Compile what standard input names, [op, constants] a line; print each symbol.

    An empty line ends the list: the pipe itself may stay open in a fork of the parent.
    """
    by_name = ops.declared()
    for line in iter(sys.stdin.readline, "\n"):
        if not line:
            return
        name, constants = json.loads(line)
        op = by_name[name.removeprefix(EACH)]
        spec = KernelSpec(each(op) if name.startswith(EACH) else op, tuple(constants))
        _limit_cpu()
        code = compile_kernel(spec)
        try:
            write_object(folder, spec.symbol, code)
        except OSError as error:
            # One line, for the parent's error: it has no use for a traceback.
            sys.exit(
                f"cannot write to {folder}: {error.strerror}; free some space or set "
                "XDG_CACHE_HOME to an absolute folder elsewhere"
            )
        sys.stdout.write(spec.symbol + "\n")
        sys.stdout.flush()


def limit(parent: int) -> None:
    """Set the limits of this process: the parent's end is its own."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be asked for
        sys.exit(1)
    _lower(resource.RLIMIT_AS, MEMORY_BYTES)
    _lower(resource.RLIMIT_CORE, 0)
    _limit_cpu()


def _limit_cpu() -> None:
    """Let this process run for CPU_SECONDS from now on; then SIGXCPU ends it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (_least(most, hard), hard))


def _lower(which: int, most: int) -> None:
    """Set a soft limit; a lower one that is there stays."""
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (_least(most, soft), hard))


def _least(most: int, limit: int) -> int:
    return most if limit == resource.RLIM_INFINITY else min(most, limit)


if __name__ == "__main__":
    limit(int(sys.argv[4]))
    import_module(sys.argv[1]).main(*sys.argv[2:4])
