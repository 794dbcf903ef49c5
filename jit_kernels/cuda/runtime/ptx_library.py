"""The CUDA kernels of this process: PTX loaded on a GPU, compiled where it is missing."""

import json
import threading
from collections.abc import Iterable
from pathlib import Path

from tamis.jit_kernels.compile.code import KernelCode
from tamis.jit_kernels.compile.workers import NoKernelError, Progress
from tamis.jit_kernels.contract.op import EACH
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cuda import OPS
from tamis.jit_kernels.cuda.runtime.driver import Device, Function


class PtxLibrary:
    """Kernels by spec, on one GPU. Raises KernelStoreError, CudaError for a GPU that is too old."""

    def __init__(self, device: Device, root: Path | None = None, n_worker: int = 2) -> None:
        self._device, self._code = device, KernelCode(device.target, root, n_worker)
        self._functions: dict[str, list[Function]] = {}
        self._lock = threading.Lock()

    def load(self, specs: Iterable[KernelSpec], progress: Progress | None = None) -> None:
        """Load the kernels, compiling the missing ones; progress(done, total) while compiling.

        Raises NoKernelError, CompileError, CudaError.
        """
        with self._lock:
            wanted = {s.symbol: s for s in specs if s.symbol not in self._functions}
            if absent := sorted({s.op.name.removeprefix(EACH) for s in wanted.values()} - OPS):
                raise NoKernelError(
                    f"on a GPU there is no kernel yet for {', '.join(absent)}, which this model or "
                    "attn needs: leave out device='cuda' and n_gpu_layers"
                )
            for symbol, data in self._code.take(wanted.values(), progress).items():
                self._functions[symbol] = [
                    self._device.function(self._device.load(launch["ptx"]), launch)
                    for launch in json.loads(data)
                ]

    def functions(self, spec: KernelSpec) -> list[Function]:
        """The kernels of an op that was loaded, in the order of their launches."""
        return self._functions[spec.symbol]
