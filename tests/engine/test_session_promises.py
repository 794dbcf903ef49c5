"""What sessions refuse, and numbers that come beside an answer's text."""

import inspect
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.adapters import scales
from tamis.engine.drafting import Drafting, ModelDraft
from tamis.engine.engine import Engine
from tamis.engine.session import Session, _check_positions
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import PAGE
from tamis.sampling.base import LogitsError
from tamis.sampling.chain import SamplerParams
from tamis.vision.held import Run

IDS = [5, 9, 30, 12]
ENOUGH = ops.FEW_ROWS + 1  # rows that are multiplied as a prompt's are


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("promises") / "m.gguf"
    with Engine.load(write_tiny_model(path, TinySpec()), n_threads=1) as engine:
        yield engine


@pytest.mark.parametrize(
    "call",
    [
        lambda session, path: session.prefill(IDS),
        lambda session, path: session.decode(5),
        lambda session, path: list(session.logits(IDS)),
        lambda session, path: list(session.hidden(IDS)),
        lambda session, path: session.save(path),
        lambda session, path: session.load(path),
        lambda session, path: session.selected(0),
    ],
    ids=["prefill", "decode", "logits", "hidden", "save", "load", "selected"],
)
def test_a_closed_session_does_nothing_any_more(engine, tmp_path, call):
    session = engine.session(n_ctx=64)
    session.prefill(IDS)
    session.save(tmp_path / "s")
    session.close()
    with pytest.raises(RuntimeError, match="the session is closed: open another"):
        call(session, tmp_path / "s")


@pytest.mark.parametrize("name", ["missing", "file"])
def test_a_folder_of_the_kv_cache_must_be_there(engine, tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"kv_dir is '.*', which is no folder: make it first"):
        engine.session(n_ctx=64, kv_ram=1 << 20, kv_dir=tmp_path / name)
    with pytest.raises(ValueError, match="kv_ram and kv_dir go together"):
        engine.session(n_ctx=64, kv_ram=1 << 20)


@pytest.mark.parametrize("options", [{"attn": "window"}, {"audit": 2}])
def test_drafts_of_another_model_are_checked_by_dense_attention_only(engine, options):
    with (
        engine.session(n_ctx=64, **options) as session,
        pytest.raises(ValueError, match="leave out attn, prefill and audit"),
    ):
        Drafting(session, ModelDraft(engine, engine, 64))


@pytest.mark.parametrize("temp", [0, 0.7])
def test_the_logprob_of_a_token_is_of_all_that_there_are(engine, temp):
    """Of the logits before samplers, whether all of them or the best few were fetched."""
    with engine.session(n_ctx=64) as session, engine.session(n_ctx=64) as other:
        logits = other.prefill(IDS)
        for piece in session.generate(IDS, SamplerParams(temp=temp, seed=3), max_tokens=6):
            x = logits.astype(np.float64)
            expected = x[piece.token_id] - x.max() - np.log(np.exp(x - x.max()).sum())
            assert piece.logprob == pytest.approx(expected, abs=1e-5)
            logits = other.decode(piece.token_id)


def test_scales_are_of_adapters_by_number():
    assert scales([{"id": 1, "scale": 2}], 3) == [0, 2, 0]
    assert scales([{"id": 0, "scale": 0.5}, {"id": 2, "scale": 1}], 3) == [0.5, 0, 1]
    for i in (-1, 3, True, "0", None, 1.0):
        with pytest.raises(ValueError, match="there are 3 adapters, from 0 on"):
            scales([{"id": i, "scale": 1}], 3)
    for scale in (True, "1", None, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scale"):
            scales([{"id": 0, "scale": scale}], 3)


@pytest.mark.parametrize("attn", ["snapkv:budget=40,window=8,sink=4", "lfps:s=32,sink=4,local=8"])
def test_recall_changes_no_key(engine, attn):
    """Of several rows at once keys round otherwise than alone: a method sees them, nobody else."""
    with engine.session(n_ctx=256, attn=attn) as session:
        for i in range(150):
            session.decode(5 + i % 50)
        before = session.pages(0, -(-150 // PAGE))
        session.recall()
        np.testing.assert_array_equal(session.pages(0, -(-150 // PAGE)), before)


@pytest.mark.parametrize(
    ("call", "defaults"),
    [
        (
            Engine.load,
            {"n_threads": None, "library": None, "device": "cpu", "n_gpu_layers": -1,
             "offload_kqv": True, "rope": None, "prepare": True, "prepare_max": 64 << 30,
             "precision": "fast", "mmproj": None, "progress": None},
        ),
        (
            Engine.session,
            {"n_ctx": None, "n_ubatch": None, "attn": "dense", "prefill": "dense", "audit": 0,
             "min_mass": None, "type_k": "f16", "type_v": "f16", "kv_ram": None, "kv_dir": None,
             "kv_unit": 16, "kv_vram": None, "key_copy": None, "adapters": None, "progress": None},
        ),
        (
            Engine.memory_plan,
            {"n_ctx": None, "n_ubatch": None, "type_k": "f16", "type_v": "f16", "kv_ram": None,
             "kv_vram": None},
        ),
    ],
)  # fmt: skip
def test_what_is_not_given_is_what_the_reference_says(call, defaults):
    given = inspect.signature(call).parameters.values()
    assert {p.name: p.default for p in given if p.default is not p.empty} == defaults


def test_loading_tells_its_steps_up_to_the_last(tmp_path):
    found = []
    path = write_tiny_model(tmp_path / "m.gguf", TinySpec())
    with Engine.load(path, n_threads=1, progress=lambda *step: found.append(step)):
        pass
    assert [step for step in found if step[0] == "load"] == [("load", i, 3) for i in range(4)]


def test_closing_an_engine_closes_each_of_its_devices_once():
    closed, order = [], []
    place = [
        SimpleNamespace(
            backend=SimpleNamespace(close=lambda i=i: closed.append(("backend", i))),
            host=SimpleNamespace(close=lambda i=i: closed.append(("host", i))) if i else None,
        )
        for i in range(2)
    ]
    engine = SimpleNamespace(
        loaded=SimpleNamespace(closed=threading.Event()),
        _filling=SimpleNamespace(stop=lambda: order.append(list(closed))),
        places=place,
    )
    for _ in range(2):
        Engine.close(engine)
    assert closed == [("backend", 0), ("backend", 1), ("host", 1)]
    assert order == [[]]  # what fills tables in the background has ended before, and once
    assert engine.loaded.closed.is_set()


def read_again(session, monkeypatch):
    """The tokens that each prefill of a session's graph has, from now on."""
    found, prefill = [], session._forward.prefill

    def noted(chunk, at, *rest, **how):
        found.append((at, len(chunk)))
        return prefill(chunk, at, *rest, **how)

    monkeypatch.setattr(session._forward, "prefill", noted)
    return found


@pytest.mark.parametrize(
    ("attn", "n", "again"),
    [
        ("dense", 70, []),
        ("snapkv:budget=40,window=8,sink=4", 70, [(70 - ENOUGH, ENOUGH)]),
        ("snapkv:budget=40,window=8,sink=4", 5, [(0, 5)]),
    ],
)
def test_pages_that_come_have_the_last_tokens_read_again_where_a_method_learns_from_queries(
    engine, monkeypatch, attn, n, again
):
    ids = [5 + i % 50 for i in range(n)]
    with engine.session(n_ctx=256, attn=attn) as session:
        session.prefill(ids)
        pages = list(session.pages(0, -(-n // PAGE)))
        expected = session.decode(7).copy()
        session.truncate(0)
        found = read_again(session, monkeypatch)
        session.append_pages(ids, pages)
        assert found == again
        np.testing.assert_allclose(session.decode(7), expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.prefill(IDS),
        lambda session: session.decode(5),
        lambda session: list(session.logits(IDS)),
    ],
    ids=["prefill", "decode", "logits"],
)
def test_a_model_that_embeds_texts_has_no_logits(engine, monkeypatch, call):
    with engine.session(n_ctx=64) as session:
        arch = SimpleNamespace(is_encoder=True)
        monkeypatch.setattr(session, "_loaded", SimpleNamespace(model=SimpleNamespace(arch=arch)))
        with pytest.raises(ValueError, match="this model embeds texts, it has no logits: use hid"):
            call(session)
        monkeypatch.undo()


@pytest.mark.parametrize(("has_score_mod", "is_encoder"), [(True, False), (False, True)])
def test_scores_that_no_bound_holds_for_are_not_audited(has_score_mod, is_encoder):
    hp = SimpleNamespace(n_ctx_train=64, most_ctx=0, arch="x")
    arch = SimpleNamespace(positions=False, is_encoder=is_encoder)
    model = SimpleNamespace(hp=hp, arch=arch, has_score_mod=has_score_mod)
    _check_positions(model, 64, 0, is_dense=True)
    with pytest.raises(ValueError, match="audit is not supported for models with capped scores"):
        _check_positions(model, 64, 1, is_dense=True)


GRID = SimpleNamespace(grid=(3, 2), causal=True, values=np.zeros((6, 1)))  # of 3 columns


@pytest.mark.parametrize("first", range(6))
def test_rows_of_a_picture_in_a_grid_are_placed_by_line_and_column(first):
    """After 10 positions, 4 of which a picture took as 2: its 6 rows take 3."""
    holder = SimpleNamespace(_grids=[(5, -2)])
    run = Run(10 + first, 16, GRID, first)
    expected = [[8, 8 + at // 3, 8 + at % 3] for at in range(first, 6)]
    assert Session._places(holder, run).tolist() == expected
    holder._grids.append((16, 3 - 6))
    assert Session._places(holder, Run(16, 18)).tolist() == [[11] * 3, [12] * 3]


@pytest.mark.parametrize(("n_ubatch", "stops"), [(2, [2, 4, 6]), (4, [4, 6]), (6, [6]), (9, [6])])
def test_rows_of_a_picture_come_in_chunks_as_large_as_may_be(n_ubatch, stops):
    pictures = SimpleNamespace(runs=lambda tokens: [Run(0, 6, GRID, 0)])
    holder = SimpleNamespace(_loaded=SimpleNamespace(pictures=pictures), n_ubatch=n_ubatch)
    found = list(Session._pieces(holder, [0] * 9, 3, None))
    starts = [0, *stops[:-1]]
    assert found == [Run(3 + a, 3 + b, GRID, a) for a, b in zip(starts, stops, strict=True)]


def test_logits_that_are_not_finite_end_an_answer_with_the_error(engine, monkeypatch):
    """After the weights were looked at: damaged ones are the error where there are any."""

    def fails(*args, **options):
        yield "a"
        raise LogitsError("nan")

    checked = []
    monkeypatch.setattr("tamis.engine.generate.generate", fails)
    with engine.session(n_ctx=64) as session:
        monkeypatch.setattr(session, "check_weights", lambda: checked.append(True))
        pieces = session.generate(IDS)
        assert next(pieces) == "a"
        with pytest.raises(LogitsError, match="nan"):
            next(pieces)
    assert checked == [True]
