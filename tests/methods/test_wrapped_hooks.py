"""Methods made of others pass on every hook, to those of them that it concerns."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from tamis.select.base import DECODE, PREFILL, PerRole, SelectorShape, SelectorState
from tamis.select.beyond import Beyond
from tamis.select.delta import Delta
from tamis.select.metered import Metered
from tamis.select.per_layer import Part, PerLayer

SHAPE = SelectorShape(3, 6, 2, 16, n_ctx=256, n_ubatch=64, window=(0, 0, 0))
# What a hook with a layer is given after it, or after a recording and it.
OF_LAYER = {
    "select_decode": ("rec", "layer", "q", "kv"),
    "also_attend": ("rec", "layer", "rows"),
    "correct": ("rec", "layer", "q", "kv", "sel", "out"),
    "observe": ("rec", "layer", "q", "kv", "sel"),
    "prepare": ("rec", "layer", "kv"),
    "reads_all": ("rec", "layer", "sel"),
    "bracket": ("rec", "layer", "q", "sel"),
    "bounds": ("layer", "report"),
}


class Spy(SelectorState):
    """Writes down which hooks were called, and answers by its own name."""

    def __init__(self, name, shape, **facts):
        super().__init__(shape)
        self.name, self.seen = name, []
        for fact, value in facts.items():
            setattr(self, fact, value)

    recalled = 0

    @property
    def n_recall(self):
        return self.recalled

    def _seen(self, hook, *given):
        self.seen.append((hook, *given))
        return f"{self.name}.{hook}"

    def truncate(self, n_tokens):
        self._seen("truncate", n_tokens)

    def phase(self, step):
        return self._seen("phase", step)

    def prompt_phase(self, pos):
        return self._seen("prompt_phase", pos)

    def frozen(self, layer, n_prompt):
        return self._seen("frozen", layer, n_prompt)

    def prepare_due(self, end):
        self._seen("prepare_due", end)
        return self.name == "due"

    def select_prefill(self, *given):
        return self._seen("select_prefill", *given)


for _hook in OF_LAYER:
    setattr(Spy, _hook, lambda self, *given, hook=_hook: self._seen(hook, *given))


@dataclass(frozen=True)
class Spied:
    """A method whose state is a Spy."""

    name: str
    facts: dict = field(default_factory=dict, hash=False, compare=False)
    roles = (DECODE, PREFILL)

    def open(self, shape):
        return Spy(self.name, shape, **self.facts)


def per_layer(*parts):
    """The state of methods at these layers, and theirs."""
    state = PerLayer(tuple(Part(method, layers) for method, layers in parts)).open(SHAPE)
    return state, state._states


@pytest.mark.parametrize("hook", OF_LAYER)
def test_a_layers_hook_is_its_own_methods(hook):
    state, spies = per_layer((Spied("a"), (0,)), (Spied("b"), (1, 2)))
    for layer, own, other in ((0, *spies), (1, *spies[::-1]), (2, *spies[::-1])):
        given = [layer if name == "layer" else name for name in OF_LAYER[hook]]
        answer = getattr(state, hook)(*given)
        assert own.seen == [(hook, *given)]
        assert other.seen == []
        own.seen.clear()
        if hook not in ("correct", "observe", "prepare", "bracket"):  # which answer nothing
            assert answer == f"{own.name}.{hook}"


def test_what_concerns_a_sequence_goes_to_the_methods_of_all_layers():
    state, spies = per_layer((Spied("a"), (0,)), (Spied("b"), (2,)))
    state.truncate(9)
    assert state.phase(7) == "a.phase+b.phase"
    for due, names in ((False, "ab"), (True, ("due", "b")), (True, ("a", "due"))):
        for spy, name in zip(spies, names, strict=True):
            spy.name = name
        assert state.prepare_due(5) is due
    for spy in spies:
        assert spy.seen == [("truncate", 9), ("phase", 7), *[("prepare_due", 5)] * 3]


def test_layers_of_other_methods_look_as_if_they_had_a_window():
    _, (first, last) = per_layer((Spied("a"), (0,)), (Spied("b"), (1, 2)))
    assert first.shape.window == (0, 1, 1)
    assert last.shape.window == (1, 0, 0)


def test_a_layer_of_two_methods_is_refused():
    with pytest.raises(ValueError, match="layer 1 has 2 methods, expected one"):
        per_layer((Spied("a"), (0, 1)), (Spied("b"), (1, 2)))


@pytest.mark.parametrize("fact", ["sharing", "evicting", "prepares"])
def test_a_fact_of_one_method_is_one_of_all(fact):
    for here, there in ((True, False), (False, True), (False, False)):
        parts = (Spied("a", {fact: here}), (0,)), (Spied("b", {fact: there}), (2,))
        assert getattr(per_layer(*parts)[0], fact) is (here or there)


def test_what_methods_keep_is_added_up():
    one, other, due = np.zeros(1), np.zeros(2), np.zeros(3)
    a = Spied("a", {"n_bytes": 5, "counters": (one,), "planned": (due,), "recalled": 4})
    b = Spied("b", {"n_bytes": 7, "counters": (other,), "recalled": 9})
    for state in (per_layer((a, (0,)), (b, (2,)))[0], PerRole(b, a).open(SHAPE)):
        assert state.n_bytes == 12
        assert {id(array) for array in state.counters} == {id(one), id(other)}
        assert [id(array) for array in state.planned] == [id(due)]
        assert state.n_recall == 9


def test_a_method_that_asks_for_sums_of_exponentials_gets_room_for_them():
    lse = np.zeros((1, 6), np.float32)
    assert per_layer((Spied("a"), (0,)), (Spied("b"), (2,)))[0].lse is None
    for facts in (({"lse": lse}, {}), ({}, {"lse": lse})):
        state, _ = per_layer((Spied("a", facts[0]), (0,)), (Spied("b", facts[1]), (2,)))
        assert state.lse.shape == (1, 6)
        assert state.lse.dtype == np.float32


class OfTokens:
    """A recording of so many tokens."""

    def __init__(self, n_tok):
        self.n_tok = n_tok


def roles(**facts):
    state = PerRole(Spied("reads"), Spied("decodes", facts)).open(SHAPE)
    return state, state._for_prefill, state._for_decode


def test_each_role_has_its_method():
    state, reads, decodes = roles()
    assert state.select_prefill("rec", 0, "q", "kv") == "reads.select_prefill"
    assert state.select_decode("rec", 0, "q", "kv") == "decodes.select_decode"
    assert state.frozen(1, 9) == "reads.frozen"
    assert state.prompt_phase(9) == "reads.prompt_phase"
    assert state.phase(9) == "decodes.phase"
    assert state.bounds(1, "report") == "decodes.bounds"
    assert (state.bracket("rec", 1, "q", "sel"), state.prepare_due(3)) == (None, False)
    state.prepare("rec", 1, "kv")
    assert [call[0] for call in reads.seen] == ["select_prefill", "frozen", "prompt_phase"]
    hooks = ["select_decode", "phase", "bounds", "bracket", "prepare_due", "prepare"]
    assert [call[0] for call in decodes.seen] == hooks


@pytest.mark.parametrize(("n_tok", "serving"), [(1, "decodes"), (2, "reads")])
def test_a_role_corrects_its_own_rows_and_both_observe(n_tok, serving):
    state, *spies = roles()
    rec = OfTokens(n_tok)
    assert state.also_attend(rec, 0, "rows") == f"{serving}.also_attend"
    state.correct(rec, 0, "q", "kv", "sel", "out")
    state.observe(rec, 0, "q", "kv", "sel")
    state.truncate(7)
    for spy in spies:
        own = ["also_attend", "correct"] if spy.name == serving else []
        assert [call[0] for call in spy.seen] == [*own, "observe", "truncate"]


@pytest.mark.parametrize("fact", ["evicting", "prepares"])
def test_decode_steps_have_the_facts_of_their_method(fact):
    assert getattr(roles(**{fact: True})[0], fact) is True
    assert getattr(roles()[0], fact) is False


def test_methods_of_both_roles_may_share_among_layers():
    sharing = Spied("x", {"sharing": True})
    for one, other in ((sharing, Spied("y")), (Spied("y"), sharing)):
        assert PerRole(one, other).open(SHAPE).sharing is True
    assert PerRole(Spied("x"), Spied("y")).open(SHAPE).sharing is False


def test_a_method_over_another_passes_it_all_calls():
    facts = {"freezing": "reuse", "n_bytes": 5, "counters": (np.zeros(1),), "recalled": 4}
    for method in (Beyond(Spied("x", facts), least=64), Delta(Spied("x", facts), gamma=8)):
        state = method.open(SHAPE)
        inner = state._inner
        assert state.freezing == "reuse"
        assert state.counters[-1] is facts["counters"][0]
        assert state.frozen(1, 99) == "x.frozen"
        state.observe("rec", 0, "q", "kv", "sel")
        state.truncate(7)
        hooks = [("frozen", 1, 99), ("observe", "rec", 0, "q", "kv", "sel"), ("truncate", 7)]
        assert inner.seen == hooks


def test_beyond_passes_on_what_is_beyond():
    state = Beyond(Spied("x", {"n_bytes": 5, "recalled": 4, "sharing": True}), least=64).open(SHAPE)
    assert (state.n_bytes, state.n_recall, state.sharing) == (5, 4, True)
    hooks = {
        "select_prefill": ("rec", 0, "q", "kv"),
        "also_attend": ("rec", 0, "rows"),
        "reads_all": ("rec", 0, "sel"),
    }
    for pos in (64, 128):
        assert state.prompt_phase(pos) == "long"
        for hook, given in hooks.items():
            assert getattr(state, hook)(*given) == f"x.{hook}"
        state.correct("rec", 0, "q", "kv", "sel", "out")
        assert state._inner.seen.pop()[0] == "correct"
    state._inner.seen.clear()
    for pos in (0, 63):
        assert state.prompt_phase(pos) == "short"
        assert state.also_attend("rec", 0, "rows") == []
        state.correct("rec", 0, "q", "kv", "sel", "out")
    assert state._inner.seen == []


@pytest.mark.parametrize(("n_ctx", "own"), [(64, False), (128, True)])
def test_a_context_that_cannot_be_long_needs_no_other_method(n_ctx, own):
    shape = SelectorShape(1, 2, 1, 16, n_ctx=n_ctx, n_ubatch=16, window=(0,))
    assert hasattr(Beyond(Spied("x"), least=64).open(shape), "_inner") is own


def test_metered_passes_on_all_that_it_does_not_do():
    facts = {
        "freezing": "reuse", "sharing": True, "planned": (np.zeros(1),), "evicting": True,
        "prepares": True, "n_bytes": 5, "recalled": 4, "counters": (np.zeros(2),),
    }  # fmt: skip
    state = Metered(Spied("x", facts)).open(SHAPE)
    for fact in ("freezing", "sharing", "planned", "evicting", "prepares", "n_bytes"):
        assert getattr(state, fact) == facts[fact]
    assert state.n_recall == 4
    assert state.counters[1] is facts["counters"][0]
    assert state.phase(3) == "x.phase"
    assert state.select_decode("rec", 0, "q", "kv") == "x.select_decode"
    assert state.reads_all("rec", 0, "sel") == "x.reads_all"
    assert state.bounds(0, "report") == "x.bounds"
    state.bracket("rec", 0, "q", "sel")
    state.prepare("rec", 0, "kv")
    assert state.prepare_due(7) is False
    state.truncate(33)
    hooks = ["phase", "select_decode", "reads_all", "bounds", "bracket", "prepare", "prepare_due"]
    assert [call[0] for call in state._inner.seen] == [*hooks, "truncate"]
