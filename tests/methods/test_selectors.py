"""The contract of a selector, for every method of the package: what a Selection may hold.

A method added to runner/select is found here; it needs a line in EXAMPLES and one in COVERING.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from guarded import step_of
from method_roles import in_its_roles
from precompiled import compile_for
from tiny_models import like_qwen2, write_tiny_model

import tamis.select.notation
from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import KVView
from tamis.select.base import (
    Recording,
    SelectorShape,
    SelectorState,
)
from tamis.select.notation import (
    MethodError,
    methods,
    of_layers,
    parse_method,
    parse_methods,
)

N_UBATCH = 64
CHUNKS = [1, 37, 64, 70]  # prompt lengths, one after the other: within a chunk, whole, and beyond
N_DECODE = 40


class Example(NamedTuple):
    """A method with small numbers, and what they promise at decode."""

    text: str
    budget: int | None  # most positions a row keeps, whole blocks counted; None: all
    recent: int  # last positions that every row keeps


FEW_LINES = "n_vertical=9,n_slash=4,sink=3,local=4"
EXAMPLES = {
    "dense": [Example("dense", None, 10_000)],
    "window": [
        Example("window:sink=4,recent=32,block=16", 16 + 16 + 32, 32),
        Example("window:sink=0,recent=1,block=1", 1, 1),
    ],
    "topk": [
        Example("topk:k=24,sink=4,recent=8", 36, 8),
        Example("topk:k=24,sink=4,recent=8,rows=head", 36, 8),
        Example("topk:k=0,sink=0,recent=1", 1, 1),
    ],
    "tactic": [
        Example("tactic:c=4,period=16,local=8", None, 8),
        Example("tactic:P=0.5,c=4,n_iter=2,period=9,local=8,rows=head,seed=3", None, 8),
        Example("tactic:P=0.5,c=1,period=7,sink=0,local=1,outside=apart", None, 1),
        Example("tactic:P=0.5,c=4,period=9,local=8,rows=joint,sample=16", None, 8),
    ],
    "quest": [
        Example("quest:budget=64,page=8,dense=0,sink=4,recent=8", 64, 8),
        Example("quest:budget=64,page=8,dense=0,sink=4,recent=8,rows=group", 64, 8),
        Example("quest:budget=5,page=5,dense=0,sink=0,recent=1", 5, 1),
    ],
    "hip": [
        Example("hip:k=32,b_k=4,l_d=0,sink=4,local=16", 4 + 32 + 16 + 15, 16),
        Example("hip:k=32,b_k=4,b_sk=2,r_m=4,l_d=0,sink=4,local=16,rows=group", 67, 16),
        Example("hip:k=8,b_k=2,r_m=8,l_d=0,sink=0,local=1,span=6", 3 * 8 + 8, 1),
        Example("hip:k=1,b_k=1,l_d=0,sink=0,local=1,rep=centre", 2, 1),
        Example("hip:k=32,b_k=4,l_d=0,sink=4,local=16,rep=centre,rows=head", 55, 16),
        Example("hip:k=6,b_k=3,b_sk=2,b_q=16,b_sq=3,l_d=0,sink=0,local=1,rows=head", 18, 1),
        Example("hip:k=6,b_k=3,b_q=16,b_sq=3,l_d=0,sink=0,local=1,rep=centre", 18, 1),
    ],
    "cpe": [
        Example("cpe:k=24,sink=4,local=8,s=4,rows=head", 4 + 8 + 24 + 2 * 8, 8),
        Example("cpe:k=24,sink=4,local=8,s=4", None, 8),
        Example("cpe:k=24,sink=4,local=8,r=3,tau=-1,rows=group", 4 + 8 + 24 + 6 * 8, 8),
        Example("cpe:k=1,sink=0,local=1,tau=1,phi=1,rows=head", 2, 1),
        Example("cpe:s=0,sink=4,local=8", None, 8),
        Example("cpe:s=0,sink=0,local=1,phi=0.1,alpha=2", None, 1),
        Example("cpe:s=0,phi=1,psi=0.2,sink=4", None, 10_000),
        Example("cpe:s=0,phi=1,psi=0.1,gamma=2,kv=reuse,sink=0", None, 10_000),
    ],
    "delta": [
        Example("delta(window:sink=4,recent=32,block=16)", None, 32),
        Example("delta(window:sink=4,recent=16,block=1):gamma=8", None, 16),
        Example("delta(window:sink=0,recent=1,block=1):gamma=7,mode=recompute", None, 1),
        Example("delta(cpe:local=8,sink=4):gamma=5", None, 8),
        Example(f"delta(vertical_slash(window:recent=9):{FEW_LINES})", None, 9),
    ],
    "beyond": [
        Example("beyond(window:sink=4,recent=32,block=16):least=0", None, 32),
        Example("beyond(delta(window:sink=4,recent=16,block=1)):least=64", None, 16),
    ],
    "metered": [
        Example("metered(window:sink=4,recent=32,block=16):mass=0.5", 16 + 16 + 32, 32),
        Example("metered(topk:k=24,sink=4,recent=8,rows=head):mass=0,samples=16", 36, 8),
    ],
    "tail": [
        Example("tail(window:sink=4,recent=32,block=16):samples=16", 16 + 16 + 32, 32),
        Example("tail(topk:k=24,sink=4,recent=8,rows=head):samples=32,bound=parts", 36, 8),
        Example("tail(quest:budget=64,page=8,dense=0):samples=16,even=0.3,delta=0.01", 64, 8),
    ],
    "twilight": [
        Example("twilight(window:sink=4,recent=32,block=16):p=0.9", 16 + 16 + 32, 0),
        Example("twilight(topk:k=24,sink=4,recent=8,rows=head):p=0.5", 36, 0),
        Example("twilight(magicpig:K=3,L=6,dense=0,recent=8)", None, 0),
        Example("twilight(dense):p=0.8", None, 0),
    ],
    "retroinfer": [
        Example("retroinfer:c=4,period=16,local=8,retrieve=0.2", None, 8),
        Example("retroinfer:c=4,period=9,sink=0,local=1,estimate=0", None, 1),
    ],
    "double_p": [
        Example("double_p:c=4,period=16,local=8", None, 8),
        Example("double_p:c=1,p1=0.5,p2=0,period=7,sink=0,local=1", None, 1),
    ],
    "auto": [
        Example("auto", None, 10_000),
        Example("auto:least=0,part=8,mass=0.3", None, 200),
    ],
    "vertical_slash": [
        Example("vertical_slash:n_vertical=20,n_slash=12,sink=4,local=8,last_q=16", None, 8),
        Example("vertical_slash:n_vertical=1,n_slash=1,sink=0,local=1,last_q=1", None, 1),
        Example(f"vertical_slash(hip:k=9,b_k=3,l_d=1,local=9):{FEW_LINES}", None, 4),
        Example(f"vertical_slash(hip:k=8,l_d=0,rows=head):{FEW_LINES}", None, 4),
        Example(f"vertical_slash(cpe:s=0,local=1,psi=0.2):{FEW_LINES}", None, 4),
    ],
    "lfps": [
        Example("lfps:budget=0.1,sink=4,local=8,s=4", 4 + 8 + 25, 8),
        Example("lfps:a=0,budget=0.2,sink=0,local=1,bypass=none", 1 + 51, 1),
        Example("lfps:epsilon=0,local=8,bypass=mean", 4 + 8 + 5, 8),
        Example("lfps:epsilon=0.1,local=8,r=0.5", 4 + 8 + 5, 8),
        Example("lfps:budget=0.1,sink=4,local=8,s=4,rows=head", 4 + 8 + 25, 8),
        Example("lfps:epsilon=0.1,local=8,rows=head,renew=1", 4 + 8 + 5, 8),
    ],
    "h2o": [
        Example("h2o:budget=40,sink=4,s=8", 40, 20),
        Example("h2o:budget=40,recent=0.2,sink=0,s=1,rows=head", 40, 8),
        Example("h2o:budget=1,sink=0", 1, 1),
    ],
    "double_sparsity": [
        Example("double_sparsity:budget=40,sink=4,recent=8,s=4", 40, 8),
        Example("double_sparsity:budget=40,sink=0,recent=8,s=1,label=0.01,rows=head", 40, 8),
        Example("double_sparsity:budget=1,sink=0,recent=1,label=1", 1, 1),
    ],
    "hshare": [
        Example("hshare:budget=40,sink=4,recent=8", 40, 8),
        Example("hshare:budget=40,layers=0.5,heads=0.3,period=5,sink=0,recent=1", 40, 1),
        Example("hshare:budget=40,layers=0.1,heads=0.1,period=1,sink=4,recent=8,rows=group", 40, 8),
    ],
    "magicpig": [
        Example("magicpig:K=3,L=6,dense=0,sink=4,recent=8,period=9", None, 8),
        Example("magicpig:K=3,L=6,dense=1,sink=0,recent=1,seed=3", None, 1),
    ],
    "hyperattention": [
        Example("hyperattention:block=16,sample=9,recent=8,size=8,bits=3", None, 8),
        Example("hyperattention:block=0,sample=0,recent=1,sink=0", None, 1),
    ],
    "bigbird": [
        Example("bigbird:block=16,sink=16,recent=32,random=32", 16 + 16 + 32 + 32, 32),
        Example("bigbird:block=1,sink=0,recent=1,random=0", 1, 1),
        Example("bigbird:block=7,sink=3,recent=9,random=20,seed=2", 7 + 15 + 21, 9),
    ],
    "snapkv": [
        Example("snapkv:budget=40,window=8,sink=4", 40 + N_DECODE, 9),
        Example("snapkv:budget=40,window=8,sink=4,kernel=3,pool=mean,rows=head", 40 + N_DECODE, 9),
        Example("snapkv:budget=60,window=8,ada=0.8,beta=20,rows=head", None, 9),
        Example("snapkv:budget=9,window=9,kernel=1,sink=0", 9 + N_DECODE, 10),
    ],
}
# A method a layer; of Gemma 3's seven layers the sixth has no window.
PER_LAYER = {
    "qwen2": [
        Example("window:sink=4,recent=32,block=16@0+topk:k=24,sink=4,recent=8@1", None, 8),
        Example("tactic:c=4,period=16,local=8@1", None, 8),
        Example("lfps:budget=0.1,sink=4,local=8,s=4@0+hshare:budget=40,recent=8@1", None, 8),
        Example("hip:k=32,b_k=4,r_m=4,local=16@1+cpe:k=24,local=8,s=4@0", None, 8),
        Example("h2o:budget=40,sink=4,s=8@0+snapkv:budget=40,window=8@1", None, 8),
    ],
    "gemma3": [
        Example("topk:k=24,sink=4,recent=8@0-2+lfps:budget=0.1,local=8,s=4@3-6", None, 8),
        Example("hshare:budget=40,recent=8@5+tactic:c=4,period=16,local=8@0-4", None, 8),
    ],
}
# Numbers that cover any context of these tests: the answer is dense attention's.
COVERING = {
    "dense": ["dense"],
    "window": ["window:recent=512", "window:sink=512,recent=1"],
    "cpe": [
        "cpe:k=512,phi=1,psi=1",
        "cpe:local=512,psi=1",
        "cpe:s=0,phi=1,psi=1",
        "cpe:s=0,sink=512",
    ],
    "beyond": [
        "beyond(window:recent=512)",
        "beyond(window:recent=9):least=512",
        "beyond(delta(window:recent=512)):least=9",
    ],
    "delta": [
        "delta(dense)",
        "delta(window:recent=512):gamma=7",
        "delta(window:recent=16):gamma=1",
        "delta(window:recent=16):gamma=512",
        "delta(cpe:psi=1):gamma=1,mode=recompute",
    ],
    "metered": ["metered(window:recent=512)", "metered(window:recent=9):mass=1"],
    "tail": ["tail(window:recent=512)", "tail(window:recent=9):most=0"],
    "twilight": ["twilight(window:recent=512):p=1", "twilight(dense):p=1"],
    "retroinfer": ["retroinfer:local=512", "retroinfer:c=4,local=8,retrieve=1"],
    "double_p": ["double_p:local=512", "double_p:c=4,local=8,p1=1,p2=1"],
    "auto": ["auto", "auto:least=0,mass=1"],
    "lfps": ["lfps:local=512", "lfps:sink=512,local=1"],
    "topk": ["topk:k=512", "topk:k=512,rows=head", "topk:k=0,recent=512"],
    "tactic": [
        "tactic:local=512",
        "tactic:P=1,c=4,local=8",
        "tactic:P=1,c=4,local=8,rows=head",
        "tactic:P=1,c=4,local=8,rows=joint,sample=9",
    ],
    "hip": ["hip:l_d=0", "hip:k=256,b_k=5,l_d=0,local=1,rows=group", "hip:k=2,l_d=9,r_m=4"],
    "vertical_slash": [
        "vertical_slash:n_vertical=512",
        "vertical_slash:n_slash=512",
        "vertical_slash(dense)",
        "vertical_slash(window:recent=512):n_slash=1,local=1",
        "vertical_slash(cpe:psi=1,phi=0.3,sink=0,local=1):n_slash=512",
    ],
    "h2o": ["h2o:budget=512", "h2o:budget=512,recent=0,sink=0,rows=head"],
    "snapkv": ["snapkv:budget=512", "snapkv:budget=512,window=1,ada=1,rows=head"],
    "double_sparsity": ["double_sparsity:budget=512", "double_sparsity:budget=512,rows=head"],
    "hshare": ["hshare:budget=512", "hshare:budget=512,layers=0.5,heads=0.5,sink=0,rows=group"],
    "magicpig": [
        "magicpig:recent=512,L=6,K=3",
        "magicpig:sink=512,L=6,K=3",
        "magicpig:dense=9",
    ],
    "hyperattention": [
        "hyperattention:recent=512",
        "hyperattention:sink=512",
        "hyperattention:l_d=9",
    ],
    "bigbird": ["bigbird:recent=512", "bigbird:random=512,sink=0", "bigbird:sink=512,block=5"],
    "quest": ["quest:dense=0", "quest:dense=0,page=7,rows=group", "quest:budget=64,dense=9"],
}
OVER_ANOTHER = ("beyond", "delta", "metered", "tail", "twilight")  # which need one in parentheses
DEFAULTS = [Example(name, None, 1) for name in methods() if name not in OVER_ANOTHER]
ALL = [*DEFAULTS, *(e for name in EXAMPLES for e in EXAMPLES[name])]
# With windows in some layers: of each method one, for what its numbers do was seen without.
WITH_WINDOWS = [*DEFAULTS, *(EXAMPLES[name][0] for name in EXAMPLES)]
ON_BOTH = [
    *(("qwen2", e) for e in ALL),
    *(("gemma3", e) for e in WITH_WINDOWS),
    *((arch, e) for arch, examples in PER_LAYER.items() for e in examples),
]
# What was chosen is not all that is read: the floor reads the rest again, beside the Selection.
READ_AGAIN = {"metered(window:recent=9):mass=1", "tail(window:recent=9):most=0"}
COVERING_ON_BOTH = [
    *(("qwen2", text) for texts in COVERING.values() for text in texts),
    *(("gemma3", texts[0]) for texts in COVERING.values()),
    ("qwen2", "topk:k=512@1"),
    ("qwen2", "tactic:local=512@0+lfps:local=512@1"),
    ("gemma3", "lfps:local=512@2-5"),
]
of_example = pytest.mark.parametrize(
    ("engine", "example"), ON_BOTH, indirect=["engine"], ids=lambda x: getattr(x, "text", x)
)


class Spy:
    """A selector's state that remembers the Selections it hands out."""

    def __init__(self, state):
        self._state, self._phase, self._seen = state, state.phase(0), {}

    def __getattr__(self, name):
        return getattr(self._state, name)

    def open(self, shape):
        return self

    def phase(self, step):
        self._phase = self._state.phase(step)
        return self._phase

    def prompt_phase(self, pos):
        self._chunk = self._state.prompt_phase(pos)
        return self._chunk

    def select_prefill(self, rec, layer, q, kv):
        self._seen[self._chunk, layer] = self._state.select_prefill(rec, layer, q, kv)
        return self._seen[self._chunk, layer]

    def select_decode(self, rec, layer, q, kv):
        self._seen[self._phase, layer] = self._state.select_decode(rec, layer, q, kv)
        return self._seen[self._phase, layer]

    def prefilled(self, layer):
        return self._seen[self._chunk, layer]

    def decoded(self, layer):
        return self._seen[self._phase, layer]


class SpyMethod:
    def __init__(self, method, spies):
        self._method, self._spies = method, spies

    def open(self, shape):
        self._spies.append(Spy(self._method.open(shape)))
        return self._spies[-1]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory):
    """Gives the engine of an architecture, the same one to all tests."""
    engines = {}

    def loaded(arch):
        if arch not in engines:
            path = tmp_path_factory.mktemp(arch) / "m.gguf"
            write_tiny_model(path, like_qwen2(arch))
            engines[arch] = engine = Engine.load(path, n_threads=2)
            texts = [e.text for each, e in ON_BOTH if each == arch]
            texts += [text for each, text in COVERING_ON_BOTH if each == arch]
            sizes = {"n_ctx": 256, "n_ubatch": N_UBATCH}
            compile_for(engine, [sizes | in_its_roles(text) for text in texts])
        return engines[arch]

    yield loaded
    for engine in engines.values():
        engine.close()


@pytest.fixture(params=["qwen2", "gemma3"])
def engine(request, engine_of):
    """Two architectures: full attention, and layers with a window of 8 beside full ones."""
    return engine_of(request.param)


@pytest.fixture
def open_session(engine, monkeypatch):
    """Gives a session with a method in all its roles, and the spy on its selector."""
    spies = []
    monkeypatch.setattr(
        tamis.select.notation,
        "parse_methods",
        lambda *texts: SpyMethod(parse_methods(*texts), spies),
    )

    def opened(text):
        session = engine.session(n_ctx=256, n_ubatch=N_UBATCH, **in_its_roles(text))
        return session, spies[-1]

    return opened


def tokens(engine, n):
    return np.random.default_rng(n).integers(0, engine.hp.n_vocab, n).tolist()


def rows_of(sel, n_tok):
    """[query block][row] -> indices, after a call of n_tok tokens, with what any CSR must hold."""
    n_block = -(-n_tok // sel.q_block)
    indptr = sel.indptr[: n_block * sel.n_row + 1].tolist()
    assert indptr[0] == 0
    assert indptr == sorted(indptr)
    assert indptr[-1] <= len(sel.indices)
    rows = [sel.indices[a:b].tolist() for a, b in pairwise(indptr)]
    if sel.log_weight is not None:
        assert np.isfinite(sel.log_weight[: indptr[-1]]).all()
    return [rows[i * sel.n_row : (i + 1) * sel.n_row] for i in range(n_block)]


def positions(row, sel, newest):
    """The positions up to `newest` that a row's blocks hold."""
    return {j for i in row for j in range(i * sel.block, (i + 1) * sel.block) if j <= newest}


def check_rows(sel, n_tok, pos, recent):
    """What holds of any Selection for a call of n_tok tokens from pos on; recent: kept before each.

    A layer's own window may be shorter than what a method keeps: callers pass the smaller.
    """
    for b, rows in enumerate(rows_of(sel, n_tok)):
        oldest = pos + b * sel.q_block
        newest = pos + min(n_tok, (b + 1) * sel.q_block) - 1
        for row in rows:
            assert row == sorted(set(row)), "ascending and unique"
            assert all(0 <= i <= newest // sel.block for i in row), "within the filled positions"
            wanted = set(range(max(0, oldest - recent + 1), newest + 1))
            assert wanted <= positions(row, sel, newest), "the queries' own recent positions"


def recent_of(engine, layer, recent):
    window = engine.model.window(layer)
    return min(recent, window) if window else recent


def follow(engine, session, spy, example):
    """Append chunks, then tokens, checking every layer's Selection; logits and rows of the end."""
    ids = iter(tokens(engine, sum(CHUNKS) + N_DECODE))
    layers = range(engine.hp.n_layer)
    for n in CHUNKS:
        session.prefill([next(ids) for _ in range(n)])
        last = (n - 1) % N_UBATCH + 1  # the last piece of what was appended
        for layer in layers:
            recent = recent_of(engine, layer, example.recent)
            check_rows(spy.prefilled(layer), last, session.n_past - last, recent)
    for token in ids:
        logits = session.decode(token)
        p = session.n_past - 1
        for layer in layers:
            sel = spy.decoded(layer)
            check_rows(sel, 1, p, recent_of(engine, layer, example.recent))
            if example.budget is not None and not engine.model.window(layer):
                (rows,) = rows_of(sel, 1)
                assert max(len(positions(row, sel, p)) for row in rows) <= example.budget
    return logits, [rows_of(spy.decoded(layer), 1) for layer in layers]


def test_every_method_has_examples_and_covering_numbers():
    assert set(EXAMPLES) == set(COVERING) == set(methods())
    for name in EXAMPLES:
        texts = [example.text for example in EXAMPLES[name]] + COVERING[name]
        assert {text.partition(":")[0].partition("(")[0] for text in texts} == {name}


@of_example
def test_a_selection_keeps_the_contract_and_repeats_itself(engine, open_session, example):
    logits, rows = follow(engine, *open_session(example.text), example)
    again, rows_again = follow(engine, *open_session(example.text), example)
    assert rows == rows_again
    np.testing.assert_array_equal(logits, again)
    assert np.isfinite(logits).all()


@of_example
def test_what_was_truncated_leaves_no_trace(engine, open_session, example):
    session, spy = open_session(example.text)
    ids, other = tokens(engine, 100), tokens(engine, 130)
    fresh, fresh_spy = open_session(example.text)
    # The same chunks: in prefill, queries of one block share what any of them reads.
    fresh.prefill(ids[:60])
    fresh.prefill(ids[60:])
    session.prefill(ids[:60])
    session.prefill(other)
    session.decode(1)
    session.truncate(60)
    session.prefill(ids[60:])
    np.testing.assert_array_equal(session.decode(5), fresh.decode(5))
    for layer in range(engine.hp.n_layer):
        assert rows_of(spy.decoded(layer), 1) == rows_of(fresh_spy.decoded(layer), 1)


@of_example
def test_a_loaded_session_goes_on_as_the_saved_one(engine, open_session, example, tmp_path):
    """The file has tokens and the KV cache; a method's state is made again from these."""
    session, spy = open_session(example.text)
    session.prefill(tokens(engine, 100))
    session.save(tmp_path / "s")
    other, other_spy = open_session(example.text)
    other.prefill(tokens(engine, 130))
    other.decode(1)
    other.load(tmp_path / "s")
    for token in (5, 6):
        np.testing.assert_array_equal(other.decode(token), session.decode(token))
        for layer in range(engine.hp.n_layer):
            rows = rows_of(spy.decoded(layer), 1)
            assert rows_of(other_spy.decoded(layer), 1) == rows


@pytest.mark.parametrize("example", WITH_WINDOWS, ids=lambda x: x.text)
def test_a_context_that_ends_within_a_page_is_read_to_its_end(engine_of, example):
    """As in a context of whole pages, to the bit; rows of scratch are of whole pages."""
    engine = engine_of("qwen2")
    ids, methods_of = tokens(engine, 243), in_its_roles(example.text)
    found = []
    for n_ctx in (len(ids), 256):
        with engine.session(n_ctx=n_ctx, n_ubatch=N_UBATCH, **methods_of) as session:
            first = session.prefill(ids[:225])
            found.append([first, *(session.decode(i) for i in ids[225:])])
    np.testing.assert_array_equal(*found)
    assert np.isfinite(found).all()


def test_a_shape_of_no_whole_page_is_refused():
    with pytest.raises(ValueError, match="n_ctx is 1001, expected a multiple of 64"):
        SelectorShape(1, 2, 1, 16, n_ctx=1001, n_ubatch=16, window=(0,))


@pytest.mark.parametrize(("engine", "text"), COVERING_ON_BOTH, indirect=["engine"])
def test_numbers_that_cover_everything_are_dense_attention(engine, open_session, text):
    session, spy = open_session(text)
    dense, dense_spy = open_session("dense")
    ids = tokens(engine, 150)
    found, expected = [], []
    for each, logits in ((session, found), (dense, expected)):
        logits.append(each.prefill(ids[:100]))
        logits += [each.decode(i) for i in ids[100:]]
    # Other blocks: float32 sums in another order, through all layers.
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    if text in READ_AGAIN:
        return
    for layer in range(engine.hp.n_layer):
        kept, every = spy.decoded(layer), dense_spy.decoded(layer)
        p, own = session.n_past - 1, engine.model.window(layer)
        ((full, *_),) = rows_of(every, 1)
        seen = {j for j in positions(full, every, p) if not own or j > p - own}
        for row in rows_of(kept, 1)[0]:
            assert seen <= positions(row, kept, p)


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (("nonsense", "dense"), "'nonsense' is not known; attn takes auto, bigbird, cpe, dense"),
        (("dense", "quest"), "'quest' is no method of prefill: it goes with attn; prefill takes"),
        (("window(hip)", "dense"), "window takes no method in parentheses"),
        (("window(hip", "dense"), "expected name:param=value"),
        (("window)", "dense"), "expected name:param=value"),
        (("window:wide=3", "dense"), "'wide=3' in 'window:wide=3': window takes sink="),
        (("dense", "window:recent=few"), "expected a whole number"),
        (("dense", "window:recent=0"), "recent is 0, expected recent >= 1"),
        (("dense", "window@0-3"), "'window@0-3': prefill takes one method for all layers"),
        (("lfps@0+tactic", "dense"), "'tactic' in 'lfps@0+tactic': expected METHOD@FIRST-LAST"),
        (("lfps@4-2", "dense"), "'lfps@4-2' in 'lfps@4-2': expected METHOD@FIRST-LAST"),
        (("lfps@0-3+topk@2", "dense"), "layer 2 has 2 methods, expected one"),
        (("nonsense@0", "dense"), "'nonsense' is not known"),
        (("delta(window)@0", "dense"), "'delta' is no method of attn: it goes with prefill"),
    ],
)
def test_a_method_that_is_not_there_is_an_error_with_its_remedy(texts, complaint):
    with pytest.raises(MethodError) as error:
        parse_methods(*texts)
    assert complaint in str(error.value)


def test_equal_methods_of_both_roles_share_a_state_and_others_have_their_own():
    shape = SelectorShape(1, 2, 1, 16, n_ctx=128, n_ubatch=16, window=(0,))
    assert parse_methods("cpe:s=4", "cpe:s=4") == parse_method("cpe:s=4")
    both = parse_methods("quest:dense=0", "window:recent=16,block=16").open(shape)
    kv = KVView(*(np.zeros((2, 1, 64, 16), np.float16) for _ in "kv"), *np.zeros((2, 2), np.int32))
    q = np.zeros((16, 2, 16), np.float32)
    chunk = Recording(Program(), step_of(0), 16, 16)
    one = Recording(Program(), step_of(0), 1, 1)
    both.select_prefill(chunk, 0, q, kv)
    both.select_decode(one, 0, q, kv)
    assert {spec.op.name for spec in chunk.program.specs} == {"select_window"}
    assert "quest_score" in {spec.op.name for spec in one.program.specs}


def test_the_text_of_a_method_a_layer():
    text = "lfps:a=0.1@0-1+tactic@3"
    assert of_layers(["lfps:a=0.1", "lfps:a=0.1", "dense", "tactic"]) == text
    assert of_layers(["tactic"] * 3) == "tactic"
    assert of_layers(["dense"] * 3) == "dense"
    parts = {part.method: part.layers for part in parse_method(text).parts}
    assert parts == {parse_method("lfps:a=0.1"): (0, 1), parse_method("tactic"): (3,)}
    assert parse_method("topk@2+lfps@1+topk@0").parts[0].layers == (0, 2)


@pytest.mark.parametrize("engine", ["qwen2"], indirect=True)
def test_lines_are_not_joined_with_keys_that_have_weights(engine):
    with pytest.raises(ValueError, match=r"vertical_slash\(HyperAttention\): expected a method"):
        engine.session(n_ctx=256, prefill="vertical_slash(hyperattention)")
    engine.session(n_ctx=256, prefill="hyperattention").close()


def test_layers_that_are_not_there_are_an_error(engine):
    n = engine.hp.n_layer
    with pytest.raises(ValueError, match=f"names layer {n}, the model has {n}: name layers 0 to"):
        engine.session(attn=f"topk@0-{n}")


@pytest.mark.parametrize("engine", ["qwen2"], indirect=True)
def test_a_layer_is_served_by_its_method_and_others_are_dense(engine, open_session):
    """In the first layer queries are those of a model with that method alone."""
    ids = tokens(engine, 150)
    spies = {}
    for text in ("topk:k=9", "topk:k=9@0", "topk:k=9@1", "dense"):
        session, spies[text] = open_session(text)
        session.prefill(ids)
        session.decode(1)
    rows = {
        text: [rows_of(spy.decoded(layer), 1) for layer in (0, 1)] for text, spy in spies.items()
    }
    assert rows["topk:k=9@0"][0] == rows["topk:k=9"][0] != rows["dense"][0]
    assert rows["topk:k=9@0"][1] == rows["dense"][1]
    assert rows["topk:k=9@1"][0] == rows["dense"][0]
    assert len(rows["topk:k=9@1"][1][0][0]) == len(rows["topk:k=9"][1][0][0]) < 150


def test_one_method_decodes_what_another_has_read(engine):
    """The prompt is dense: so is the first token after it, whatever decodes."""
    ids = tokens(engine, 100)
    sessions = [
        engine.session(n_ctx=256, n_ubatch=N_UBATCH, **methods)
        for methods in (
            {},
            {"attn": "window:recent=8,block=1"},
            {"prefill": "window:recent=8,block=1"},
        )
    ]
    dense, decodes, reads = (session.prefill(ids) for session in sessions)
    np.testing.assert_array_equal(dense, decodes)
    assert np.abs(dense - reads).max() > 1e-3
    dense, decodes, _ = (session.decode(5) for session in sessions)
    assert np.abs(dense - decodes).max() > 1e-3


@pytest.mark.parametrize("prefill", ["dense", "window:recent=8,block=1"])
def test_a_decode_method_sees_the_queries_of_any_prefill(engine, prefill):
    """lfps starts its tables from the prompt's last queries: without them it would choose else."""
    ids = tokens(engine, 100)
    state = engine.session(n_ctx=256, attn="lfps:s=32", prefill=prefill)
    state.prefill(ids)
    past = state._stages[0].state._for_decode._queries.counters[0]
    full = [i for i in range(engine.hp.n_layer) if not engine.model.window(i)]
    assert (np.sort(past[full]) == np.arange(68, 100)).all()


def test_one_full_selection_serves_layers_of_the_same_blocks_only():
    shape = SelectorShape(2, 2, 1, 16, n_ctx=128, n_ubatch=16, window=(0, 0))
    state = SelectorState(shape)
    rec = Recording(Program(), step_of(0), 1, 1)
    coarse, fine = state.windowed(rec, 4, 32, 64), state.windowed(rec, 4, 32, 16)
    assert (coarse.block, fine.block) == (64, 16)
    assert state.windowed(rec, 4, 32, 16) is fine
    assert len(rec.program) == 2
