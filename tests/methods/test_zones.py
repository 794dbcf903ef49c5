"""RetroInfer and Double-P: the best clusters are read, the next ones estimated by their means."""

import numpy as np
import pytest
from tiny_models import like_qwen2, write_tiny_model

from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.ops import AUDIT
from tamis.select.clusters import Zones, estimated, zones

N_PROMPT, N_STEP = 400, 6
RETROINFER = "retroinfer:c=4,local=8,retrieve=0.1"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("zones") / "m.gguf"
    engine = Engine.load(write_tiny_model(path, like_qwen2("qwen2")), n_threads=2)
    yield engine
    engine.close()


def decoded(engine, attn, **options):
    rng = np.random.default_rng(3)
    ids = rng.integers(0, engine.hp.n_vocab, N_PROMPT + N_STEP).tolist()
    session = engine.session(n_ctx=512, attn=attn, **options)
    session.prefill(ids[:N_PROMPT])
    return session, np.array([session.decode(token) for token in ids[N_PROMPT:]])


def read(session, engine):
    return [len(row) for i in range(engine.hp.n_layer) for row in session.selected(i).positions]


def test_an_estimate_brings_the_output_nearer_at_equal_keys(engine):
    _, dense = decoded(engine, "dense")
    errors, counts = [], []
    for part in (0, 0.3, 0.9):
        session, found = decoded(engine, f"{RETROINFER},estimate={part}", audit=1)
        samples = session.audit.samples
        errors.append((samples[..., AUDIT.error] / samples[..., AUDIT.norm]).mean())
        counts.append(read(session, engine))
        assert np.isfinite(found).all()
        assert (found != dense).any()
    assert errors[2] < errors[1] < errors[0]
    assert errors[2] < 0.7 * errors[0]
    assert np.abs(np.array(counts[2]) - counts[0]).mean() < 8  # later layers see other queries


def test_a_larger_share_reads_more(engine):
    found = []
    for p1, p2 in ((0.5, 0.2), (0.9, 0.2), (0.9, 0.8)):
        session, logits = decoded(engine, f"double_p:c=4,local=8,p1={p1},p2={p2}")
        assert np.isfinite(logits).all()
        found.append(np.mean(read(session, engine)))
    assert found[0] == pytest.approx(found[1], rel=0.1)
    assert found[2] > 1.5 * found[1]


@pytest.mark.parametrize("attn", ["retroinfer:c=4,local=8,retrieve=1", "double_p:c=4,p1=1,p2=1"])
def test_reading_every_cluster_is_dense_attention(engine, attn):
    found = [decoded(engine, text)[1] for text in ("dense", attn)]
    np.testing.assert_allclose(*found, rtol=0, atol=1e-4)


def test_clusters_of_equal_keys_are_estimated_exactly():
    """Where a cluster's keys are its centroid nothing is lost by reading its mean value."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(1, 9, 40)
    logits, values = rng.standard_normal((3, 40)), rng.standard_normal((sizes.sum(), 5))
    of = np.repeat(np.arange(40), sizes)
    means = np.array([values[of == c].mean(axis=0) for c in range(40)])
    weights = np.exp(logits)[:, of]
    out, lse = estimated(logits, sizes, means)
    expected = weights @ values / weights.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(out, expected, rtol=1e-12)
    np.testing.assert_allclose(lse, np.log(weights.sum(axis=1)), rtol=1e-12)


def test_zones_by_number_and_by_share():
    logits, sizes = np.log([[4.0, 1, 2, 8]]), np.array([1, 9, 1, 0])
    exact, rest = zones(logits, sizes, Zones(False, 0.25, 0.75))
    assert (exact.tolist(), rest.tolist()) == ([1, 0, 0, 0], [0, 1, 1, 0])
    exact, rest = zones(logits, sizes, Zones(True, 0.6, 0.8))
    assert (exact.tolist(), rest.tolist()) == ([0, 1, 0, 0], [1, 0, 0, 0])


def test_a_tail_would_count_what_is_estimated_twice(engine):
    with pytest.raises(ValueError, match=r"tail\(RetroInfer\): expected a method that does not"):
        engine.session(n_ctx=512, attn="tail(retroinfer)")


def test_a_run_repeats_to_the_bit_in_memory_and_on_disk(engine, tmp_path):
    attn = f"{RETROINFER},estimate=0.3"
    _, first = decoded(engine, attn)
    _, from_file = decoded(engine, attn, kv_ram=1 << 20, kv_dir=tmp_path)
    np.testing.assert_array_equal(first, from_file)
