"""A Batch gives every session what it would get alone."""

import numpy as np
import pytest
from kit_models import write_kit_model
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.batch import Batch
from tamis.engine.engine import Engine
from tamis.engine.session import ContextError
from tamis.jit_kernels.contract.ops import FEW_ROWS

# Products of one row and of several are summed in another order, whose last bit may round a key or
# a value to the next float16 (2^-11 of it); logits here are up to 6.
ROUNDING = 1e-3


@pytest.fixture(scope="module", params=["gemma3", "qwen3moe"])
def engine(request, tmp_path_factory):
    spec = TinySpec(request.param)
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", spec)
    engine = Engine.load(path, n_threads=2)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def exact_engine(engine):
    engine = Engine.load(engine.path, n_threads=2, precision="exact")
    yield engine
    engine.close()


def tokens(engine, seed, n):
    return np.random.default_rng(seed).integers(0, engine.hp.n_vocab, n).tolist()


def alone(engine, ids, n_prompt, **how):
    session = engine.session(n_ctx=256, **how)
    session.prefill(ids[:n_prompt])
    return [session.decode(token) for token in ids[n_prompt:]]


def together(batch, sessions, ids, n_prompts, n_step, active):
    """Logits of each session's steps; in step i those of active(i) take part."""
    found = [[] for _ in sessions]
    for session, own, n in zip(sessions, ids, n_prompts, strict=True):
        session.prefill(own[:n])
    for step in range(n_step):
        now = [i for i in active(step) if sessions[i].n_past < len(ids[i])]
        logits = batch.step({sessions[i]: ids[i][sessions[i].n_past] for i in now})
        for i in now:
            found[i].append(logits[sessions[i]])
    return found


# Its first step is another Program (h2o); its choices are shared by steps (hshare).
METHODS = (
    "dense",
    "quest:budget=64,page=8,dense=0,sink=4,recent=8",
    "topk:k=24,sink=4,recent=8",
    "h2o:budget=40,sink=4,s=8",  # its first step is another Program
    "hshare:budget=40,sink=4,recent=8",  # every other step is
)


@pytest.mark.parametrize("engine", ["gemma3"], indirect=True)
def test_sessions_of_any_methods_get_their_own_answers(engine):
    n_prompts = [3, 40, 17, 70, 90]
    ids = [tokens(engine, i, n + 20) for i, n in enumerate(n_prompts)]
    how = [{"attn": attn} for attn in METHODS]
    expected = [
        alone(engine, *each[:2], **each[2]) for each in zip(ids, n_prompts, how, strict=True)
    ]
    sessions = [engine.session(n_ctx=256, **each) for each in how]

    def active(step):  # they come and go, and one is alone for some steps
        return [i for i in range(5) if (step + i) % 6 and (step // 8 != 1 or i == 2)]

    found = together(Batch(engine), sessions, ids, n_prompts, 60, active)
    for own, rows in zip(expected, found, strict=True):
        np.testing.assert_allclose(rows, own, atol=ROUNDING)


def test_more_sessions_than_rows_run_in_groups(exact_engine):
    n, engine = FEW_ROWS + 2, exact_engine
    ids = [tokens(engine, 100 + i, 9) for i in range(n)]
    sessions = [engine.session(n_ctx=64) for _ in range(n)]
    found = together(Batch(engine), sessions, ids, [5] * n, 4, lambda step: range(n))
    for own, rows in zip(ids, found, strict=True):
        np.testing.assert_allclose(rows, alone(engine, own, 5), atol=ROUNDING)


def test_more_than_four_rows_are_short_and_do_not_depend_on_each_other(tmp_path):
    path = write_tiny_model(tmp_path / "tiny.gguf", TinySpec("llama", type_="Q8_0"))
    engine = Engine.load(path, n_threads=2)
    ids = [tokens(engine, 200 + i, 9) for i in range(9)]
    found = {}
    for n in (4, 5, 9):
        sessions = [engine.session(n_ctx=64) for _ in range(n)]
        every = range(n)
        found[n] = together(
            Batch(engine), sessions, ids[:n], [5] * n, 4, lambda _, rows=every: rows
        )
    np.testing.assert_array_equal(found[5], found[9][:5])
    for own, exact, short in zip(ids, found[4], found[9], strict=False):
        expected = alone(engine, own, 5)
        np.testing.assert_allclose(exact, expected, atol=ROUNDING)
        error = np.abs(np.array(short) - expected).max()
        # A 254th of the largest of 32 elements, in each of a few products in turn.
        assert ROUNDING / 100 < error < 0.05 * np.abs(expected).max()
    engine.close()


def test_a_step_that_fails_changes_no_session(engine):
    ids, batch = tokens(engine, 50, 40), Batch(engine)
    sessions = [engine.session(n_ctx=n) for n in (64, 20, 64)]
    for session in sessions:
        session.prefill(ids[:20])
    with pytest.raises(ContextError, match="n_ctx is 20"):
        batch.step(dict.fromkeys(sessions, ids[20]))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        batch.step({sessions[0]: ids[20], sessions[2]: engine.hp.n_vocab})
    assert [session.n_past for session in sessions] == [20, 20, 20]
    found = batch.step({sessions[0]: ids[20], sessions[2]: ids[20]})
    for row in found.values():
        np.testing.assert_allclose(row, alone(engine, ids[:21], 20)[0], atol=ROUNDING)


@pytest.mark.parametrize("engine", ["gemma3"], indirect=True)
def test_an_audited_session_is_stepped_alone_and_audited(engine):
    ids = tokens(engine, 60, 30)
    attn = "window:sink=4,recent=16,block=16"
    plain, audited = (engine.session(n_ctx=64, attn=attn, audit=n) for n in (0, 1))
    found = together(Batch(engine), [plain, audited], [ids] * 2, [20, 20], 10, lambda step: (0, 1))
    expected = alone(engine, ids, 20, attn=attn)
    np.testing.assert_array_equal(found[1], expected)
    np.testing.assert_array_equal(found[0], expected)  # it was alone then
    assert audited.audit.n_step == 10


def test_parts_of_rows_that_move_are_known_by_their_addresses(tmp_path):
    """A GPU finds its copies of arrays by these."""
    engine = Engine.load(write_kit_model("plamo2-dense", tmp_path / "m.gguf"), n_threads=1)
    batch, sessions = Batch(engine), [engine.session(n_ctx=64) for _ in range(2)]
    batch.step(dict.fromkeys(sessions, 5))
    (rows,) = batch._of.values()
    placed = [segments.linked.program for own in rows._placed.values() for segments in own.values()]
    assert len(placed) == 2
    for program in placed:
        for call in program.calls:
            values = dict(zip(call.spec.op.fields, call.values, strict=True))
            missing = {values[name] for name in call.spec.op.addresses} - {0, *program.arrays}
            assert not missing, call.spec
    engine.close()


@pytest.mark.parametrize("n", [1, 5, None])
def test_the_best_of_each_rows_logits(engine, n):
    ids = [tokens(engine, 70 + i, 12) for i in range(3)]
    pairs = [[engine.session(n_ctx=64) for _ in ids] for _ in range(2)]
    for sessions in pairs:
        for session, own in zip(sessions, ids, strict=True):
            session.prefill(own)
    batches = [Batch(engine) for _ in pairs]
    for token in range(4):
        every, best = (dict.fromkeys(sessions[: 2 + token % 2], token) for sessions in pairs)
        rows, found = batches[0].step(every), batches[1].step_best(best, n)
        for whole, other in zip(every, best, strict=True):
            row, few = rows[whole], found[other]
            if n is None:
                np.testing.assert_array_equal(few, row)
                continue
            order = np.argsort(-row, kind="stable")[:n]
            np.testing.assert_array_equal(few.ids, order)
            np.testing.assert_array_equal(few.logits, row[order])
            top = row.max().astype(np.float64)
            assert abs(few.log_sum - top - np.log(np.exp(row - top).sum())) < 1e-4


@pytest.mark.parametrize("wrong", ["3", 3.0, None, [3]])
def test_a_step_takes_a_token_id_for_each_session(engine, wrong):
    session = engine.session(n_ctx=64)
    session.prefill([3, 4])
    batch = Batch(engine)
    with pytest.raises(TypeError, match="expected a token id for each session"):
        batch.step({session: wrong})
    with pytest.raises(TypeError, match="tokens has 7, expected a token id for each session"):
        batch.step({7: 3})
    assert session.n_past == 2
    batch.step({session: np.int64(3)})
    assert session.n_past == 3
