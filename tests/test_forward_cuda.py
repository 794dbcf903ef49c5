"""Architectures on a GPU against the NumPy float64 forward, on tiny random models made here."""

import numpy as np
import pytest
from oracle import Oracle
from test_forward_oracle import relative_error
from tiny_models import TinySpec, write_tiny_model

from tamis.engine import Engine
from tamis.jit_kernels.cuda.driver import CudaError

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("type_", ["F32", "Q8_0"])
@pytest.mark.parametrize("arch", ["gemma3", "llama", "qwen2", "qwen3"])
def test_an_architecture_is_its_float64_forward(arch, type_, tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_model(path, TinySpec(arch, type_))
    ids = np.random.default_rng(0).integers(0, 256, 100)
    expected = Oracle.from_gguf(path, kv_f16=True).logits(ids)
    try:
        engine = Engine.load(path, device="cuda")
    except CudaError as error:
        pytest.skip(str(error))
    prompt = np.concatenate(list(engine.session(n_ctx=256).logits(ids)))
    session = engine.session(n_ctx=256)
    single = np.array([session.decode(int(i)) for i in ids])
    engine.close()
    # Prompts are products of float16; single tokens have float32 sums, as on the CPU.
    assert relative_error(prompt, expected) < 1e-2
    assert relative_error(single, expected) < 1e-3


@pytest.mark.parametrize(
    "attn",
    [
        "window:sink=2,recent=20",
        "topk:k=8,sink=2,recent=6",
        "topk:k=8,sink=2,recent=6,rows=head",
        "quest:budget=24,page=4,dense=0,sink=2,recent=4",
        "quest:budget=24,page=4,dense=0,sink=2,recent=4,rows=group",
        "hip:k=8,b_k=2,l_d=0,sink=2,local=6",
        "hip:k=8,b_k=1,l_d=1,sink=2,local=6,r_m=3,span=3,rows=head",
        "cpe:s=4,k=9,sink=2,local=6",
        "cpe:s=4,k=9,sink=2,local=6,phi=1,join=0.95,rows=group",
        "cpe:s=0,sink=2,local=6",
        "tactic:c=4,sink=2,local=8,segment=16,period=16",
        "tactic:c=4,sink=2,local=8,segment=32,period=16,sample=9,rows=head",
    ],
)
def test_a_method_chooses_as_on_the_cpu(attn, tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_model(path, TinySpec("llama", "F32"))
    ids = np.random.default_rng(1).integers(0, 256, 120)
    try:
        engines = [Engine.load(path, device="cuda"), Engine.load(path)]
    except CudaError as error:
        pytest.skip(str(error))
    found = []
    for engine in engines:
        session = engine.session(n_ctx=256, attn=attn)
        found.append(np.array([session.decode(int(i)) for i in ids]))
    errors = np.abs(found[0] - found[1]).max(axis=1) / np.abs(found[1]).max()
    # A close call of Tactic's, one position more or less, may go the other way in a few steps.
    assert np.quantile(errors, 0.8 if attn.startswith("tactic") else 1) < 1e-4
    # What is remembered of positions that others take must be forgotten.
    session, other = (engines[0].session(n_ctx=256, attn=attn) for _ in range(2))
    for i in ids:
        session.decode(int(i))
    session.truncate(30)
    for i in ids[:30]:
        other.decode(int(i))
    found = []
    for each in (session, other):
        each.prefill(ids[::-1][:70])
        found.append(np.array([each.decode(int(i)) for i in ids[:9]]))
    np.testing.assert_array_equal(*found)
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    "prefill",
    [
        "window:sink=2,recent=20",
        "delta(window:sink=2,recent=20):gamma=8",
        "delta(hip:k=8,b_k=2,b_q=16,b_sq=4,l_d=1,sink=2,local=6):gamma=16,mode=recompute",
        "hip:k=8,b_k=2,b_q=16,b_sq=4,l_d=0,sink=2,local=6",
        "cpe:sink=2,local=6",
        "cpe:sink=2,local=6,kv=reuse",
    ],
)
def test_a_method_of_prompts_chooses_as_on_the_cpu(prefill, tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_model(path, TinySpec("llama", "F32", layers=4))
    ids = np.random.default_rng(1).integers(0, 256, 120)
    try:
        engines = [Engine.load(path, device="cuda"), Engine.load(path)]
    except CudaError as error:
        pytest.skip(str(error))
    found = []
    for engine in engines:
        session = engine.session(n_ctx=256, n_ubatch=32, prefill=prefill)
        session.prefill(ids[:50])
        session.truncate(20)
        found.append(np.concatenate(list(session.logits(ids[20:]))))
        engine.close()
    # Products are of float16, so that a close call of HiP may go the other way in a few rows.
    errors = np.abs(found[0] - found[1]).max(axis=1) / np.abs(found[1]).max()
    assert np.quantile(errors, 0.9) < 1e-2
