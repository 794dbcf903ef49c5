"""What a method keeps, by the sums of ATTEND: that of the audit, which has an oracle of its own."""

import numpy as np
import pytest
from tiny_models import like_qwen2, write_tiny_model

from tamis.auto.attention_mass import Weighed
from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.ops import AUDIT
from tamis.select.notation import parse_method

N_STEP = 9
METHODS = [
    "dense", "window:recent=32", "topk:k=24", "topk:k=24,rows=head", "lfps",
    "hip:k=32,r_m=4,l_d=0,local=8", "quest:budget=64,page=8,dense=0,recent=8",
    "tactic:c=4,period=4,local=8", "cpe:k=24,local=8", "snapkv:budget=40",
    "magicpig:K=3,L=6,dense=0,recent=8", "hshare:budget=40,recent=8", "window:recent=32@last",
    "window:recent=32@last+topk:k=24@0",
]  # fmt: skip


@pytest.fixture(scope="module", params=["qwen2", "gemma3"])
def engine(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "m.gguf"
    engine = Engine.load(write_tiny_model(path, like_qwen2(request.param)), n_threads=2)
    yield engine
    engine.close()


def decoded(engine, attn, audit=0, take=lambda pos: None):
    session = engine.session(n_ctx=320, attn=attn, audit=audit)
    ids = np.random.default_rng(3).integers(0, engine.hp.n_vocab, 200 + N_STEP).tolist()
    session.prefill(ids[:200])
    logits = []
    for token in ids[200:]:
        logits.append(session.decode(token))
        take(session.n_past - 1)
    return session, logits


@pytest.mark.parametrize("attn", METHODS)
def test_mass_and_bytes_are_those_of_the_audit(engine, attn):
    full = [i for i in range(engine.hp.n_layer) if not engine.model.window(i)]
    attn = attn.replace("@last", f"@{full[-1]}")
    weighed = Weighed(parse_method(attn))
    _, logits = decoded(engine, weighed, take=lambda pos: weighed.take(engine.places, pos))
    session, plain = decoded(engine, attn, audit=1)
    np.testing.assert_array_equal(logits, plain)
    mass = session.audit.samples[..., AUDIT.mass].mean(axis=(0, 2))
    for layer in range(engine.hp.n_layer):
        # A float32 logarithm of a sum up to 200 is known to 1e-6.
        assert weighed.of([layer]).mass == pytest.approx(mass[layer], abs=1e-5)
    found = weighed.of(range(engine.hp.n_layer))
    assert found.mass == pytest.approx(mass.mean(), abs=1e-5)
    assert (mass.min() < 0.999) == (attn != "dense")
    attended, selecting, dense = session.audit.n_bytes()
    if not engine.hp.sliding_window:  # of which ATTEND reads whole blocks, the audit single keys
        assert found.share == pytest.approx((attended + selecting) / dense, rel=1e-6)
