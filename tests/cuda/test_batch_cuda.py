"""A Batch on a GPU gives every session what it would get alone."""

import numpy as np
import pytest
from distances import relative_error
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.batch import Batch
from tamis.engine.engine import Engine
from tamis.jit_kernels.cuda.runtime.driver import CudaError

pytestmark = pytest.mark.gpu

FEW = 1e-4  # up to 4 rows of float weights: products have float32 sums in another order
SOME = 1e-2  # more, or quantised weights: products are those of prompts, of float16
METHODS = [
    "window:sink=2,recent=20",
    "topk:k=8,sink=2,recent=6",
    "quest:budget=24,page=4,dense=0,sink=2,recent=4",
    "hip:k=8,b_k=2,l_d=0,sink=2,local=6",
    "cpe:s=4,k=9,sink=2,local=6",
    "lfps:s=8,sink=2,local=8,budget=0.1",
    "tactic:c=4,sink=2,local=8,segment=32,period=16",
]


@pytest.fixture
def opened(tmp_path):
    """opened(arch, type_): an engine on the GPU."""
    engines = []

    def load(arch, type_="F32", **spec):
        path = write_tiny_model(tmp_path / "m.gguf", TinySpec(arch, type_, **spec))
        try:
            engines.append(Engine.load(path, device="cuda"))
        except CudaError as error:
            pytest.skip(str(error))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


def tokens(seed, n):
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def alone(engine, ids, n_prompt, **how):
    session = engine.session(n_ctx=256, **how)
    session.prefill(ids[:n_prompt])
    return np.array([session.decode(token) for token in ids[n_prompt:]])


def together(engine, ids, n_prompts, active, **how):
    """Logits of each session's steps; in step i those of active(i) take part, as far as they go."""
    batch, found = Batch(engine), [[] for _ in ids]
    sessions = [engine.session(n_ctx=256, **how) for _ in ids]
    for session, own, n in zip(sessions, ids, n_prompts, strict=True):
        session.prefill(own[:n])
    step = 0
    while any(s.n_past < len(own) for s, own in zip(sessions, ids, strict=True)):
        now = [i for i in active(step) if sessions[i].n_past < len(ids[i])]
        logits = batch.step({sessions[i]: ids[i][sessions[i].n_past] for i in now})
        for i in now:
            found[i].append(logits[sessions[i]])
        step += 1
    return [np.array(rows) for rows in found]


@pytest.mark.parametrize("attn", METHODS)
def test_rows_choose_keys_as_they_do_alone(attn, opened):
    engine, n_prompts = opened("llama"), [3, 70, 40, 90]
    ids = [tokens(5 + i, n + 24) for i, n in enumerate(n_prompts)]
    found = together(engine, ids, n_prompts, lambda step: range(4), attn=attn)
    for own, n, rows in zip(ids, n_prompts, found, strict=True):
        expected = alone(engine, own, n, attn=attn)
        errors = np.abs(rows - expected).max(axis=1) / np.abs(expected).max()
        # A close call may go the other way in a step.
        assert np.quantile(errors, 0.8 if attn.startswith("tactic") else 0.95) < FEW


@pytest.mark.parametrize("type_", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("kv", ["f16", "q8_0"])
def test_sessions_that_come_and_go_get_their_own_answers(type_, kv, opened):
    engine = opened("qwen3", type_, embd=256) if type_ == "Q4_K" else opened("qwen3", type_)
    how = {"type_k": kv, "type_v": kv}
    n_prompts = [3, 40, 17, 70, 90, 5, 64, 63, 1, 20, 33]
    ids = [tokens(i, n + 20) for i, n in enumerate(n_prompts)]

    def active(step):  # from 1 to 11 rows
        return [i for i in range(11) if (step + i) % 7 < 1 + step % 7]

    found = together(engine, ids, n_prompts, active, **how)
    for own, n, rows in zip(ids, n_prompts, found, strict=True):
        assert relative_error(rows, alone(engine, own, n, **how)) < SOME


@pytest.mark.parametrize("arch", ["gemma3", "qwen3moe", "qwen2"])
def test_layers_of_other_kinds(arch, opened):
    engine, n_prompts = opened(arch, "Q8_0"), [9, 40, 17, 70, 30]
    ids = [tokens(20 + i, n + 12) for i, n in enumerate(n_prompts)]
    for n in (3, 5):
        found = together(engine, ids[:n], n_prompts[:n], lambda step, n=n: range(n))
        for own, n_prompt, rows in zip(ids, n_prompts, found, strict=False):
            assert relative_error(rows, alone(engine, own, n_prompt)) < SOME


def test_rows_are_the_same_whatever_rows_there_are_beside_them(opened):
    engine, n_prompts = opened("llama", "Q8_0"), [30 + i for i in range(40)]
    ids = [tokens(i, n + 6) for i, n in enumerate(n_prompts)]
    some = together(engine, ids[:9], n_prompts[:9], lambda step: range(9))
    most = together(engine, ids, n_prompts, lambda step: range(40))  # 32 and 8
    for one, other in zip(some, most, strict=False):
        np.testing.assert_array_equal(one, other)
