"""Opens the backends of devices; what a device needs is imported when one is opened."""

from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.compile.library import KernelLibrary


def open_host(n_threads: int, library: KernelLibrary | None = None) -> Backend:
    """The processor of this machine; library: of kernels, the one of the process by default."""
    from tamis.jit_kernels.backends.cpu import CpuBackend

    return CpuBackend(n_threads, library)


def open_gpu() -> Backend:
    """The GPU that this process sees first. Raises CudaError, ImportError."""
    from tamis.jit_kernels.backends.cuda import CudaBackend

    return CudaBackend()
