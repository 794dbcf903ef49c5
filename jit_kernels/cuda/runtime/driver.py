"""The CUDA driver: one GPU, its memory, modules, stream and graphs; every call is checked.

cuda.bindings is imported when a Device is opened, never before.
"""

import ctypes
import importlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tamis.jit_kernels.cuda.lang.target import Target, target_of

GIB = 1 << 30
EXTERNAL = 1  # CU_EVENT_RECORD_EXTERNAL: a captured event is a separate node


class CudaError(RuntimeError):
    """There is no usable GPU, or the driver failed; the message says what is missing or where."""


class Function(NamedTuple):
    """A loaded kernel and how it is launched."""

    handle: Any
    n_block: int
    n_thread: int
    shared: int
    rows: str
    cluster: int = 1  # blocks that run at the same time, of which n_block is a multiple


def _bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise CudaError(
            "the package cuda-python is not installed: pip install 'tamis[cuda]'"
        ) from error


class Device:
    """The driver's first GPU. One stream: calls run in the order in which they are made.

    Raises CudaError if there is no package, no driver, no GPU, or if one is too old.
    """

    def __init__(self) -> None:
        self._d = _bindings()
        try:
            self._call("cuInit", 0)
            n_gpu = self._call("cuDeviceGetCount")
        except CudaError as error:
            raise CudaError(
                f"no NVIDIA GPU to be used ({error}): its driver must be installed, and show the "
                "GPU in nvidia-smi"
            ) from error
        except RuntimeError as error:  # raised by the bindings if libcuda is missing
            raise CudaError(
                "no NVIDIA driver on this machine (libcuda.so.1 is not found): install it from "
                "your distribution or nvidia.com, or leave out device='cuda' and n_gpu_layers"
            ) from error
        if n_gpu == 0:
            raise CudaError("the NVIDIA driver shows no GPU: see nvidia-smi, CUDA_VISIBLE_DEVICES")
        self._device = self._call("cuDeviceGet", 0)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.use()
        self.name = bytes(self._call("cuDeviceGetName", 100, self._device)).split(b"\0")[0].decode()
        self.capability = (self._attribute("COMPUTE_CAPABILITY_MAJOR"),
                           self._attribute("COMPUTE_CAPABILITY_MINOR"))  # fmt: skip
        self.n_multiprocessor = self._attribute("MULTIPROCESSOR_COUNT")
        self.stream = self._call("cuStreamCreate", 1)  # does not wait for the default stream

    @property
    def target(self) -> Target:
        """The target of kernels. Raises CudaError for a GPU that is too old."""
        target = target_of(self.capability)
        if target is None:
            major, minor = self.capability
            raise CudaError(
                f"{self.name} has compute capability {major}.{minor}, tamis needs 8.0 (Ampere)"
            )
        return target

    def use(self) -> None:
        """Make this GPU the calling thread's; every thread that calls the others must do it."""
        self._call("cuCtxSetCurrent", self._context)

    # ---- memory ----------------------------------------------------------------------------------
    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = self._call("cuMemGetInfo")
        return free, total

    def allocate(self, n_bytes: int) -> "Buffer":
        """Device memory, of zeros. Raises MemoryError with numbers."""
        free, total = self.memory()
        if n_bytes > free:
            raise MemoryError(
                f"{n_bytes / GIB:.2f} GiB more are needed on {self.name}, free are "
                f"{free / GIB:.2f} of {total / GIB:.1f} GiB: lower n_ctx or use a smaller model"
            )
        buffer = Buffer(self, int(self._call("cuMemAlloc", max(1, n_bytes))), n_bytes)
        self._call("cuMemsetD8Async", buffer.address, 0, max(1, n_bytes), self.stream)
        return buffer

    def free(self, address: int) -> None:
        """Give memory back."""
        self.use()
        self._call("cuMemFree", address)

    def upload(self, address: int, host: int, n_bytes: int) -> None:
        """Copy from host memory, which may be changed as soon as this returns."""
        self._call("cuMemcpyHtoDAsync", address, host, n_bytes, self.stream)

    def download(self, host: int, address: int, n_bytes: int) -> None:
        """Copy to host memory; `wait` before reading it."""
        self._call("cuMemcpyDtoHAsync", host, address, n_bytes, self.stream)

    def pin(self, host: int, n_bytes: int) -> bool:
        """Pin host memory, which makes copies direct; False if the system does not allow it."""
        status, *_ = self._d.cuMemHostRegister(host, n_bytes, 0)
        return int(status) == 0

    def unpin(self, host: int) -> None:
        """Undo `pin`, before the memory is freed."""
        self.use()
        self._call("cuMemHostUnregister", host)

    def map(self, host: int, n_bytes: int) -> int:
        """The address at which kernels access host memory directly, until `unmap`.

        Raises MemoryError with numbers if the system does not allow it.
        """
        flags = self._d.CU_MEMHOSTREGISTER_PORTABLE | self._d.CU_MEMHOSTREGISTER_DEVICEMAP
        try:
            self._call("cuMemHostRegister", host, n_bytes, flags)
        except CudaError as error:
            raise MemoryError(
                f"{n_bytes / GIB:.2f} GiB of RAM cannot be pinned for {self.name} ({error}): lower "
                "n_ctx, raise the limit of locked memory (ulimit -l), or leave out kv_vram"
            ) from error
        return int(self._call("cuMemHostGetDevicePointer", host, 0))

    def unmap(self, host: int) -> None:
        """Undo `map`, once nothing runs that may still touch the memory."""
        self.use()
        self.wait()
        self.unpin(host)

    def copy(self, to: int, address: int, n_bytes: int) -> None:
        """Copy within device memory."""
        self._call("cuMemcpyDtoDAsync", to, address, n_bytes, self.stream)

    def wait(self) -> None:
        """Until all calls have ended; raises what went wrong in any of them."""
        self._call("cuStreamSynchronize", self.stream)

    # ---- kernels ---------------------------------------------------------------------------------
    def load(self, ptx: str) -> Any:
        """The module of a PTX text."""
        return self._call("cuModuleLoadData", ptx.encode() + b"\0")

    def function(self, module: Any, launch: dict[str, Any]) -> Function:
        """A kernel of a module, by the record that the compiler wrote."""
        handle = self._call("cuModuleGetFunction", module, launch["name"].encode())
        # above 48 KiB, including the kernel's static memory, it must be allowed explicitly
        if launch["shared"]:
            attribute = self._d.CUfunction_attribute
            name = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", handle, name, launch["shared"])
        cluster = launch["cluster"]
        n_block = launch["blocks"] * self.n_multiprocessor // cluster * cluster
        return Function(
            handle, n_block, launch["threads"], launch["shared"], launch["rows"], cluster
        )

    def launch(
        self,
        function: Function,
        fields: Sequence[int | float],
        *,
        beside: bool = False,
        share: int = 1,
        times: int = 1,
        overlaps: bool = True,
        n_shared: int | None = None,
    ) -> None:
        """Start a kernel with these parameters, of every share-th block only, or of more of them.

        beside: it reads nothing that the last one writes. overlaps: where a kernel may be launched
        before the one before it ends, this one is; False after a `mark`. n_shared: bytes of shared
        memory of a block, where it needs less than it may have.
        """
        values = (*fields, int(beside))
        kinds = tuple(ctypes.c_float if isinstance(v, float) else ctypes.c_int64 for v in values)
        config = self._d.CUlaunchConfig()
        cluster, ids = function.cluster, self._d.CUlaunchAttributeID
        n_block = max(1, function.n_block * times // share // cluster) * cluster
        config.gridDimX, config.gridDimY, config.gridDimZ = n_block, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = function.n_thread, 1, 1
        config.sharedMemBytes = function.shared if n_shared is None else n_shared
        config.hStream = self.stream
        attributes = []
        if self.target.overlaps and overlaps:
            attribute = self._d.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cluster > 1:
            attribute = self._d.CUlaunchAttribute()
            attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            size = attribute.value.clusterDim
            size.x, size.y, size.z = cluster, 1, 1
            attribute.value.clusterDim = size
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        self._call("cuLaunchKernelEx", config, function.handle, (values, kinds), 0)

    @contextmanager
    def capture(self) -> "Iterator[list[Graph]]":
        """Capture launches within the block instead of running them.

        The list gets their Graph at the end.
        """
        mode = self._d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        found: list[Graph] = []
        self._call("cuStreamBeginCapture", self.stream, mode)
        try:
            yield found
        finally:
            graph = self._call("cuStreamEndCapture", self.stream)
        found.append(Graph(self, self._call("cuGraphInstantiate", graph, 0)))
        self._call("cuGraphDestroy", graph)

    def mark(self) -> "Event":
        """Capture an event: it tells when, in the latest replay, all before it had ended."""
        event = Event(self, self._call("cuEventCreate", 0))
        self._call("cuEventRecordWithFlags", event.handle, self.stream, EXTERNAL)
        return event

    def nanoseconds(self, begin: "Event", end: "Event") -> float:
        """Between two events of a replay that has ended, of the GPU's own clock."""
        return 1e6 * float(self._call("cuEventElapsedTime", begin.handle, end.handle))

    def start(self, graph: "Graph") -> None:
        """Start all launches of a graph."""
        self._call("cuGraphLaunch", graph.handle, self.stream)

    def time(self, work: Any) -> float:
        """Seconds of the GPU's own clock that the calls made by work() take."""
        events = [self._call("cuEventCreate", 0) for _ in range(2)]
        self._call("cuEventRecord", events[0], self.stream)
        work()
        self._call("cuEventRecord", events[1], self.stream)
        self._call("cuEventSynchronize", events[1])
        seconds = self._call("cuEventElapsedTime", *events) / 1e3
        for event in events:
            self._call("cuEventDestroy", event)
        return seconds

    def _attribute(self, name: str) -> int:
        attributes = self._d.CUdevice_attribute
        attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._device))

    def _call(self, name: str, *args: Any) -> Any:
        """A driver function's result. Raises CudaError with the driver's own words."""
        status, *results = getattr(self._d, name)(*args)
        if int(status) != 0:
            raise CudaError(f"{name} failed: {getattr(status, 'name', status)}")
        return results[0] if len(results) == 1 else tuple(results)


class Buffer:
    """Device memory; given back when nothing holds it."""

    def __init__(self, device: Device, address: int, n_bytes: int) -> None:
        self.address, self.n_bytes = address, n_bytes
        weakref.finalize(self, device.free, address).atexit = False


class Event:
    """A moment in replays of a graph; destroyed when nothing holds it."""

    def __init__(self, device: Device, handle: Any) -> None:
        self.handle = handle
        weakref.finalize(self, device._call, "cuEventDestroy", handle).atexit = False


class Graph:
    """Launches that are started together; destroyed when nothing holds it."""

    def __init__(self, device: Device, handle: Any) -> None:
        self.handle = handle
        weakref.finalize(self, device._call, "cuGraphExecDestroy", handle).atexit = False
