"""The audit in the engine: what it says of methods whose answer is known, and what it checks."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from precompiled import compile_for
from tiny_models import TinySpec, like_qwen2, write_tiny_model

from tamis.cli import main
from tamis.cli.measure import compare
from tamis.cli.options.errors import UsageError
from tamis.engine.engine import Engine
from tamis.graph.audit import AuditError
from tamis.jit_kernels.contract.ops import AUDIT
from tamis.model.placement import on_two_devices
from tamis.select.base import Bound, SelectorState

METHODS = [
    "dense",
    "window:recent=16,block=1",
    "topk:k=8,sink=0,recent=1,rows=head",
    "tactic:c=4,local=8,period=16",
    "tactic:P=0.5,c=4,local=8,rows=head",
    "tactic:P=0.5,c=4,local=8,rows=joint,sample=8",
    "cpe:k=24,sink=4,local=8,s=4",
    "hip:k=32,b_k=4,l_d=0,sink=4,local=16,r_m=4",
    "quest:budget=64,page=8,dense=0,sink=4,recent=8",
    "lfps:a=0,budget=0.2,sink=0,local=1,bypass=none",
]
N_PROMPT, N_DECODE = 150, 24


@pytest.fixture(scope="module", params=["qwen2", "gemma3"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param) / "m.gguf"
    return write_tiny_model(path, like_qwen2(request.param))


@pytest.fixture(scope="module")
def engine(model):
    engine = Engine.load(model, n_threads=2)
    compile_for(engine, [{"n_ctx": 256, "n_ubatch": 64, "attn": method} for method in METHODS])
    yield engine
    engine.close()


def decoded(engine, attn, audit):
    """A session after a prompt and some steps, with the logits of these."""
    session = engine.session(n_ctx=256, n_ubatch=64, attn=attn, audit=audit)
    ids = np.random.default_rng(3).integers(0, engine.hp.n_vocab, N_PROMPT + N_DECODE).tolist()
    session.prefill(ids[:N_PROMPT])
    return session, np.stack([session.decode(token) for token in ids[N_PROMPT:]])


@pytest.mark.parametrize("attn", METHODS)
def test_the_audit_changes_nothing_and_its_numbers_agree_with_each_other(engine, attn):
    _, plain = decoded(engine, attn, 0)
    session, logits = decoded(engine, attn, 1)
    np.testing.assert_array_equal(logits, plain)
    found = session.audit.samples
    assert found.shape == (N_DECODE, engine.hp.n_layer, engine.hp.n_head, len(AUDIT))
    mass, best, kept = (found[..., i] for i in (AUDIT.mass, AUDIT.best_mass, AUDIT.n_kept))
    assert (mass > 0).all()
    assert (mass <= best + 1e-9).all()
    assert (best <= 1 + 1e-9).all()
    steps = N_PROMPT + 1 + np.arange(N_DECODE)
    for layer in range(engine.hp.n_layer):
        seen = np.minimum(steps, engine.model.window(layer) or steps)
        assert (found[:, layer, :, AUDIT.n_seen] == seen[:, None]).all()
        assert (kept[:, layer] <= seen[:, None]).all()
    # Eq. 6 of Tactic holds for attention over any set; float16 values, float32 sums.
    bound = 2 * (1 - mass) * found[..., AUDIT.max_v]
    if "lfps" not in attn:
        assert (found[..., AUDIT.error] <= bound + 1e-3 * found[..., AUDIT.max_v]).all()


def test_dense_attention_misses_nothing_and_reads_what_it_should(engine):
    session, _ = decoded(engine, "dense", 1)
    total = session.audit.total()
    assert total.n_kept == total.n_seen
    assert total.mass == total.recall == pytest.approx(1)
    assert total.error < 1e-4
    attend, select, dense = session.audit.n_bytes()
    assert select == 0
    # Layers with a window read whole blocks of 64.
    assert attend == dense if not engine.hp.sliding_window else attend >= dense


def test_the_exact_best_are_found_to_be_the_best(engine):
    session, _ = decoded(engine, "topk:k=8,sink=0,recent=1,rows=head", 1)
    full = [i for i in range(engine.hp.n_layer) if not engine.model.window(i)]
    found = session.audit.samples[:, full]
    assert (found[..., AUDIT.n_kept] == 9).all()
    # The last position always takes part: at most one of the nine best gives way to it.
    assert (found[..., AUDIT.recall] >= 8 / 9 - 1e-9).all()
    assert found[..., AUDIT.recall].mean() < 1


def test_every_nth_step_is_audited_and_groups_cover_all_heads(engine):
    session, _ = decoded(engine, METHODS[1], 5)
    audit = session.audit
    assert audit.n_step == N_DECODE // 5
    groups = audit.groups()
    assert len(groups) == engine.hp.n_layer * engine.hp.n_head_kv
    assert np.mean([g.mass for g in groups]) == pytest.approx(audit.total().mass)
    audit.reset()
    assert audit.n_step == 0
    with pytest.raises(ValueError, match="no step was audited"):
        audit.total()


@pytest.mark.parametrize(
    ("attn", "names"),
    [
        (METHODS[2], ["at most (int8", "at least (int8"]),
        (METHODS[3], ["Eq. 6"]),
        (METHODS[6], ["Eq. 24", "Eq. 14", "at most (int8", "at least (int8"]),
    ],
)
def test_a_papers_bounds_are_reported(engine, attn, names):
    session, _ = decoded(engine, attn, 1)
    bounds = session.audit.bounds()
    assert all(name in bound.name for name, bound in zip(names, bounds, strict=True))
    assert all(bound.tightest <= 1 for bound in bounds if bound.holds_always)
    assert all(bound.measured < bound.allowed for bound in bounds)


@pytest.mark.parametrize("measured", [1.5, np.nan])
def test_a_bound_that_does_not_hold_is_an_error_that_says_where(engine, monkeypatch, measured):
    """The third step, in its second layer, at head 1; the session is as it was before the step."""
    n_head, calls = engine.hp.n_head, []

    def bounds(self, layer, report):
        calls.append(report)
        broken = len(calls) == 2 * engine.hp.n_layer + 2
        heads = np.where(broken & (np.arange(n_head) == 1), measured, 0.5)
        return [Bound("promise", heads, np.ones(n_head), rounding=0.1)]

    monkeypatch.setattr(SelectorState, "bounds", bounds)
    session = engine.session(n_ctx=256, audit=1)
    session.prefill(range(10))
    session.decode(1)
    session.decode(1)
    with pytest.raises(AuditError, match="promise does not hold at layer 1, head 1, step 12: "):
        session.decode(1)
    assert session.n_past == 12
    session.decode(1)


@pytest.mark.parametrize("attn", METHODS)
def test_a_copy_decodes_as_a_session_that_read_the_prompt(engine, attn):
    """One dense prefill serves all methods, those that learn from its queries included."""
    ids = np.random.default_rng(4).integers(0, engine.hp.n_vocab, N_PROMPT).tolist()
    base, own, copy = (
        engine.session(n_ctx=256, n_ubatch=64, attn=a) for a in ("dense", attn, attn)
    )
    base.prefill(ids)
    own.prefill(ids)
    copy.prefill(ids[::-1])
    copy.decode(1)
    for again in range(2):
        copy.copy(base) if again == 0 else (copy.truncate(N_PROMPT), copy.recall())
        first = [copy.decode(token) for token in (5, 6, 7)]
        if again == 0:
            np.testing.assert_array_equal(first, [own.decode(token) for token in (5, 6, 7)])
            expected = first
    # Going back and calling the queries to mind again gives the same once more.
    np.testing.assert_array_equal(first, expected)


# --- the command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "t"
    path.write_text("the sieve keeps what matters and lets the rest fall through. " * 30)
    return path


def test_run_shows_the_audit_beside_the_answer(model, capsys):
    line = ["run", "-m", str(model), "--raw", "-p", "hello world", "-n", "9", "--audit", "2"]
    assert main([*line, "--attn", METHODS[1]]) == 0
    err = capsys.readouterr().err
    assert "| all" in err
    assert "steps audited" in err
    assert main([*line, "--attn", METHODS[6], "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)["audit"]
    assert found["steps"] >= 1
    assert {"mass", "mass_p5", "recall", "error", "tokens", "mb_selection"} <= set(found)
    assert len(found["bounds"]) == 4
    assert err == ""


def test_bench_compares_methods_with_dense_attention(model, text, capsys, tmp_path):
    line = ["bench", "-m", str(model), "-t", "1", "-n", "4", "-r", "2", "-d", "100", "--json"]
    line += ["--attn", "dense", "--attn", METHODS[6], "--text", str(text), "--audit", "2"]
    assert main(line) == 0
    dense, cpe = map(json.loads, capsys.readouterr().out.splitlines())
    assert dense["depth"] == cpe["depth"] == 100
    assert dense["bytes_ratio"] == 1
    assert dense["mass"] == 1
    assert cpe["ratio_min"] <= cpe["ratio"] <= cpe["ratio_max"]
    assert cpe["tokens"] < dense["tokens"] == pytest.approx(103, abs=2) or "gemma" in str(model)
    assert cpe["mass"] < 1


def test_methods_are_compared_by_the_time_of_one_device():
    cpu, gpu = (SimpleNamespace(name=name, clock=1e9) for name in ("cpu", "cuda"))
    cpu.sides, gpu.sides = (cpu, cpu), (gpu, gpu)
    assert (
        compare._clock(SimpleNamespace(places=on_two_devices(cpu, gpu, 4, -1), backend=gpu)) == 1e9
    )
    with pytest.raises(UsageError, match="this model is on cpu and cuda: leave out -nkvo"):
        compare._clock(SimpleNamespace(places=on_two_devices(cpu, gpu, 4, 2), backend=gpu))


def test_perplexity_of_decoded_text_with_kl(model, text, capsys, tmp_path):
    line = ["perplexity", "-m", str(model), "-f", str(text), "-n", "8", "--json"]
    line += ["--attn", "topk:k=512", "--attn", METHODS[1], "--audit", "2"]
    assert main([*line, "-d", "100"]) == 0
    dense, every, window = map(json.loads, capsys.readouterr().out.splitlines())
    assert every["perplexity"] == pytest.approx(dense["perplexity"], rel=1e-3)
    assert every["kl"] < 1e-5
    assert every["same_top"] == 1
    assert window["kl"] > 1e-4
    assert window["mass"] < every["mass"] == 1
    # The same from a saved state.
    session = Engine.load(model).session(n_ctx=256)
    ids = session._loaded.tokenizer.encode(text.read_text())
    session.prefill(ids[:100])
    session.save(tmp_path / "s")
    assert main([*line, "-c", "256", "--session", str(tmp_path / "s")]) == 0
    *_, again = map(json.loads, capsys.readouterr().out.splitlines())
    assert again["perplexity"] == window["perplexity"]
    (tmp_path / "other").write_text("nothing of that. " * 50)
    line[line.index(str(text))] = str(tmp_path / "other")
    assert main([*line, "-c", "256", "--session", str(tmp_path / "s")]) == 2
    assert "does not hold the beginning of this text" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "perplexity -f x --attn dense --attn window",
        "perplexity -f x --audit 3",
        "bench --attn window --attn quest --profile",
        "bench --attn window --attn nonsense",
    ],
)
def test_what_makes_no_sense_is_a_usage_error(model, capsys, line):
    assert main([*line.split(), "-m", str(model)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- what ops report of their work: bytes that they read and operations, by hand ----------------
# One decode step at POS of a model with two layers, four heads and two KV heads of 16 elements in
# float16. The codes of keys are half as large as the keys.

N_HEAD, N_KV, DIM, POS = 4, 2, 16, 64
KEY = 2 * DIM  # bytes


@pytest.fixture(scope="module")
def costed(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("costs") / "m.gguf", TinySpec())
    engine = Engine.load(path, n_threads=1)
    hp = engine.hp
    assert (hp.n_layer, hp.n_head, hp.n_head_kv, hp.head_dim) == (2, N_HEAD, N_KV, DIM)
    yield engine
    engine.close()


def costs(costed, method, label, n_prompt=POS):
    """Bytes and operations of each call of an op in one decode step."""
    with costed.session(n_ctx=256, attn=method) as session:
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


def test_hshare_scores_what_is_between_its_sinks_and_recent_keys(costed):
    method = "hshare:budget=16,sink=2,recent=4,layers=1,heads=1,period=1"
    assert costs(costed, method, "score_codes") == [scored(POS + 1 - 2 - 4)] * 2


def test_h2o_adds_up_the_kept_keys_of_every_row(costed):
    budget = 16
    found = costs(costed, f"h2o:budget={budget},recent=0.5,sink=2", "column_add")
    assert found == [(KEY * budget * N_KV, 2 * DIM * budget * N_HEAD)] * 2  # a layer each


def test_h2o_adds_up_all_keys_where_the_budget_is_not_reached(costed):
    n_prompt = 9
    found = costs(costed, "h2o:budget=40,recent=0.5,sink=2", "column_add", n_prompt)
    n_key = n_prompt + 1
    assert found == [(KEY * n_key * N_KV, 2 * DIM * n_key * N_HEAD)] * 2


def test_hip_reads_sinks_window_and_the_means_of_its_blocks(costed):
    sink, local, b_k = 4, 16, 2
    method = f"hip:k=16,b_k={b_k},b_q=64,b_sq=8,l_d=0,sink={sink},local={local},r_m=1,rows=group"
    n_near, n_block = sink + local, (POS + 1 - local) // b_k
    mean = DIM + 8  # bytes: an int8 a dimension, and two float32
    n_bytes = N_KV * (n_near * KEY + n_block * mean)
    assert (
        costs(costed, method, "hip_search")
        == [(n_bytes, 2 * (n_near + n_block) * DIM * N_HEAD)] * 2
    )


def test_metered_weighs_its_samples(costed):
    method = "metered(topk:k=8,sink=2,recent=8):samples=16"
    assert costs(costed, method, "meter_weigh") == [(16 * KEY * N_KV, 0)] * 2
    middle = POS + 1 - 2 - 8
    assert costs(costed, method, "score_codes") == [scored(middle)] * 2


def test_cpe_scores_what_no_layer_drops(costed):
    sink, local, phi = 16, 16, 0.7
    method = f"cpe:s=16,sink={sink},local={local},k=4,phi={phi},alpha=1,psi=1,rows=group"
    last = max(sink, math.floor((1 - phi) * POS))
    expected = [scored(POS + 1 - local - start) for start in (sink, last)]
    assert costs(costed, method, "score_codes") == expected
