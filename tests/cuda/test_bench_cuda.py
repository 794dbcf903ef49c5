"""The tool that times ops on a GPU, with a stand-in for it: what is compared, and how."""

import pytest
from cuda_stand_in import Library, StandIn

from tamis.jit_kernels.backends import cuda as cuda_backend
from tamis.jit_kernels.backends.cuda import CudaBackend
from tamis.jit_kernels.contract import ops
from tamis.tools import bench_cuda
from tamis.tools.bench_cuda import N_RUN, Work


class Clock(StandIn):
    """A device on which each thing takes the next of `seconds`."""

    def time(self, work):
        work()
        return self.seconds.pop(0)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(cuda_backend, "Device", Clock)
    monkeypatch.setattr(cuda_backend, "PtxLibrary", Library)
    return CudaBackend()


def test_works_alternate_and_are_compared_within_each_round(gpu):
    ran = []
    works = [Work(name, lambda n=name: ran.append(n), 4, 100, 7) for name in ("whole", "part")]
    # The machine slows down: only what is of the same turn can be compared.
    gpu.device.seconds = [s for turn in range(N_RUN) for s in (8.0 * (1 + turn), 4.0 * (1 + turn))]
    gpu.device.seconds[-1] = 7.0 * N_RUN
    whole, part = bench_cuda.alternating(gpu, *works)
    assert ran == (N_RUN + 1) * ["whole", "part"]
    assert (whole.op, whole.seconds) == ("whole", 8 * (N_RUN + 1) / 2 / 4)
    assert part == ("part: 2.00 times faster (1.14 to 2.00)", (N_RUN + 1) / 2, 100, 7)


def test_a_part_of_the_keys_is_read_elsewhere_each_time(gpu):
    whole, part = (bench_cuda.attention(gpu, 1, 1024, share) for share in (1, 4))
    assert part.op == "attend 1 tokens at 1024, 1/4 of it"
    assert (part.n_bytes, part.n_flop) == (whole.n_bytes / 4, whole.n_flop / 4)
    assert whole.n_bytes == 2 * 2 * 1024 * bench_cuda.N_HEAD_KV * bench_cuda.HEAD_DIM
    part.run()
    launched = [fields for name, fields in gpu.device.started if name == ops.ATTEND_PACK.name]
    assert len(launched) == part.n == bench_cuda.LAYERS
    indices = {fields[ops.ATTEND_PACK.fields.index("indices")] for fields in launched}
    assert len(indices) == part.n  # each launch has a Selection of its own
