"""A CUDA driver's stand-in on the host: what the CUDA backend asks of a device, recorded."""

import contextlib
import ctypes

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.cuda.lang.target import TARGETS
from tamis.jit_kernels.cuda.runtime.driver import Function

CLASSES = "few", "some", "many"
ELSEWHERE = 1 << 40  # how far from memory that is mapped kernels see it


class Memory:
    """A device buffer: zeros of the host, given back when nothing holds it."""

    def __init__(self, device, n_bytes):
        self._array, self._device, self.n_bytes = np.zeros(n_bytes + 256, np.uint8), device, n_bytes
        self.address = (self._array.ctypes.data + 255) // 256 * 256  # as the driver aligns them
        device.held += n_bytes

    def __del__(self):
        self._device.held -= self.n_bytes


class StandIn:
    """What CudaBackend asks of a Device; launches are noted with their fields."""

    n_multiprocessor, target = 4, TARGETS["sm_90a"]

    def __init__(self):
        self.held, self.copied, self.started, self._capturing = 0, 0, [], None
        self.pinned, self.how, self.marks, self.overlapping, self.times = {}, [], [], [], []
        self.mapped = {}

    def use(self): ...

    def wait(self): ...

    def memory(self):
        return 1 << 30, 1 << 30

    def allocate(self, n_bytes):
        return Memory(self, n_bytes)

    def upload(self, address, host, n_bytes):
        self.copied += n_bytes
        ctypes.memmove(address, host, n_bytes)

    def download(self, host, address, n_bytes):
        ctypes.memmove(host, address, n_bytes)

    def launch(
        self, function, fields, *, beside=False, share=1, times=1, overlaps=True, n_shared=None
    ):
        self._capturing.append((function.handle, fields))
        self.how.append((beside, share))
        self.times.append(times)
        self.overlapping.append(overlaps)

    def mark(self):
        self.marks.append(len(self._capturing))
        return len(self._capturing)

    def nanoseconds(self, begin, end):
        return 100 * (end - begin)  # a launch takes 100 ns

    def pin(self, host, n_bytes):
        self.pinned[host] = n_bytes
        return True

    def unpin(self, host):
        del self.pinned[host]

    def map(self, host, n_bytes):
        self.mapped[host] = n_bytes
        return host + ELSEWHERE

    def unmap(self, host):
        del self.mapped[host]

    @contextlib.contextmanager
    def capture(self):
        self._capturing, found = [], []
        yield found
        found.append(self._capturing)

    def start(self, graph):
        self.started = graph


class Library:
    """Three kernels of MATMUL, one of every other op."""

    def __init__(self, device):
        self.loaded = set()

    def load(self, specs, progress=None):
        self.loaded |= set(specs)

    def functions(self, spec):
        if spec.op is ops.MATMUL:
            return [Function(f"matmul {rows}", 1, 1, 0, rows) for rows in CLASSES]
        return [Function(spec.op.name, 1, 1, 0, "any")]


def fields(backend, op):
    """The fields of each launch that the last replay made, by name."""
    return [dict(zip(op.fields, values, strict=True)) for _, values in backend.device.started]
