"""Sessions read, decode, are truncated, forked, saved and loaded in any order: as a fresh one.

A session's history is the prompts and decode steps that made the tokens it holds; what was
truncated is none of it. Replayed in a session that was just opened it must give the same logits at
every step, whatever else the first session went through. Orders are those of Hypothesis, the same
in every run; `--whole-kit` draws others, and many more.
"""

import contextlib
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from method_roles import in_its_roles
from precompiled import compile_for
from recurrent_models import write_recurrent_model
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.ops import FEW_ROWS
from tamis.jit_kernels.contract.types import PAGE, kv_row
from tamis.kv.disk_tier import MARGIN
from tamis.select.notation import methods

N_CTX, N_UBATCH, N_VOCAB = 384, 64, 90
EXAMPLES, STEPS = 8, 9  # a method; some 3 seconds, a minute for all
MANY = 40  # times as many, with --whole-kit
METHODS = {
    "auto": "auto:least=0,part=8,mass=0.3",
    "beyond": "beyond(window:sink=4,recent=32,block=16):least=64",
    "bigbird": "bigbird:block=16,sink=16,recent=32,random=32",
    "cpe": "cpe:k=6,sink=1,local=2,r=1,s=16,tau=-1,rows=group,psi=1",
    "delta": "delta(window:sink=4,recent=32,block=16)",
    "dense": "dense",
    "double_p": "double_p:c=4,period=16,local=8",
    "double_sparsity": "double_sparsity:budget=40,sink=4,recent=8,s=4",
    "h2o": "h2o:budget=40,sink=4,s=8",
    "hip": "hip:k=32,b_k=4,b_sk=2,r_m=4,l_d=0,sink=4,local=16,rows=group",
    "hshare": "hshare:budget=40,layers=0.5,heads=0.3,period=5,sink=0,recent=1",
    "hyperattention": "hyperattention:block=16,sample=9,recent=8,size=8,bits=3",
    "lfps": "lfps:budget=0.1,sink=4,local=8,s=4",
    "magicpig": "magicpig:K=3,L=6,dense=0,sink=4,recent=8,period=9",
    "metered": "metered(topk:k=24,sink=4,recent=8,rows=head):mass=0.9,samples=16",
    "quest": "quest:budget=64,page=8,dense=0,sink=4,recent=8",
    "retroinfer": "retroinfer:c=4,period=16,local=8,retrieve=0.1",
    "snapkv": "snapkv:budget=40,window=8,sink=4",
    "tactic": "tactic:c=4,period=16,local=8",
    "tail": "tail(topk:k=24,sink=4,recent=8,rows=head):samples=16",
    "topk": "topk:k=24,sink=4,recent=8",
    "twilight": "twilight(topk:k=24,sink=4,recent=8,rows=head):p=0.9",
    "vertical_slash": "vertical_slash:n_vertical=20,n_slash=12,sink=4,local=8,last_q=16",
    "window": "window:sink=4,recent=32,block=16",
}
LENGTHS = (1, 2, 9, 33, 64, 65, 130)  # of a prompt: within a chunk and a page, whole, beyond
KINDS = ("full", "window", "recurrent")  # of state
TYPES = (("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "q4_0"), ("q4_0", "f16"))  # of K, of V
OF_F16_KEYS = (("f16", "f16"), ("f16", "q8_0"), ("f16", "q4_0"))
# They read keys, or K and V, themselves, and refuse other types.
TYPES_OF = dict.fromkeys(
    (
        "double_p",
        "double_sparsity",
        "h2o",
        "hyperattention",
        "magicpig",
        "retroinfer",
        "snapkv",
        "tactic",
        "vertical_slash",
    ),
    OF_F16_KEYS,
) | {"lfps": (("f16", "f16"),)}
# Products of one row and of many differ by rounding: a state that is computed again in chunks is
# near the one of decode steps. One that is a token off differs by 1 and more.
CLOSE = {"rtol": 2e-3, "atol": 5e-3}


class Done(NamedTuple):
    """A prompt or a decode step, and the logits after it."""

    ids: tuple[int, ...]
    decoded: bool
    logits: np.ndarray


class Live:
    """A session, its history, and whether a decode step may come next."""

    def __init__(self, session: Any) -> None:
        self.session, self.history = session, list[Done]()
        self.resumed = True  # no method knows of decode steps before: a prompt must come first

    def take(self, other: "Live", history: list[Done]) -> None:
        """Be another one, which ended there."""
        self.history = list(history)
        n_recall = max(s.state.n_recall for s in self.session._stages)
        last = self.history[-1] if self.history else None
        self.resumed = last is None or last.decoded or len(last.ids) < n_recall


class Order(RuleBasedStateMachine):
    """Two sessions of one configuration, and what they have saved."""

    engines: dict[str, Engine]
    method: str
    types: tuple[tuple[str, str], ...]
    folder: Any

    @initialize(
        kind=st.sampled_from(KINDS), types=st.integers(0, 11), tier=st.booleans(),
        first=st.sampled_from(LENGTHS[::-1]),
    )  # fmt: skip
    def opens(self, kind: str, types: int, tier: bool, first: int) -> None:
        self.kind, self.tier = kind, tier
        type_k, type_v = self.types[types % len(self.types)]
        self.options = {"n_ctx": N_CTX, "n_ubatch": N_UBATCH, "type_k": type_k, "type_v": type_v}
        self.options |= in_its_roles(self.method)
        self.live = [Live(self.opened()), Live(self.opened())]
        self.saved: list[tuple[Any, list[Done]]] = []
        self.reads(self.live[0], first, 9)
        # Of a prompt that is cut off, a method of prompts would have read another way.
        self.cuts = self.options["prefill"] == "dense"

    def opened(self) -> Any:
        engine = self.engines[self.kind]
        tier = {}
        if self.tier:  # the least memory that there can be: of other layers pages are evicted
            n_frame = N_CTX // PAGE + MARGIN + 2 * engine.hp.n_layer
            types = self.options["type_k"], self.options["type_v"]
            row = sum(kv_row(each, engine.hp.head_dim).itemsize for each in types)
            kv_ram = n_frame * PAGE * max(engine.hp.n_head_kv, 1) * row
            tier = {"kv_ram": kv_ram, "kv_dir": self.folder}
        return engine.session(**self.options, **tier)

    @rule(which=st.integers(0, 1), n=st.sampled_from(LENGTHS), seed=st.integers(0, 5))
    def prefill(self, which: int, n: int, seed: int) -> None:
        self.reads(self.live[which], n, seed)

    def reads(self, live: Live, n: int, seed: int) -> None:
        """A prompt of n tokens, or of as many as the method looks back at where it must."""
        session = live.session
        if live.resumed:
            n = max(n, *(s.state.n_recall for s in session._stages))
        n = min(n, session.n_free)
        if n < 1 or (live.resumed and any(n < s.state.n_recall for s in session._stages)):
            return
        ids = np.random.default_rng([n, seed]).integers(3, N_VOCAB, n).tolist()
        live.history.append(Done(tuple(ids), False, session.prefill(ids)))
        live.resumed = False

    @rule(which=st.integers(0, 1), n=st.integers(1, 6), seed=st.integers(0, 5))
    def decode(self, which: int, n: int, seed: int) -> None:
        live = self.live[which]
        if live.resumed:
            self.reads(live, 1, seed)
        if not live.resumed:
            for token in np.random.default_rng(seed).integers(3, N_VOCAB, n).tolist():
                if live.session.n_free:
                    found = live.session.decode(token).copy()
                    live.history.append(Done((token,), True, found))

    @rule(which=st.integers(0, 1), back=st.integers(1, 80))
    def truncate(self, which: int, back: int) -> None:
        live = self.live[which]
        live.history = self.until(live.history, max(0, live.session.n_past - back))
        live.session.truncate(sum(len(done.ids) for done in live.history))
        live.resumed = True

    @rule(which=st.integers(0, 1), back=st.integers(1, 80), n=st.integers(1, 3))
    def read_again(self, which: int, back: int, n: int) -> None:
        """Steps, a truncation, and as many other tokens to the same length, then steps.

        What a method kept of the dropped steps is then of positions that there are.
        """
        live = self.live[which]
        self.decode(which, n, back)
        before = live.session.n_past
        self.truncate(which, min(back + n, before))
        self.reads(live, before - live.session.n_past, back)
        self.decode(which, 2, back)

    def until(self, history: list[Done], n: int) -> list[Done]:
        """What made the first n tokens; fewer where a prompt cannot be cut there."""
        kept, n_kept = [], 0
        for done in history:
            room = n - n_kept
            if len(done.ids) > room:
                # Few rows are multiplied another way, which rounds another way.
                if 0 < room % N_UBATCH <= FEW_ROWS:
                    room -= room % N_UBATCH
                if self.cuts and room > 0:
                    kept.append(Done(done.ids[:room], False, np.zeros(0)))
                break
            kept.append(done)
            n_kept += len(done.ids)
        return kept

    @rule(which=st.integers(0, 1), back=st.integers(0, 40))
    def fork(self, which: int, back: int) -> None:
        live, other = self.live[which], self.live[1 - which]
        history = self.until(live.history, max(0, live.session.n_past - back))
        other.session.copy(live.session, sum(len(done.ids) for done in history))
        other.take(live, history)

    @rule(which=st.integers(0, 1))
    def save(self, which: int) -> None:
        live = self.live[which]
        path = self.folder / f"s{len(self.saved)}"
        live.session.save(path)
        self.saved.append((path, list(live.history)))

    @precondition(lambda self: self.saved)
    @rule(which=st.integers(0, 1), number=st.integers(0, 9))
    def restore(self, which: int, number: int) -> None:
        path, history = self.saved[number % len(self.saved)]
        self.live[which].session.load(path)
        self.live[which].take(self.live[which], history)

    def teardown(self) -> None:
        for live in getattr(self, "live", ()):
            ids = [token for done in live.history for token in done.ids]
            assert live.session.tokens == ids
            with contextlib.closing(self.opened()) as fresh:
                for done in live.history:
                    if done.decoded:
                        found = fresh.decode(done.ids[0])
                    else:
                        found = fresh.prefill(list(done.ids))
                    if len(done.logits):
                        self.same(done.logits, found)
            live.session.close()

    def same(self, logits: np.ndarray, expected: np.ndarray) -> None:
        """To the bit; near it where a recurrent state was computed again in other chunks."""
        if self.kind == "recurrent":
            np.testing.assert_allclose(logits, expected, **CLOSE)
        else:
            np.testing.assert_array_equal(logits, expected)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """A model of each kind of state; all with two heads of 32 elements a KV head."""
    folder = tmp_path_factory.mktemp("kinds")
    paths = {
        "full": write_tiny_model(folder / "full.gguf", TinySpec("qwen3", layers=6)),
        "window": write_tiny_model(folder / "window.gguf", TinySpec("gemma3", embd=64, kv_heads=2)),
        "recurrent": write_recurrent_model(folder / "recurrent.gguf", "lfm2"),
    }
    found = {kind: Engine.load(path, n_threads=1) for kind, path in paths.items()}
    yield found
    for engine in found.values():
        engine.close()


def test_the_methods_above_are_all():
    assert set(METHODS) == set(methods())


# The first is quick, whatever others are: its memory of decode steps is the longest.
@pytest.mark.parametrize("name", sorted(METHODS, key=lambda name: (name != "cpe", name)))
def test_any_order_gives_what_a_fresh_session_does(engines, tmp_path, request, name):
    class OfMethod(Order):
        pass

    OfMethod.engines, OfMethod.method, OfMethod.folder = engines, METHODS[name], tmp_path
    sizes = {"n_ctx": N_CTX, "n_ubatch": N_UBATCH} | in_its_roles(METHODS[name])
    OfMethod.types = TYPES_OF.get(name, TYPES)
    sessions = [sizes | {"type_k": k, "type_v": v} for k, v in OfMethod.types]
    for engine in engines.values():
        compile_for(engine, sessions)
    whole = request.config.getoption("whole_kit")
    run_state_machine_as_test(
        OfMethod,
        settings=settings(
            max_examples=EXAMPLES * (MANY if whole else 1),
            stateful_step_count=STEPS,
            derandomize=not whole,
            phases=(Phase.generate, Phase.shrink) if whole else (Phase.generate,),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
