"""A CPU backend with arrays of its own, which stands for a second device."""

import weakref

from cuda_stand_in import StandIn

from tamis.engine.engine import Engine
from tamis.jit_kernels.backends import GPU
from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.backends.cuda import _root
from tamis.jit_kernels.backends.cuda_memory import Mirror
from tamis.jit_kernels.contract.program import Program

N_LAYER, GIB = 6, 1 << 30


class Itself:
    """The place of an array that is not copied."""

    def at(self, host):
        return host


class Apart(CpuBackend):
    """A CPU that has copies of arrays, as CudaBackend has, and at most `memory` bytes free."""

    name, on_host, clock = GPU, False, 1e9
    strips, memory = False, GIB

    def __init__(self, n_thread=2):
        super().__init__(n_thread)
        self._device, self._copies = StandIn(), {}
        self._mapped = weakref.WeakValueDictionary()

    def link(self, program):
        own = Program()
        own.arrays = {at: self._copy(array, make=True) for at, array in program.arrays.items()}
        for call in program.calls:
            names, floats = call.spec.op.fields, call.spec.op.floats
            values = [
                own.arrays[v].at(v) if name not in floats and v in own.arrays else v
                for name, v in zip(names, call.values, strict=True)
            ]
            own.calls.append(call._replace(values=tuple(values)))
        linked = super().link(own)
        linked.program = program
        return linked

    def send(self, *arrays):
        for array in arrays:
            if copy := self._copy(array):
                host = array.ctypes.data
                self._device.upload(copy.at(host), host, array.nbytes)

    def fetch(self, *arrays):
        for array in arrays:
            if copy := self._copy(array):
                host = array.ctypes.data
                self._device.download(host, copy.at(host), array.nbytes)

    def mapped(self, array, /):
        self._mapped[array.ctypes.data, array.nbytes] = held = Itself()
        return held

    def free_bytes(self, n_weight=0, /):
        return self.memory - n_weight

    def _copy(self, array, make=False):
        root = _root(array)
        key = root.ctypes.data, root.nbytes
        if key in self._mapped:
            return self._mapped[key] if make else None
        if make and key not in self._copies:
            self._copies[key] = Mirror(self._device, root)
        return self._copies.get(key)


def loaded(path, n_gpu_layers):
    return Engine.load(path, n_threads=2, device="cuda", n_gpu_layers=n_gpu_layers)
