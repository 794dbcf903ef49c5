"""Parameters of methods out of any sensible range: an error, or a Program of the usual size."""

import contextlib
import dataclasses
import math

import pytest
from precompiled import Recorder
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.program import Program
from tamis.model.placement import on_one_device
from tamis.model.repack import Copies, Filling
from tamis.select.base import DECODE, MAX_NUMBER
from tamis.select.notation import methods, needs_inner, parse_method
from tamis.select.tactic import Tactic
from tamis.select.window import Window

NUMBERS = [-(1 << 62), -1, 0, 1, 3, 4095, 4096, MAX_NUMBER, MAX_NUMBER + 1, 1 << 32, 1 << 62]
FIELDS = [
    (name, field.name, field.type)
    for name, method in methods().items()
    for field in dataclasses.fields(method)
    if field.type in (int, float)
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine that records and compiles nothing."""
    path = tmp_path_factory.mktemp("ranges") / "m.gguf"
    loaded = Engine.load(write_tiny_model(path, TinySpec("qwen2", "F32", n_ctx=512)), n_threads=1)
    recorder = Recorder()
    places = on_one_device(recorder, loaded.hp.n_layer)
    filled = Filling(recorder, Copies([], Program()), lambda: None)
    yield Engine(loaded.file, loaded.model, loaded.vocab, places, filled), recorder
    loaded.close()


def recorded(engine, recorder, method, role):
    """The kernels that a short prompt and two steps ask for."""
    recorder.specs = set()
    name = "attn" if role == DECODE else "prefill"
    session = engine.session(512, 64, **{name: method})
    session.prefill([3] * 70)
    for _ in range(2):
        session.decode(3)
    return recorder.specs


@pytest.mark.parametrize(("name", "field", "kind"), FIELDS)
def test_a_number_of_any_size_is_refused_or_harmless(engine, name, field, kind):
    values = [math.nan, math.inf, -math.inf, 1e300, -1.0, 0.0, 0.5] if kind is float else NUMBERS
    inner = f"{name}(window)" if needs_inner(methods()[name]) else name
    for value in values:
        role = methods()[name].roles[0]
        text = f"{inner}:{field}={value}"
        with contextlib.suppress(ValueError, MemoryError):
            parse_method(text, role)
            method = parse_method(text, role) if role == DECODE else text
            specs = recorded(*engine, method, role)
            for spec in specs:
                sizes = [c for c in spec.constants if isinstance(c, int)]
                assert max(sizes, default=0) <= 4096, (text, spec)
            assert len(specs) < 200


@pytest.mark.parametrize("value", [MAX_NUMBER + 1, 1 << 62, -(1 << 62)])
def test_a_selector_made_in_python_is_checked_as_well(value):
    with pytest.raises(ValueError, match=f"sink is {value}, expected at most"):
        Window(sink=value)


def test_a_segment_beyond_the_context_is_the_context(engine):
    """Work is handed out by segments: one of 2^32 keys is 2^28 tiles, of which few have keys."""
    with pytest.raises(ValueError, match="segment is 4294967296, expected at most"):
        parse_method("tactic:segment=4294967296")
    state = parse_method(f"tactic:segment={MAX_NUMBER}").open(
        engine[0].session(512, 64)._stages[0].state.shape
    )
    assert state._segment == 512


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"P": "x"}, "P is 'x', expected a number"),
        ({"c": 1.5}, "c is 1.5, expected a whole number"),
        ({"rows": 3}, "rows is 3, expected a text"),
        ({"sample": True}, "sample is True, expected a whole number"),
    ],
)
def test_a_parameter_of_another_type_is_an_error(wrong, told):
    with pytest.raises(ValueError, match=told):
        Tactic(**wrong)
