"""`tamis eval` on small models: what is read once, what is fair, what is run again."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

import tamis
from tamis import NumpySelector
from tamis.cli import main
from tamis.cli.commands.eval import _Clock
from tamis.engine.engine import Engine
from tamis.engine.session import Session
from tamis.evals import predict
from tamis.evals.identity import identity
from tamis.evals.plan import Settings, cells, jobs, missing, origin_of
from tamis.evals.run import Evaluation
from tamis.evals.store import Store, read_results
from tamis.model.hparams import RopeScaling
from tamis.select.notation import parse_method

TEXT = "the cat and the other thing in the water. " * 60
SOME = Settings(
    tasks=("niah_single_1",),
    lengths=(496,),
    samples=1,
    attn=("window:recent=64", "topk:k=32"),
    raw=True,
    n_predict=16,
    audit=2,
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec())
    engine = Engine.load(path, n_threads=1)
    yield engine
    engine.close()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """What is prefilled and decoded, in order."""
    found: list[tuple[str, list[int]]] = []
    prefill, decode = Session.prefill, Session.decode

    def spied_prefill(self: Session, ids: Any, progress: Any = None) -> np.ndarray:
        found.append(("prefill", list(ids)))
        return prefill(self, ids, progress)

    def spied_decode(self: Session, token: int) -> np.ndarray:
        found.append(("decode", [token]))
        return decode(self, token)

    monkeypatch.setattr(Session, "prefill", spied_prefill)
    monkeypatch.setattr(Session, "decode", spied_decode)
    return found


def evaluate(engine: Engine, settings: Settings, folder: Path) -> list[dict[str, Any]]:
    store = Store(folder)
    try:
        todo = missing(settings, origin_of(engine, TEXT), store)
        evaluation = Evaluation(engine, settings, store, lambda *_: None)
        return list(evaluation.run(todo, TEXT))
    finally:
        store.close()


def changed(**changes: Any) -> Settings:
    return Settings(**{**SOME.__dict__, **changes})


def test_a_prompt_is_read_once_for_all_methods(engine, tmp_path, calls):
    rows = evaluate(engine, SOME, tmp_path)
    assert [row["label"] for row in rows] == ["dense", "window:recent=64", "topk:k=32"]
    (prompt,) = [ids for what, ids in calls if what == "prefill"]
    assert {row["n_read"] for row in rows} == {len(prompt)}
    assert len(prompt) + 1 + 128 <= 496
    assert read_results(tmp_path) == rows


def test_the_last_token_of_a_prompt_is_decoded_by_each_method(engine, tmp_path, calls):
    """Dense attention's logits after the prompt would be the first word of every answer."""
    evaluate(engine, SOME, tmp_path)
    (prompt,) = [ids for what, ids in calls if what == "prefill"]
    first = calls[1][1][0]
    assert engine.tokenizer.decode([*prompt, first]).endswith("told in the text is")
    assert sum(what == "decode" and ids == [first] for what, ids in calls) >= 3


def test_in_fair_mode_the_question_is_decoded_after_the_context(engine, tmp_path, calls):
    rows = evaluate(engine, changed(fair=True, samples=2), tmp_path)
    contexts = [engine.tokenizer.decode(ids) for what, ids in calls if what == "prefill"]
    assert len(contexts) == 2
    for context in contexts:
        assert "Here nothing else happens." in context
        assert "Which secret" not in context
    decoded = engine.tokenizer.decode([ids[0] for what, ids in calls if what == "decode"])
    assert decoded.count("Which secret number did the text above tell for") == len(rows) == 6
    assert all(row["fair"] for row in rows)


def test_each_way_of_reading_prompts_reads_once(engine, tmp_path, calls):
    settings = changed(prefill=("window:recent=128",), attn=("topk:k=32",))
    rows = evaluate(engine, settings, tmp_path)
    assert [row["label"] for row in rows] == [
        "dense",  # always there, to compare with
        "dense after window:recent=128",
        "topk:k=32 after window:recent=128",
    ]
    assert sum(what == "prefill" for what, _ in calls) == 2


def test_what_is_there_is_not_run_again(engine, tmp_path, calls):
    rows = evaluate(engine, SOME, tmp_path)
    calls.clear()
    assert evaluate(engine, SOME, tmp_path) == []
    assert calls == []
    more = changed(attn=("topk:k=32", "topk:k=48"), lengths=(496, 480))
    added = evaluate(engine, more, tmp_path)
    assert [(row["length"], row["label"]) for row in added] == [
        (496, "topk:k=48"),
        (480, "dense"),
        (480, "topk:k=32"),
        (480, "topk:k=48"),
    ]
    assert read_results(tmp_path) == rows + added


def test_every_setting_that_an_answer_depends_on_is_in_its_key(engine):
    origin = origin_of(engine, TEXT)

    def keys(settings: Settings, origin: dict[str, Any] = origin) -> set[str]:
        return {cell.key for job in jobs(settings) for cell in cells(settings, origin, job)}

    for change in (
        {"lengths": (480,)},
        {"seed": 1},
        {"fair": True},
        {"raw": False},
        {"type_k": "q8_0"},
        {"tasks": ("passkey",)},
        {"rope": RopeScaling("yarn", 2)},
    ):
        assert not keys(SOME) & keys(changed(**change))
    assert keys(SOME) == keys(changed(audit=3, n_predict=8))
    for name in ("digest", "device", "version"):
        assert not keys(SOME) & keys(SOME, origin | {name: "another"})
    text = changed(tasks=("text",))
    assert not keys(text) & keys(changed(tasks=("text",), n_predict=8))
    assert not keys(text) & keys(text, origin | {"text_digest": "another"})


def test_methods_that_are_spelled_differently_but_equal_are_run_once():
    settings = changed(attn=("topk:k=512", "topk", "dense"))
    origin = {"text_digest": ""}
    (job,) = jobs(settings)
    assert [cell.attn for cell in cells(settings, origin, job)] == ["dense", "topk:k=512"]


def test_an_answer_ends_when_all_is_found(engine, tmp_path, monkeypatch):
    monkeypatch.setattr("tamis.evals.scoring.MATCHES", {"match_all": lambda text, _: len(text) > 3})
    rows = evaluate(engine, SOME, tmp_path)
    assert {row["finish"] for row in rows} == {"found"}
    assert all(4 <= len(row["answer"]) <= 8 for row in rows)
    assert all("mass" in row and len(row["mass_by_layer"]) == 2 for row in rows[1:])


def test_a_metered_method_says_what_it_held(engine, tmp_path):
    metered = "metered(window:recent=32):mass=0"
    rows = evaluate(engine, changed(attn=(metered, "auto")), tmp_path)
    assert [row["label"] for row in rows] == ["dense", metered, "auto"]
    assert 0 < rows[1]["estimate"]["mass"] < 0.9
    assert "estimate" not in rows[2]  # 496 tokens are few
    assert rows[2]["answer"] == rows[0]["answer"]


# A text


def test_a_text_is_predicted_as_a_plain_forward_pass_predicts_it(engine, tmp_path):
    dense, window, _ = evaluate(engine, changed(tasks=("text",), audit=0), tmp_path)
    part = predict.passage(engine.tokenizer.encode(TEXT), 496, "0/text/0", 16)
    session = engine.session(n_ctx=496)
    rows = np.concatenate([np.array(x) for x in session.logits(part.ids[:-1])])[-16:]
    expected = -np.array(
        [predict.log_softmax(row)[i] for row, i in zip(rows, part.ids[-16:], strict=True)]
    )
    # The model's own rounding differs between a prompt's products and single tokens'.
    assert dense["loss"] == pytest.approx(expected.mean(), abs=2e-3)
    assert (dense["kl"], dense["same_top"]) == (0, 1)
    assert window["kl"] > 1e-6


def test_dense_attention_goes_first_though_it_is_kept_already(engine, tmp_path):
    """KL needs its distributions, which are not stored."""
    settings = changed(tasks=("text",))
    first = evaluate(engine, changed(tasks=("text",), attn=()), tmp_path / "a")
    assert [row["label"] for row in first] == ["dense"]
    rest = evaluate(engine, settings, tmp_path / "a")
    whole = evaluate(engine, settings, tmp_path / "b")
    assert [row["label"] for row in rest] == ["window:recent=64", "topk:k=32"]
    assert [row["kl"] for row in rest] == [row["kl"] for row in whole[1:]]


def test_tokens_that_need_the_context_are_those_it_makes_probable():
    log_p = np.log(np.array([[0.5, 0.5], [0.9, 0.1], [0.9, 0.1]], np.float32))
    part = predict.Passage([0, 0, 0, 0, 1], 3)
    assert (part.n_shared, part.decoded, part.expected.tolist()) == (1, [0, 0, 0], [0, 0, 1])
    dense = predict.Reference(log_p, np.array([False, True, False]))
    found = predict.compared(np.log(np.full((3, 2), 0.5, np.float32)), dense, part)
    assert found["loss_needing"] == pytest.approx(np.log(2), abs=1e-4)
    assert found["n_needing"] == 1
    kl = 0.9 * np.log(0.9 / 0.5) + 0.1 * np.log(0.1 / 0.5)
    assert found["kl"] == pytest.approx(2 * kl / 3, abs=1e-5)
    nothing = dense._replace(needing=np.zeros(3, bool))
    assert predict.compared(log_p, nothing, part)["loss_needing"] is None


def test_a_text_that_is_too_short_says_so():
    with pytest.raises(ValueError, match="the text has 500 tokens, --length 600 needs 601"):
        predict.passage(range(500), 600, "s", 16)
    with pytest.raises(ValueError, match="--length is 200, a text needs 272"):
        predict.passage(range(500), 200, "s", 16)


def test_the_text_of_every_machine_is_long():
    assert len(predict.own_text()) > 400_000


# The command


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "give -o DIR"),
        ("-o x --task niah", "no task 'niah', expected some of ruler"),
        ("-o x --attn nonsense", "'nonsense' is not known"),
        ("-o x --prefill topk", "no method of --prefill"),
        ("-o x -l 0", "at least 1"),
        ("-o x -n 0", "at least 1"),
    ],
)
def test_a_wrong_command_line_is_exit_code_2(capsys, tmp_path, monkeypatch, line, complaint):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", *line.split()]) == 2
    assert complaint in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_list_has_every_task(capsys):
    assert main(["eval", "--list"]) == 0
    out = capsys.readouterr().out
    assert "niah_multikey_3\n    ruler: " in out
    assert "\ntext\n" in out


def test_the_time_left_goes_by_the_tokens_that_are_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tamis.cli.commands.eval.time.monotonic", lambda: now[0])
    clock = _Clock([1000, 1000, 8000])
    now[0] += 10
    assert clock.count(1000) == "[1 of 3, 2 min left]"  # 9000 tokens at 100 a second
    now[0] += 10
    assert clock.count(1000) == "[2 of 3, 1 min left]"
    now[0] += 4000
    assert clock.count(8000) == "[3 of 3, 0 s left]"
    hours = _Clock([1] * 1000)
    now[0] += 10
    assert hours.count(1) == "[1 of 1000, 2 h 46 min left]"


def test_a_length_without_room_is_an_error_before_anything_is_run(engine, tmp_path, capsys):
    line = ["eval", "-m", str(engine.path), "-t", "1", "-o", str(tmp_path), "-l", "496,300"]
    assert main([*line, "--task", "passkey,vt", "--raw"]) == 1
    assert "vt takes" in capsys.readouterr().err
    assert read_results(tmp_path) == []


@pytest.mark.model
def test_a_model_finds_a_needle_by_the_command_line(model_path, tmp_path, capsys):
    out = tmp_path / "out"
    line = [
        *("eval", "-m", str(model_path("smollm2")), "-o", str(out), "-l", "700", "-n", "1"),
        *("--task", "niah_single_2,text", "--attn", "window:recent=64", "--predict", "32"),
    ]
    assert main([*line, "--json"]) == 0
    stdout, err = capsys.readouterr()
    rows = [json.loads(text) for text in stdout.splitlines()]
    assert rows == read_results(out)
    assert [(row["task"], row["label"]) for row in rows] == [
        ("niah_single_2", "dense"),
        ("niah_single_2", "window:recent=64"),
        ("text", "dense"),
        ("text", "window:recent=64"),
    ]
    assert (rows[0]["score"], rows[1]["score"]) == (1, 0)
    assert rows[0]["answer"].strip() == rows[0]["expected"][0]
    assert 0.05 < rows[1]["read"] < 0.25
    assert rows[1]["mass"] < 1
    assert rows[3]["kl"] > 0.05
    assert "[4 of 4, 0 s left] text 700 #0 window:recent=64: KL" in err
    assert main([*line[:5], "--report"]) == 0
    assert capsys.readouterr().out.split() == [f"{out}/report.md", f"{out}/report.html"]
    assert "niah_single_2" in (out / "report.html").read_text()


def newest(q: np.ndarray, k: np.ndarray) -> Any:
    """A method of one function: the last 32 positions."""
    return np.arange(max(0, len(k) - 32), len(k))


def test_evaluate_measures_methods_given_as_objects_beside_dense(engine, tmp_path):
    methods = {"mine": NumpySelector(newest), "window": "window:sink=0,recent=32"}
    options = {"samples": 1, "lengths": (512,), "raw": True, "n_predict": 16, "audit": 1}
    seen: list[str] = []

    def evaluated():
        return tamis.evaluate(
            engine,
            methods,
            ("niah_single_1", "text"),
            out=tmp_path / "out",
            progress=lambda row: seen.append(row["label"]),
            text=TEXT,
            **options,
        )

    found = evaluated()
    assert seen == ["dense", "mine", "window"] * 2
    mine, window, dense = (found.of(name) for name in ("mine", "window", "dense"))
    assert (mine.n, mine.length) == (2, 512)
    # The function reads about what the window does, which begins at a block.
    assert mine.kl == pytest.approx(window.kl, rel=0.2)
    assert mine.kl > dense.kl == 0
    assert mine.perplexity is not None
    assert mine.mass == pytest.approx(window.mass, abs=0.1)
    assert 0.05 < mine.read <= window.read < 0.15
    assert dense.to_dense is None
    assert mine.to_dense is not None
    assert "mine at 512 (2 samples): score" in str(found)
    assert [path.name for path in found.write_report(tmp_path / "page")][1] == "report.html"
    with pytest.raises(KeyError, match="'hip' at any length is not there: there are dense at 512"):
        found.of("hip")
    seen.clear()
    again = evaluated()
    assert seen == []
    assert again == found


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda e: tamis.evaluate(5, "hip"), TypeError, "engine is 5, expected an Engine"),
        (lambda e: tamis.evaluate(e, "hup"), ValueError, "attention method 'hup' is not known"),
        (lambda e: tamis.evaluate(e, 5), ValueError, "5 is no method of attn"),
        (lambda e: tamis.evaluate(e, "hip", "x"), ValueError, "there is no task 'x', expected"),
        (lambda e: tamis.evaluate(e, "hip", lenghts=(8,)), TypeError, "lenghts is no option of"),
        (lambda e: tamis.evaluate(e, {"dense": "hip"}), ValueError, "'dense' is the label of"),
    ],
)
def test_evaluate_reports_wrong_arguments(engine, call, error, said):
    with pytest.raises(error, match=said):
        call(engine)


def test_a_method_of_changed_code_is_another_one(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def newest(q, k):\n    return [len(k) - 1]\n")
    first = identity(parse_method(f"{own}:newest"))
    assert first == identity(parse_method(f"{own}:newest"))
    assert first.startswith("NumpySelector(newest) ")
    own.write_text("def newest(q, k):\n    return [0]\n")
    assert identity(parse_method(f"{own}:newest")) != first
    assert identity(parse_method("topk:k=32")) == repr(parse_method("topk:k=32"))


def test_functions_without_a_file_differ_by_their_code():
    def made(text: str) -> NumpySelector:
        names: dict[str, Any] = {"__name__": "nowhere"}
        exec(text, names)
        return NumpySelector(names["f"])

    first = made("def f(q, k): return [0]")
    assert identity(first) == identity(made("def f(q, k): return [0]"))
    assert identity(first) != identity(made("def f(q, k): return [1]"))
