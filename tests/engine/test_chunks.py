import numpy as np
import pytest

from tamis.engine import session
from tamis.engine.chunks import SHORT, chunks, exact_rows, of_prompt
from tamis.engine.engine import Engine
from tamis.jit_kernels.contract import ops
from tamis.tools.random_model import SHAPES, write_random_model

FEW = ops.FEW_ROWS


@pytest.mark.parametrize("few", [0, FEW])
@pytest.mark.parametrize("most", [1, 5, FEW, 64, 512])
@pytest.mark.parametrize("n", [1, FEW, FEW + 1, SHORT, SHORT + 1, 64, 512, 513, 1300])
def test_chunks_are_all_tokens_in_order_and_none_is_too_long(n, most, few):
    found = list(of_prompt(n, most, few))
    assert [at for chunk in found for at in chunk] == list(range(n))
    assert all(1 <= len(chunk) <= most for chunk in found)


def test_the_last_few_are_a_chunk_of_their_own():
    assert list(of_prompt(800, 512, FEW)) == [
        range(512), range(512, 800 - FEW), range(800 - FEW, 800),
    ]  # fmt: skip
    assert list(of_prompt(800, 512, 0)) == [range(512), range(512, 800)]
    assert list(chunks(100, 103, 512, FEW)) == [range(100, 103)]


def test_a_short_prompt_has_no_chunk_of_more_than_a_few():
    assert max(map(len, of_prompt(SHORT, 512, FEW))) == FEW
    assert max(map(len, of_prompt(SHORT + 1, 512, FEW))) > FEW
    assert list(of_prompt(SHORT, 512, 0)) == [range(SHORT)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    small = {"n_layer": 2, "n_head": 4, "n_head_kv": 1, "n_embd": 512, "n_ff": 1024, "n_vocab": 600}
    write_random_model(path, SHAPES["llama-3.1-8b"]._replace(**small), "Q4_K")
    return path


def test_the_end_of_a_prompt_is_nearer_to_exact_logits_in_a_chunk_of_its_own(model, monkeypatch):
    ids = np.random.default_rng(3).integers(0, 600, 200)
    with Engine.load(model, precision="exact") as engine:
        assert exact_rows(engine.model) == 0
        true = engine.session(n_ctx=256).prefill(ids)
    with Engine.load(model) as engine:
        assert exact_rows(engine.model) == FEW
        apart = engine.session(n_ctx=256).prefill(ids)
        monkeypatch.setattr(session, "exact_rows", lambda model: 0)
        together = engine.session(n_ctx=256).prefill(ids)
    distance = np.linalg.norm(apart - true), np.linalg.norm(together - true)
    assert distance[0] < distance[1] / 2, distance


def test_products_of_floats_need_no_chunk_of_their_own(tmp_path):
    small = {"n_layer": 1, "n_head": 4, "n_head_kv": 1, "n_embd": 512, "n_ff": 1024, "n_vocab": 600}
    write_random_model(tmp_path / "f", SHAPES["llama-3.1-8b"]._replace(**small), "F16")
    with Engine.load(tmp_path / "f") as engine:
        assert exact_rows(engine.model) == 0
