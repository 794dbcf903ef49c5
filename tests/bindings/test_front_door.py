"""`from tamis import ...`: typed for users' programs, closed once closed, good messages."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from doc_blocks import blocks
from package_view import package_view
from tiny_models import TinySpec, write_tiny_model

import tamis
from tamis import Engine, Llama, NumpySelector
from tamis.bindings.drop_in.options import ChatOptions, CompletionOptions
from tamis.cli import main
from tamis.engine.batch import Batch
from tamis.fetch.registry import KNOWN, ModelError

# Those whose packages are typed, or that need none.
EXAMPLES = ("embed", "fastapi_app", "native", "own_method")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinySpec())


def test_what_is_exported_is_what_editors_see(root: Path) -> None:
    source = (root / "runner/__init__.py").read_text()
    typed = source[source.index("if TYPE_CHECKING:") : source.index("__all__")]
    for name in tamis.__all__:
        assert getattr(tamis, name) is not None
        assert name == "__version__" or f" {name}" in typed
    assert sorted(tamis.__all__) == sorted([*tamis._EXPORTS, "__version__"])


def users_code(root: Path, folder: Path) -> list[Path]:
    """Files in a folder: the code of the docs, the typed examples and a user's program."""
    for i, block in enumerate(blocks(root, "python")):
        (folder / f"block_{i}.py").write_text(f"# {block.page}\n{block.text}")
    for file in ["tests/data/stranger.py", *(f"examples/{name}.py" for name in EXAMPLES)]:
        shutil.copy(root / file, folder)
    return sorted(folder.glob("*.py"))


def test_a_users_program_and_the_code_of_the_docs_pass_mypy_strict(
    root: Path, tmp_path: Path
) -> None:
    command = ["mypy", "--strict", "--follow-imports=silent", "--cache-dir=.cache/mypy-strict"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--config-file=", *users_code(root, tmp_path)],
        cwd=root,
        env=os.environ | {"MYPYPATH": str(package_view(root))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("node"), reason="pyright runs in node, which is not here")
def test_a_users_program_and_the_code_of_the_docs_pass_pyright(root: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    (tmp_path / "wrong.py").write_text("from tamis import pull\n\npull(5)\n")
    files = [path.name for path in users_code(root, tmp_path)]
    config = {"include": files, "extraPaths": [str(package_view(root))]}
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps(config | {"typeCheckingMode": "strict"})
    )
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", f"--pythonpath={sys.executable}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["summary"]["filesAnalyzed"] == len(files)
    wrong = [d for d in found["generalDiagnostics"] if not d["file"].endswith("wrong.py")]
    assert not wrong, done.stdout
    assert "reportArgumentType" in done.stdout  # what is wrong is seen


@pytest.mark.parametrize(
    ("method", "options", "first"),
    [
        (Llama.create_completion, CompletionOptions, "prompt"),
        (Llama.create_chat_completion, ChatOptions, "messages"),
    ],
)
def test_the_options_are_those_of_the_method(method, options, first):
    names = set(inspect.signature(method).parameters) - {"self", "stream", first}
    assert set(options.__annotations__) == names


def test_calls_after_close_are_errors(model):
    with Engine.load(model, n_threads=1) as engine:
        with engine.session(n_ctx=64) as session:
            session.prefill([5, 6, 7])
        with pytest.raises(RuntimeError, match="the session is closed: open another"):
            session.decode(5)
        open_session = engine.session(n_ctx=64)
        session.close()
    engine.close()
    for call in (lambda: open_session.prefill([5]), lambda: engine.session(n_ctx=64)):
        with pytest.raises(RuntimeError, match="the engine is closed: load the model again"):
            call()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        open_session.selected(0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda e, s: s.prefill("hello"), "ids is the text 'hello', expected token ids: encode"),
        (
            lambda e, s: Batch(e).step({s: "a"}),
            "tokens has 'a', expected a token id for each session",
        ),
        (lambda e, s: Batch(e).step({5: 1}), "tokens has 5, expected a token id for each session"),
        (lambda e, s: e.session(n_ctx="4096"), "n_ctx is '4096', expected a whole number"),
        (lambda e, s: e.encode_chat("hello"), "messages is 'hello', expected a list"),
        (lambda e, s: e.encode_chat(["hello"]), 'write [{"role": "user"'),
        (lambda e, s: Engine.load(None), "path is None, expected a path"),
        (lambda e, s: Engine.load(5), "path is 5, expected a path"),
        (lambda e, s: Engine.load("x", n_threads="2"), "n_threads is '2', expected"),
        (lambda e, s: e.encode(5), "text is 5, expected a text"),
        (lambda e, s: e.encode_chat([{"rle": "user"}]), 'messages[0] has no text as its "role"'),
        (lambda e, s: e.encode_chat([{"role": "user", "content": 5}]), '["content"] is 5'),
        (lambda e, s: e.session(kv_ram="512MiB", kv_dir="."), "kv_ram is '512MiB', expected a who"),
        (lambda e, s: e.session(min_mass="x"), "min_mass is 'x', expected a number or None"),
        (lambda e, s: s.generate("hello"), "ids is the text 'hello', expected token ids: encode"),
        (lambda e, s: s.generate([5], max_tokens="9"), "max_tokens is '9', expected a whole numb"),
        (lambda e, s: s.generate([5], stop="x"), "stop is 'x', expected a list of texts"),
        (lambda e, s: s.prefill([1.5]), "ids is [1.5], expected a list of whole numbers"),
        (lambda e, s: s.generate([5], {"temp": 0}), "params is {'temp': 0}, expected a Sampler"),
        (lambda e, s: s.copy(None), "other is None, expected a Session"),
        (lambda e, s: s.truncate(1.5), "n_tokens is 1.5, expected a whole number"),
        (lambda e, s: s.remove(0, "a"), "end is 'a', expected a whole number"),
        (lambda e, s: s.selected("a"), "layer is 'a', expected a whole number"),
        (lambda e, s: s.load(5), "path is 5, expected a path"),
        (lambda e, s: s.decode_best(5, "x"), "n is 'x', expected a whole number or None"),
        (lambda e, s: Batch(e).step_best({s: 5}, 1.5), "n is 1.5, expected a whole number or None"),
        (lambda e, s: e.tokenizer.decode("x"), "a token is 'x', expected a whole number from 0"),
        (lambda e, s: e.memory_plan("x"), "n_ctx is 'x', expected a whole number or None"),
        (lambda e, s: tamis.pull(5), "name is 5, expected a text: one of smollm2"),
        (lambda e, s: tamis.summarize(e, 5), "text is 5, expected a text"),
        (lambda e, s: tamis.summarize(5, "x"), "engine is 5, expected an Engine: Engine.load"),
        (lambda e, s: NumpySelector(None), "scores is None, expected a function"),
        (lambda e, s: e.encode_chat([{"role": "user"}]), 'messages[0] has no "content": write ['),
        (
            lambda e, s: Engine.load("x", n_thread=1),
            "Engine.load: got an unexpected keyword argument 'n_thread'; did you mean n_threads?",
        ),
    ],
)
def test_wrong_types_are_reported_with_what_to_write(model, call, said):
    with Engine.load(model, n_threads=1) as engine, engine.session(n_ctx=64) as session:
        with pytest.raises(TypeError) as found:
            call(engine, session)
        assert said in str(found.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_mass": 7}, "min_mass is 7, expected a number from 0 to 1"),
        ({"audit": -1}, "audit is -1, expected 0 .none. or more: every how manyth step"),
        (
            {"kv_ram": 1 << 28, "kv_dir": "/", "kv_unit": 3},
            "kv_unit is 3, expected one of 1, 16, 64",
        ),
        ({"attn": 5}, "5 is no method of attn"),
        ({"attn": "nosuch"}, "attention method 'nosuch' is not known; attn takes auto, bigbird"),
    ],
)
def test_wrong_values_of_a_session_are_reported_with_what_is_expected(model, options, said):
    with Engine.load(model, n_threads=1) as engine, pytest.raises(ValueError, match=said):
        engine.session(n_ctx=64, **options)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s: s.decode_best(5, 0), "n is 0, expected 1 or more; None: as many as there are"),
        (lambda s: s.generate([5], max_tokens=-5), "max_tokens is -5, expected 0 or more; None"),
        (lambda s: s.decode(10**9), "token"),
    ],
)
def test_wrong_values_of_calls_leave_the_session_as_it_was(model, call, said):
    with Engine.load(model, n_threads=1) as engine, engine.session(n_ctx=64) as session:
        session.prefill([5, 6])
        with pytest.raises(ValueError, match=said):
            list(call(session))
        assert session.tokens == [5, 6]


def test_an_argument_that_llama_does_not_know_is_warned_of_where_it_is_written(model):
    with pytest.warns(UserWarning, match="n_ctxx; did you mean n_ctx. has no effect") as found:
        Llama(str(model), n_ctx=64, n_ctxx=5).close()
    assert found[0].filename == __file__


def test_what_was_read_is_exported_as_arrays(model):
    with Engine.load(model, n_threads=1) as engine:
        session = engine.session(n_ctx=128, attn="window:sink=4,recent=16")
        with pytest.raises(ValueError, match="no decode step came last"):
            session.selected(0)
        session.prefill([5 + i % 40 for i in range(100)])
        session.decode(7)
        found = session.selected(0)
        for row, positions in zip(found.mask, found.positions, strict=True):
            assert np.array_equal(np.flatnonzero(row), positions)
            assert row.shape == (101,)
            assert set(range(4)) <= set(positions.tolist())
            assert set(range(85, 101)) <= set(positions.tolist())
            assert len(positions) < 60
        session.truncate(50)
        with pytest.raises(ValueError, match="no decode step came last"):
            session.selected(0)
        with pytest.raises(ValueError, match="layer is 99"):
            session.selected(99)


def test_a_numpy_method_that_takes_all_is_dense_and_one_that_takes_some_reads_these(model):
    calls = []

    def everything(q, k):
        calls.append((q.shape, k.shape, q.dtype, k.dtype))
        return np.arange(len(k))

    with Engine.load(model, n_threads=1) as engine:
        dense = engine.session(n_ctx=256)
        dense.prefill([5 + i % 40 for i in range(150)])
        own = engine.session(n_ctx=256, attn=NumpySelector(everything), audit=1)
        own.copy(dense)
        hp = engine.hp
        expected, found = dense.decode(9), own.decode(9)
        assert np.allclose(expected, found, atol=2e-3)
        shapes = (hp.n_head, hp.head_dim), (151, hp.n_head_kv, hp.head_dim)
        assert calls == [(*shapes, np.float32, np.float32)] * hp.n_layer
        assert own.audit.total().mass == pytest.approx(1)
        some = engine.session(n_ctx=256, attn=NumpySelector(lambda q, k: [len(k) - 1, 3, 5]))
        some.copy(dense, 150)
        some.decode(9)
        read = some.selected(hp.n_layer - 1)
        assert [row.tolist() for row in read.positions] == [[3, 5, 150]] * hp.n_head


def test_the_keys_that_a_numpy_method_gets_count_as_read_to_select(model, tmp_path, capsys):
    """So that an audit and `bench` do not praise it for few bytes; its time they leave out."""
    with Engine.load(model, n_threads=1) as engine:
        session = engine.session(n_ctx=256, attn=NumpySelector(lambda q, k: [3]), audit=1)
        session.prefill([5 + i % 40 for i in range(150)])
        session.decode(9)
        attended, selected, dense = session.audit.n_bytes()
        assert selected == dense / 2  # the keys without the values
        assert attended < dense / 10
    (tmp_path / "own.py").write_text("def first(q, k):\n    return [0]\n")
    methods = ("--attn", "window:sink=0,recent=16", "--attn", f"{tmp_path}/own.py:first")
    words = ["-p", "0", "-n", "2", "-d", "128", "-r", "1", "-t", "1", "--json"]
    assert main(["bench", "-m", str(model), *words, *methods]) == 0
    said = capsys.readouterr()
    window, own = map(json.loads, said.out.splitlines())
    assert window["bytes_ratio"] > 2 > own["bytes_ratio"] > 1.5
    assert said.err.count("its bytes are counted, its time is not") == 1


@pytest.mark.parametrize("found", [[], [-1], [151], [0.5], [[0], [1], [2], [3], [4]]])
def test_positions_that_are_none_are_an_error_and_the_session_is_as_it_was(model, found):
    with Engine.load(model, n_threads=1) as engine:
        session = engine.session(n_ctx=256, attn=NumpySelector(lambda q, k: found))
        session.prefill([5 + i % 40 for i in range(150)])
        with pytest.raises(ValueError, match="scores gave"):
            session.decode(9)
        assert session.n_past == 150


def test_a_numpy_method_is_not_batched(model):
    with Engine.load(model, n_threads=1) as engine:
        assert engine.session(n_ctx=64).batchable
        assert not engine.session(n_ctx=64, attn=NumpySelector(lambda q, k: [0])).batchable


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda llm: llm.create_chat_completion("hi"), "messages is 'hi', expected a list of them"),
        (
            lambda llm: llm.create_chat_completion([5]),
            "messages[0] is 5, expected a dictionary: wr",
        ),
        (lambda llm: llm.create_chat_completion(None), 'write [{"role": "user", "content": text}]'),
        (lambda llm: llm(5), "prompt is 5, expected a text or a list of whole numbers"),
        (lambda llm: llm([1, "x"]), "prompt is [1, 'x'], expected a text or a list of whole"),
        (
            lambda llm: llm("x", max_tokens="5"),
            "max_tokens is '5', expected a whole number or None",
        ),
        (
            lambda llm: llm("x", temperature=None),
            "temperature is None, expected a number: write tem",
        ),
        (lambda llm: llm("x", stop=5), "stop is 5, expected a text, a list of texts or None"),
        (
            lambda llm: llm("x", grammar="root"),
            "grammar is 'root', expected a LlamaGrammar or None",
        ),
        (lambda llm: llm.tokenize("x"), "text is 'x', expected bytes"),
        (lambda llm: llm.embed(5), "input is 5, expected a text or a list of texts"),
        (
            lambda llm: Llama(llm.model_path, n_batch="x"),
            "n_batch is 'x', expected a whole number:",
        ),
        (
            lambda llm: Llama(llm.model_path, seed=1.5),
            "seed is 1.5, expected a whole number: write",
        ),
    ],
)
def test_wrong_types_are_reported_by_llama_too(model, call, said):
    llm = Llama(str(model), n_ctx=64, verbose=False)
    with pytest.raises(TypeError) as found:
        call(llm)
    assert said in str(found.value)
    llm.close()


def test_what_numpy_and_llama_cpp_programs_pass_is_taken(model):
    with Llama(str(model), n_ctx=np.int64(64), verbose=0, offload_kqv=1) as llm:
        found = llm(
            np.array([5, 6]).tolist(), max_tokens=np.int32(2), temperature=0, stop=("a", "b")
        )
        assert found["usage"]["completion_tokens"] == 2
        processors = [lambda ids, scores: scores]
        assert llm([5, 6], max_tokens=1, logits_processor=processors)["choices"]


def test_a_model_is_loaded_by_its_name_or_the_remedy_is_named(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TAMIS_MODELS", str(tmp_path))
    with pytest.raises(ModelError, match=r"no model 'smollm2' here: run tamis pull smollm2"):
        Engine.load("smollm2")
    with pytest.raises(ModelError, match=r"no model 'smolm2' here: did you mean smollm2\?"):
        Engine.load("smolm2")
    known = replace(KNOWN["smollm2"], n_bytes=model.stat().st_size)
    monkeypatch.setitem(KNOWN, "smollm2", known)
    shutil.copy(model, tmp_path / known.file)
    with Engine.load("smollm2", n_threads=1) as engine:
        assert engine.path == tamis.pull("smollm2") == tmp_path / known.file


def test_an_engine_encodes_text_and_an_answer_needs_no_parameters(model):
    with Engine.load(model, n_threads=1) as engine, engine.session(n_ctx=64) as session:
        ids = engine.encode("the hand")
        assert ids == engine.tokenizer.encode("the hand")
        assert len(list(session.generate(ids, max_tokens=3))) <= 3
        assert not session.audited
        with pytest.raises(ValueError, match="no step was audited: open the session with audit=1"):
            session.audit.total()


def test_objects_say_what_they_are(model):
    with Engine.load(model, n_threads=1) as engine, engine.session(n_ctx=64) as session:
        session.prefill([5, 6, 7])
        assert repr(engine).startswith(f"<Engine {model.name}: llama, ")
        assert repr(session) == f"<Session of {model.name}: 3 of 64 tokens>"
    assert repr(session) == f"<Session of {model.name}: closed>"
    with Llama(str(model), n_ctx=64, verbose=False) as llm:
        llm.eval([5, 6])
        assert repr(llm) == f"<Llama of {model.name}: 2 of 64 tokens>"
        grammar = tamis.LlamaGrammar.from_string('root ::= "a"')
        assert repr(grammar) == "<LlamaGrammar of GBNF: 12 characters>"


def test_no_public_object_is_shown_by_its_address(model):
    with (
        Engine.load(model, n_threads=1) as engine,
        engine.session(n_ctx=64, audit=2) as session,
    ):
        found = [engine.tokenizer, engine.chat_template, engine.file, engine.vocab.tokens]
        found += [session, session.audit, NumpySelector(np.argmax), tamis.Settings()]
        found += session.generate([5], max_tokens=1)
        assert [repr(each) for each in found if " object at 0x" in repr(each)] == []
        assert repr(session.audit) == "<Audit of 1 in 2 steps: 1 decoded>"
        assert repr(engine.file) == f"<GGUFFile {model}>"
