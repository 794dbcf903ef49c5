"""The tool that times decode steps of methods on a GPU, with a stand-in for it."""

import pytest
from cuda_stand_in import Library, StandIn

from tamis.jit_kernels.backends import cuda as cuda_backend
from tamis.jit_kernels.backends.cuda import CudaBackend
from tamis.tools import bench_select
from tamis.tools.bench_select import STEPS, Steps


class Clock(StandIn):
    """A device on which a launch takes a microsecond."""

    def time(self, work):
        work()
        return len(self.started) / 1e6


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(cuda_backend, "Device", Clock)
    monkeypatch.setattr(cuda_backend, "PtxLibrary", Library)
    return CudaBackend()


@pytest.mark.parametrize(
    ("attn", "n_op"), [("quest:dense=0", 4), ("hip:l_d=0,r_m=4", 2), ("cpe:phi=1", 6)]
)
def test_a_layers_time_is_a_steps_over_the_layers(gpu, attn, n_op):
    cache, centres = bench_select.clustered(1000)
    dense, steps = (Steps(gpu, name, cache, centres) for name in ("dense", attn))
    row = bench_select.measure(gpu, attn, dense, steps)
    # Dense attention is one launch a layer; one that covers what it does with another is shared.
    assert row["dense"] == pytest.approx(1, abs=0.2)
    assert row["median"] == pytest.approx(n_op, abs=0.2)
    assert row["faster"][1] == pytest.approx(row["dense"] / row["median"], rel=0.2)
    assert (steps._at, dense._at) == (cache.n_kv - 1 + STEPS, cache.n_kv - 1)
    assert len(row["ops"]) == n_op
    assert {len(times) for times in row["ops"].values()} == {1}
    if "r_m" in attn:  # a step that searches has two ops more
        assert row["most"] == pytest.approx(n_op + 2, abs=0.2)
