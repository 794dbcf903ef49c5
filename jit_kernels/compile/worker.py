"""A compile process: reads the kernels to compile and writes files of the store, within limits.

workers.py starts it as a module, with the compiler's module, folder, target and parent process. It
ends with its parent, takes at most MEMORY_BYTES, and CPU_SECONDS for each kernel.
"""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from tamis.jit_kernels.compile.store import write_object
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.op import EACH, each
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.platform.limits import allow_cpu, lower
from tamis.platform.processes import end_with

MEMORY_BYTES = 4 << 30  # of address space; the largest kernels of this package take 1.2 GB
CPU_SECONDS = 120  # for a kernel; the slowest takes some 10


def serve(folder: Path, compile_kernel: Callable[[KernelSpec], bytes]) -> None:
    """Compile the kernels named on standard input, [op, constants] per line; prints each symbol.

    An empty line ends the list, as the pipe itself may stay open in a fork of the parent.
    """
    by_name = ops.declared()
    for line in iter(sys.stdin.readline, "\n"):
        if not line:
            return
        name, constants = json.loads(line)
        op = by_name[name.removeprefix(EACH)]
        spec = KernelSpec(each(op) if name.startswith(EACH) else op, tuple(constants))
        allow_cpu(CPU_SECONDS)
        code = compile_kernel(spec)
        try:
            write_object(folder, spec.symbol, code)
        except OSError as error:
            # One line, for the parent's error message: a traceback is of no use there.
            sys.exit(
                f"cannot write to {folder}: {error.strerror}; free some space or set "
                "XDG_CACHE_HOME to an absolute folder elsewhere"
            )
        sys.stdout.write(spec.symbol + "\n")
        sys.stdout.flush()


def limit(parent: int) -> None:
    """Set the limits of this process, which also ends with its parent."""
    end_with(parent)
    lower("memory", MEMORY_BYTES)
    lower("core", 0)
    allow_cpu(CPU_SECONDS)


if __name__ == "__main__":
    limit(int(sys.argv[4]))
    import_module(sys.argv[1]).main(*sys.argv[2:4])
