"""The tool that times decode steps of methods on a GPU, with a stand-in for it."""

import numpy as np
import pytest
from cuda_stand_in import Library, StandIn

from tamis.jit_kernels.backends import cuda as cuda_backend
from tamis.jit_kernels.backends.cuda import CudaBackend
from tamis.jit_kernels.contract.types import PAGE
from tamis.tools import bench_select
from tamis.tools.bench_select import HEAD_DIM, PAST, STEPS, Steps


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
    ("attn", "n_op"), [("quest:dense=0", 4), ("hip:l_d=0,r_m=4", 2), ("cpe:phi=1", 7)]
)
def test_a_layers_time_is_a_steps_over_the_layers(gpu, attn, n_op):
    keys = bench_select.Directions(1000)
    dense, steps = (Steps(gpu, name, keys) for name in ("dense", attn))
    row = bench_select.measure(gpu, attn, dense, steps)
    # Dense attention is one launch a layer; one that covers what it does with another is shared.
    assert row["dense"] == pytest.approx(1, abs=0.2)
    assert row["median"] == pytest.approx(n_op, abs=0.2)
    assert row["faster"][1] == pytest.approx(row["dense"] / row["median"], rel=0.2)
    assert (steps._at, dense._at) == (keys.cache.n_kv - 1 + STEPS, keys.cache.n_kv - 1)
    assert len(row["ops"]) == n_op
    assert {len(times) for times in row["ops"].values()} == {1}
    if "r_m" in attn:  # a step that searches has two ops more
        assert row["most"] == pytest.approx(n_op + 2, abs=0.2)


def test_captured_heads_are_repeated_and_their_logits_stay(tmp_path):
    rng, width, n_pos = np.random.default_rng(0), 64, 100
    q, k = rng.standard_normal((4, 10, 50, width)), rng.standard_normal((4, 2, n_pos, width))
    file = tmp_path / "captured.npz"
    np.savez(file, q=q.astype(np.float16), k=k.astype(np.float16))
    with pytest.raises(ValueError, match="50 queries, expected 56 or more"):
        bench_select.Captured(200, file)
    q = rng.standard_normal((4, 10, 90, width))
    np.savez(file, q=q.astype(np.float16), k=k.astype(np.float16))
    keys = bench_select.Captured(250, file)
    pages, _, table, _ = keys.cache.kv
    for head, pos in ((0, 249), (5, 150), (31, 3)):
        kv, at = head // 4, (pos - 50) % n_pos  # the last position is the file's last
        query = keys.step(1, 3, None, 0.0)[head].astype(float)
        key = pages[table[pos // PAGE], kv, pos % PAGE].astype(float)
        # Of layer 1 the first queries are 5 after those of layer 0.
        own = q.reshape(8, 5, 90, width)[kv, head % 4, 5 + PAST + 3]
        expected = own @ k.reshape(8, n_pos, width)[kv, at] / width**0.5
        assert query @ key / HEAD_DIM**0.5 == pytest.approx(expected, abs=0.02)


def test_a_floor_has_the_bytes_of_scores_and_of_attention(gpu, monkeypatch):
    keys = bench_select.Directions(1000)
    steps = Steps(gpu, "quest:dense=0", keys)
    steps.next()
    monkeypatch.setattr(steps, "kept", lambda: 0.32)  # of 1000 positions, for each of 32 heads
    scored = 4 * 63 * 128 * 8  # two vectors of each page
    assert steps.n_bytes() == pytest.approx(scored + 32 * 320 * 512)
