"""The CUDA backend: Programs over host arrays, replayed as CUDA graphs over device copies.

Recorded Programs name arrays of this process. Each of them has a copy in device memory, which
kernels read and write; `send` and `fetch` copy what Python wrote or will read. The host arrays of
activations and of the KV cache are never touched, so they take only address space.
"""

import threading
import weakref
from collections.abc import Iterable, Sequence

import numpy as np

from tamis.jit_kernels.backends import GPU
from tamis.jit_kernels.backends.base import Backend, Segments
from tamis.jit_kernels.backends.cuda_joined import MOST_ROWS, JoinedProgram
from tamis.jit_kernels.backends.cuda_memory import Mapped, Mirror
from tamis.jit_kernels.backends.cuda_program import CudaProgram, is_for
from tamis.jit_kernels.backends.fusion import Step, candidates
from tamis.jit_kernels.compile.workers import Progress
from tamis.jit_kernels.contract.program import KernelSpec, Program
from tamis.jit_kernels.contract.types import KV_TYPES
from tamis.jit_kernels.cuda.lang.scratch import (
    COUNTERS,
    FEW_ROWS,
)
from tamis.jit_kernels.cuda.runtime.driver import Buffer, Device
from tamis.jit_kernels.cuda.runtime.ptx_library import PtxLibrary

PARTS = 1  # for each multiprocessor: parts that attention over a context is split into
SHARE = 2  # the number of products of the same rows that run on the GPU at once


class CudaBackend(Backend):
    """Runs Programs on a GPU; they start in the order of the calls, `fetch` waits for them.

    Raises CudaError if there is no usable GPU, KernelStoreError.
    """

    name, on_host = GPU, False
    kv_types: tuple[str, ...] = KV_TYPES
    strips = timed = False
    joins, joins_alike, pads = MOST_ROWS, True, FEW_ROWS + 1
    clock = 1e9  # costs are in nanoseconds

    def __init__(self) -> None:
        self.device = Device()
        self.library = PtxLibrary(self.device)
        self.n_thread = self.n_part = PARTS * self.device.n_multiprocessor
        self._lock = threading.RLock()
        self._mirrors: weakref.WeakValueDictionary[tuple[int, int], Mirror | Mapped]
        self._mirrors = weakref.WeakValueDictionary()
        self._weights: list[Mirror] = []  # read-only arrays stay: all sessions share them
        self._scratch: Buffer | None = None

    def load(
        self,
        rows: Iterable[KernelSpec],
        own: Iterable[KernelSpec] = (),
        progress: Progress | None = None,
    ) -> None:
        """Load (or compile) kernels ahead of `link`. Raises CompileError."""
        with self._lock:
            self.device.use()
            specs = {*rows, *own}
            if self.device.target.overlaps:
                specs |= candidates(specs)
            self.library.load(specs, progress)

    def link(self, program: Program) -> CudaProgram:
        """Copy a recorded Program's arrays to the device; loads missing kernels.

        Raises MemoryError with numbers.
        """
        self.load(program.specs)
        with self._lock:
            return CudaProgram(program, self)

    def run(
        self, linked: CudaProgram | JoinedProgram, first: int = 0, last: int | None = None
    ) -> None:
        """Start a replay of ops first..last of a Program (all by default)."""
        stop = len(linked) if last is None else last
        if stop <= first:
            return
        with self._lock:
            self.device.use()
            if isinstance(linked, JoinedProgram):
                linked.start(self)
            else:
                linked.start(self, first, stop)

    def launch(
        self, steps: Sequence[Step], rows: str = "few", *, times: int = 1, after_mark: bool = False
    ) -> None:
        """Launch the kernels of steps for a class of rows, with `times` as many blocks.

        To be called within a capture. after_mark: whether the first one must not overlap earlier
        ones.
        """
        # Products of more rows may share scratch: each waits for the one before.
        together, beside = self.device.target.overlaps and rows == "few", False
        for step in steps:
            others = together and not step.sync
            share = SHARE if beside or others else 1
            for function in self.library.functions(step.spec):
                if is_for(function, rows):
                    self.device.launch(
                        function, tuple(step.fields.values()), beside=beside, share=share,
                        times=times, overlaps=not after_mark, n_shared=step.fields.get("n_shared"),
                    )  # fmt: skip
                    after_mark = False
            beside = others

    def join(self, steps: Segments, before: JoinedProgram | None = None) -> JoinedProgram:
        """Segments of linked Programs joined into one; loads missing kernels."""
        with self._lock:
            self.device.use()
            found = JoinedProgram(self, steps, before)
            self.library.load(found.specs)
            return found

    def send(self, *arrays: np.ndarray) -> None:
        """Copy what Python wrote to these arrays; arrays of no Program yet are copied by `link`."""
        with self._lock:
            self.device.use()
            for array in arrays:
                host = array.ctypes.data
                mirror = self._mirror(array)
                if isinstance(mirror, Mirror):
                    self.device.upload(mirror.at(host), host, array.nbytes)

    def fetch(self, *arrays: np.ndarray) -> None:
        """Copy what kernels wrote to these arrays; waits for all started work."""
        with self._lock:
            self.device.use()
            for array in arrays:
                host = array.ctypes.data
                mirror = self._mirror(array)
                if isinstance(mirror, Mirror):
                    mirror.pin()
                    self.device.download(host, mirror.at(host), array.nbytes)
            self.device.wait()

    def mapped(self, array: np.ndarray, /) -> Mapped:
        """Map an array that owns its memory for kernels, as long as the result is held.

        Raises MemoryError.
        """
        with self._lock:
            self.device.use()
            found = Mapped(self.device, array)
            self._mirrors[array.ctypes.data, array.nbytes] = found
            return found

    def mirror(self, array: np.ndarray) -> Mirror | Mapped:
        """The device copy of the memory that contains an array, made if there is none."""
        root = _root(array)
        found = self._mirrors.get((root.ctypes.data, root.nbytes))
        if found is None:
            found = Mirror(self.device, root)
            self._mirrors[root.ctypes.data, root.nbytes] = found
            if not array.flags.writeable:
                self._weights.append(found)
        return found

    def _mirror(self, array: np.ndarray) -> Mirror | Mapped | None:
        """The device copy that a linked Program has; None if none uses the array."""
        root = _root(array)
        return self._mirrors.get((root.ctypes.data, root.nbytes))

    def scratch(self, n_bytes: int) -> Buffer:
        """A buffer: COUNTERS bytes of counters, then scratch that one kernel at a time may use."""
        if self._scratch is None or self._scratch.n_bytes < COUNTERS + n_bytes:
            self._scratch = self.device.allocate(COUNTERS + n_bytes)
        return self._scratch

    def free_bytes(self, n_weight: int = 0, /) -> int:
        """The bytes of device memory that are free beside n bytes of weights."""
        self.device.use()
        held = sum(mirror.n_bytes for mirror in self._weights)
        return self.device.memory()[0] - max(0, n_weight - held)

    def close(self) -> None:
        """Free the weights. Programs must not be run afterwards."""
        self.device.wait()
        self._weights.clear()
        self._scratch = None


def _root(array: np.ndarray) -> np.ndarray:
    """The array that owns an array's memory; weights, which are read-only, count as their own."""
    while array.flags.writeable and isinstance(array.base, np.ndarray):
        array = array.base
    return array
