"""A selector of another package is found by its entry point, or passed as it is."""

import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.cli import main
from tamis.engine.engine import Engine
from tamis.select.base import DECODE, PREFILL, SelectorState
from tamis.select.notation import MethodError, method_of, methods, parse_methods
from tamis.select.window import Window

SOURCE = '''"""The newest positions, by a package of its own."""
from dataclasses import dataclass
from typing import ClassVar

from tamis.select.base import SelectorState


@dataclass(frozen=True, slots=True)
class Newest:
    roles: ClassVar[tuple[str, ...]] = ("decode",)

    keep: int = 64

    def open(self, shape):
        return _State(shape, self.keep)


class _State(SelectorState):
    def __init__(self, shape, keep):
        super().__init__(shape)
        self._keep = keep

    def select_decode(self, rec, layer, q, kv):
        return self.windowed(rec, 0, self._keep)


lost = 5
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A path with an installed package `toy` whose selectors are these entry points."""

    def install(entries):
        (tmp_path / "toy_selector.py").write_text(SOURCE)
        info = tmp_path / "toy-1.0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[tamis.selectors]\n" + entries)
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("toy_selector", None)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("plugins") / "m.gguf", TinySpec("llama", "F32"))


def test_an_installed_selector_is_a_method_like_any_other(toy, path, capsys):
    toy("newest = toy_selector:Newest\n")
    assert method_of("newest").__name__ == "Newest"
    assert methods()["newest"] is method_of("newest")
    engine = Engine.load(path, n_threads=1)
    ids = np.random.default_rng(2).integers(3, 60, 100)
    sessions = [
        engine.session(n_ctx=256, attn=attn)
        for attn in ("newest:keep=64", "window:sink=0,recent=64,block=64")
    ]
    for session in sessions:
        session.prefill(ids)
    np.testing.assert_array_equal(*(session.decode(5) for session in sessions))
    engine.close()
    assert main(["methods"]) == 0
    assert "newest:keep=64\n    --attn: The newest positions" in capsys.readouterr().out
    with pytest.raises(MethodError, match=r"newest takes keep=\.\.\."):
        parse_methods("newest:x=1", "dense")
    with pytest.raises(MethodError, match="'newest' is no method of prefill: it goes with attn"):
        parse_methods("dense", "newest")


def test_a_selector_that_cannot_be_used_says_which_package_it_is_of(toy):
    toy("gone = nowhere:X\nlost = toy_selector:lost\n")
    with pytest.raises(MethodError, match="'gone' of package toy cannot be imported from nowh"):
        method_of("gone")
    with pytest.raises(MethodError, match="'lost' of package toy is toy_selector:lost, expected"):
        method_of("lost")
    with pytest.raises(MethodError, match="'other' is not known; attn takes auto, bigbird"):
        parse_methods("other", "dense")


def test_files_of_tamis_come_before_other_packages(toy):
    toy("window = toy_selector:Newest\n")
    assert method_of("window") is Window


@dataclass(frozen=True, slots=True)
class Noted:
    """Dense; says what it was opened for."""

    roles: ClassVar[tuple[str, ...]] = (DECODE, PREFILL)
    name: str

    def open(self, shape):
        OPENED.append(self.name)
        return SelectorState(shape)


OPENED = []


def test_a_selector_may_be_passed_itself_for_either_role(path):
    engine = Engine.load(path, n_threads=1)
    OPENED.clear()
    engine.session(n_ctx=128, attn=Noted("a"), prefill=Noted("b"))
    engine.session(n_ctx=128, attn=Noted("same"), prefill=Noted("same"))
    assert sorted(OPENED) == ["a", "b", "same"]
    for wrong in (5, Window):
        with pytest.raises(MethodError, match="is no method of prefill: expected a text"):
            engine.session(n_ctx=128, prefill=wrong)
    engine.close()


def test_a_method_imports_no_other_one():
    code = (
        "import sys; from tamis.select.notation import parse_methods; "
        "parse_methods('quest', 'dense'); "
        "print(sorted(m for m in sys.modules if m.startswith(('tamis.select.', 'importlib.met'))))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    expected = ["base", "dense", "notation", "quest"]
    assert out.stdout.strip() == str([f"tamis.select.{name}" for name in expected])
