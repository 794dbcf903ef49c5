"""The CUDA kernels of this process: PTX loaded on a GPU, compiled where it is missing."""

import json
import threading
from collections.abc import Iterable
from pathlib import Path

from tamis.jit_kernels.compile.store import open_folder, read_object, user_folder
from tamis.jit_kernels.compile.workers import (
    Command,
    CompileError,
    NoKernelError,
    Progress,
    compile_specs,
)
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cuda import OPS
from tamis.jit_kernels.cuda.runtime.driver import Device, Function


class PtxLibrary:
    """Kernels by spec, on one GPU. Raises KernelStoreError, CudaError for a GPU that is too old."""

    def __init__(self, device: Device, root: Path | None = None, n_worker: int = 2) -> None:
        self._device, self._n_worker = device, n_worker
        target = device.target
        self._folder = open_folder(root or user_folder(), target)
        self._command = Command(
            self._folder, "tamis.jit_kernels.cuda.runtime.compiler", target.name, {}
        )
        self._functions: dict[str, list[Function]] = {}
        self._lock = threading.Lock()

    def load(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> None:
        """Load the kernels, compiling the missing ones; progress(done, total) while compiling.

        Raises NoKernelError, CompileError, CudaError.
        """
        with self._lock:
            wanted = {s.symbol: s for s in specs if s.symbol not in self._functions}
            if absent := sorted({s.op.name for s in wanted.values()} - OPS):
                raise NoKernelError(
                    f"on a GPU there is no kernel yet for {', '.join(absent)}, which this model or "
                    "attn needs: leave out device='cuda' and n_gpu_layers"
                )
            missing = [s for s in wanted.values() if read_object(self._folder, s.symbol) is None]
            if missing:
                compile_specs(self._command, missing, self._n_worker, progress)
            for symbol in wanted:
                data = read_object(self._folder, symbol)
                if data is None:
                    raise CompileError(f"the compiler wrote no usable PTX for {symbol}")
                self._functions[symbol] = [
                    self._device.function(self._device.load(launch["ptx"]), launch)
                    for launch in json.loads(data)
                ]

    def functions(self, spec: KernelSpec) -> list[Function]:
        """The kernels of an op that was loaded, in the order of their launches."""
        return self._functions[spec.symbol]
