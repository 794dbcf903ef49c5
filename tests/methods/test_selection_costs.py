"""What a decode step's ops report of their work: bytes that they read and operations, by hand.

`tamis bench` and the audit compare these with the memory's bandwidth. One step at POS of a model
with two layers, four heads and two KV heads of 16 elements in float16. The codes of keys are half
as large as the keys.
"""

import math

import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine

N_HEAD, N_KV, DIM, POS = 4, 2, 16, 64
KEY = 2 * DIM  # bytes


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("costs") / "m.gguf", TinySpec())
    engine = Engine.load(path, n_threads=1)
    hp = engine.hp
    assert (hp.n_layer, hp.n_head, hp.n_head_kv, hp.head_dim) == (2, N_HEAD, N_KV, DIM)
    yield engine
    engine.close()


def costs(engine, method, label, n_prompt=POS):
    """Bytes and operations of each call of an op in one decode step."""
    with engine.session(n_ctx=256, attn=method) as session:
        session.prefill([5 + i % 50 for i in range(n_prompt)])
        session.forward.start_costs()
        session.decode(7)
        return [
            (cost.n_bytes, cost.n_flop)
            for cost in session.forward.take_costs()
            if cost.label == label
        ]


def scored(n_keys):
    """Codes of keys between sinks and window, read once a KV head, for all heads."""
    return n_keys * KEY * N_KV // 2, 2 * n_keys * DIM * N_HEAD


def test_hshare_scores_what_is_between_its_sinks_and_recent_keys(engine):
    method = "hshare:budget=16,sink=2,recent=4,layers=1,heads=1,period=1"
    assert costs(engine, method, "score_codes") == [scored(POS + 1 - 2 - 4)] * 2


def test_h2o_adds_up_the_kept_keys_of_every_row(engine):
    budget = 16
    found = costs(engine, f"h2o:budget={budget},recent=0.5,sink=2", "column_add")
    assert found == [(KEY * budget * N_KV, 2 * DIM * budget * N_HEAD)] * 2  # a layer each


def test_h2o_adds_up_all_keys_where_the_budget_is_not_reached(engine):
    n_prompt = 9
    found = costs(engine, "h2o:budget=40,recent=0.5,sink=2", "column_add", n_prompt)
    n_key = n_prompt + 1
    assert found == [(KEY * n_key * N_KV, 2 * DIM * n_key * N_HEAD)] * 2


def test_hip_reads_sinks_window_and_the_means_of_its_blocks(engine):
    sink, local, b_k = 4, 16, 2
    method = f"hip:k=16,b_k={b_k},b_q=64,b_sq=8,l_d=0,sink={sink},local={local},r_m=1,rows=group"
    n_near, n_block = sink + local, (POS + 1 - local) // b_k
    mean = DIM + 8  # bytes: an int8 a dimension, and two float32
    n_bytes = N_KV * (n_near * KEY + n_block * mean)
    assert (
        costs(engine, method, "hip_search")
        == [(n_bytes, 2 * (n_near + n_block) * DIM * N_HEAD)] * 2
    )


def test_metered_weighs_its_samples(engine):
    method = "metered(topk:k=8,sink=2,recent=8):samples=16"
    assert costs(engine, method, "meter_weigh") == [(16 * KEY * N_KV, 0)] * 2
    middle = POS + 1 - 2 - 8
    assert costs(engine, method, "score_codes") == [scored(middle)] * 2


def test_cpe_scores_what_no_layer_drops(engine):
    sink, local, phi = 16, 16, 0.7
    method = f"cpe:s=16,sink={sink},local={local},k=4,phi={phi},alpha=1,psi=1,rows=group"
    last = max(sink, math.floor((1 - phi) * POS))
    expected = [scored(POS + 1 - local - start) for start in (sink, last)]
    assert costs(engine, method, "score_codes") == expected
