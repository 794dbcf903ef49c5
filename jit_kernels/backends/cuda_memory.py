"""Arrays of the host for kernels of a GPU: copied to the device, or mapped."""

import weakref

import numpy as np

from tamis.jit_kernels.cuda.runtime.driver import Device

ALIGNMENT = 256  # a copy has its array's address modulo this: kernels may read 16 bytes
# least and most bytes of arrays whose memory is pinned when they are fetched
PINNED = 1 << 16, 1 << 26
CHUNK = 1 << 22  # bytes that are checked at once for anything to copy


class Mirror:
    """The device copy of an array that owns its memory; keeps the array alive."""

    def __init__(self, device: Device, array: np.ndarray) -> None:
        self._device, self._array = device, array
        self._host, self.n_bytes = array.ctypes.data, array.nbytes
        self._unpinned = PINNED[0] <= array.nbytes <= PINNED[1]
        self._buffer = device.allocate(array.nbytes + ALIGNMENT)
        self.address = self._buffer.address + self._host % ALIGNMENT
        data = array.reshape(-1).view(np.uint8)
        for start in range(0, len(data), CHUNK):
            part = data[start : start + CHUNK]
            if not array.flags.writeable or part.any():  # the buffer is zero, as most arrays are
                device.upload(self.address + start, part.ctypes.data, len(part))

    def at(self, host: int) -> int:
        """The device address of a host address within the array."""
        return self.address + host - self._host

    def pin(self) -> None:
        """Pin the array's memory once, which makes copies to it fast.

        Not for small or very large ones.
        """
        if self._unpinned and self._device.pin(self._host, self._array.nbytes):
            weakref.finalize(self, self._device.unpin, self._host).atexit = False
        self._unpinned = False


class Mapped:
    """An array in host memory that kernels access directly: like a Mirror, without copies."""

    def __init__(self, device: Device, array: np.ndarray) -> None:
        self._array, self._host = array, array.ctypes.data
        self.address = device.map(self._host, array.nbytes)
        weakref.finalize(self, device.unmap, self._host).atexit = False

    def at(self, host: int) -> int:
        """The device address of a host address within the array."""
        return self.address + host - self._host
