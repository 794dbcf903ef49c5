"""Opens the backends of devices; the modules of a device are imported when it is opened."""

from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.compile.library import KernelLibrary


def open_host(n_threads: int, library: KernelLibrary | None = None) -> Backend:
    """The processor of this machine; library: of kernels, by default the process's."""
    from tamis.jit_kernels.backends.cpu import CpuBackend

    return CpuBackend(n_threads, library)


def open_gpu() -> Backend:
    """The first visible GPU of this process. Raises CudaError, ImportError."""
    from tamis.jit_kernels.backends.cuda import CudaBackend

    return CudaBackend()
