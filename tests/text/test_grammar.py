"""The grammar step: what may come next, in any order of steps, copied and saved."""

import copy
import threading
from string import ascii_lowercase

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

pytest.importorskip("llguidance")

from tamis.formats.gguf import GGUFFile
from tamis.formats.vocab import Vocab
from tamis.sampling.base import Candidates, SamplerError
from tamis.sampling.chain import Sampler
from tamis.sampling.choose import Dist, Greedy
from tamis.sampling.grammar import Grammar, compile_gbnf, gbnf_grammar, json_grammar
from tamis.sampling.vocabulary import Bytes, GrammarTokenizer
from tamis.text.tokenizer import tokenizer_for


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def tokenizer(request, tmp_path_factory):
    """Of both kinds: BPE and SPM."""
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    with GGUFFile(write_tiny_model(path, TinySpec(request.param))) as file:
        return tokenizer_for(Vocab.from_gguf(file))


@pytest.fixture(scope="module")
def compiled(tokenizer):
    return GrammarTokenizer(tokenizer, tokenizer.n_vocab)


def all_of(n_vocab):
    return Candidates(np.arange(n_vocab, dtype=np.int32), np.zeros(n_vocab, np.float32))


def written(sampler, tokenizer, seed):
    """The text that random logits and a grammar make, to its end."""
    rng, ids = np.random.default_rng(seed), []
    while not ids or ids[-1] not in tokenizer.eog:
        ids.append(sampler.sample(rng.normal(0, 3, tokenizer.n_vocab).astype(np.float32)))
        sampler.accept(ids[-1])
        assert len(ids) < 50
    return b"".join(tokenizer.piece(i) for i in ids).decode()


def test_random_logits_write_what_the_grammar_says(tokenizer, compiled):
    text = gbnf_grammar('root ::= ("the " | "an ") [a-c]{2} "!"?')
    for seed in range(5):
        sampler = Sampler.chain([Grammar(text, compiled), Dist(seed)], tokenizer.n_vocab)
        found = written(sampler, tokenizer, seed)
        assert found.rstrip("!")[:-2] in ("the ", "an ")
        assert set(found.rstrip("!")[-2:]) <= set("abc")


def test_only_the_end_is_allowed_after_the_last_rule(tokenizer, compiled):
    step = Grammar(gbnf_grammar('root ::= "the"'), compiled)
    for token in tokenizer.encode("the", add_special=False):
        step.accept(token)
    allowed = step.apply(all_of(tokenizer.n_vocab)).ids.tolist()
    assert allowed == sorted(tokenizer.eog)
    step.accept(allowed[0])
    step.accept(0)  # after the end nothing counts


def test_a_token_that_is_not_allowed_is_an_error(tokenizer, compiled):
    step = Grammar(gbnf_grammar('root ::= "the"'), compiled)
    with pytest.raises(SamplerError, match="does not allow token"):
        step.accept(tokenizer.encode("w", add_special=False)[-1])
    few = all_of(tokenizer.n_vocab).take(sorted(tokenizer.eog), sorted=False)
    with pytest.raises(SamplerError, match="none of the tokens left"):
        step.apply(few)


def test_a_grammar_that_outgrows_its_limits_on_the_way_says_so():
    step = Grammar(
        gbnf_grammar('root ::= b{0,1000}\nb ::= ("a" | b "a" | "a" b){0,400}'),
        GrammarTokenizer(Bytes(), Bytes.n_vocab),
    )

    def go_on():
        for letter in b"a" * 100:
            step.mask()
            step.accept(letter)

    with pytest.raises(SamplerError, match="items"):
        go_on()


def test_copies_and_saved_states_go_on_alone(tokenizer, compiled):
    text = gbnf_grammar('root ::= "ab" | "cd"')
    a, c, d = (tokenizer.encode(x, add_special=False)[-1] for x in "acd")
    step = Grammar(text, compiled)
    step.accept(c)
    other = copy.deepcopy(step)
    step.reset()
    assert set(step.apply(all_of(tokenizer.n_vocab)).ids.tolist()) >= {a, c}
    assert d in other.apply(all_of(tokenizer.n_vocab)).ids
    step.set_state(other.get_state())
    assert step.apply(all_of(tokenizer.n_vocab)).ids.tolist() == [d]
    sampler = Sampler.chain([Grammar(text, compiled), Greedy()], tokenizer.n_vocab)
    assert sampler.get_state()["steps"][0]["step"] == "Grammar"


def test_wrong_grammars_and_schemas_are_errors():
    for text in ("root ::= (", "no rules at all", 'root ::= missing "x"'):
        with pytest.raises(SamplerError, match="grammar"):
            gbnf_grammar(text)
    with pytest.raises(SamplerError, match=r"schema|grammar"):
        json_grammar({"type": "no such type"})


def chained_refs(n):
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{n}": {"type": "string"}}}


def chained_rules(n, row='a{} | "(" root ")"'):
    rules = "".join(f"a{i} ::= {row.format(i + 1)}\n" for i in range(n))
    return f'root ::= a0\n{rules}a{n} ::= "x"\n'


def test_grammars_too_deep_for_the_native_stack_are_errors():
    with pytest.raises(SamplerError, match="signal 11"):
        gbnf_grammar(chained_rules(1450))
    with pytest.raises(SamplerError, match=r"3001 rules .* at most 1500"):
        gbnf_grammar(chained_rules(3000))
    deep = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(SamplerError, match="nested too deeply"):
        json_grammar(deep)


def test_chains_that_lead_straight_on_take_no_stack():
    assert json_grammar(chained_refs(6000)) == json_grammar({"type": "string"})
    assert gbnf_grammar(chained_rules(3000, "a{}")) == gbnf_grammar('root ::= "x"')


def test_long_grammars_that_are_not_deep_are_taken_and_wrong_ones_named():
    words = " | ".join(f'"word{i}"' for i in range(500))
    assert gbnf_grammar(f"root ::= {words}")
    with pytest.raises(SamplerError, match="grammar: "):
        gbnf_grammar(f"root ::= {words} | (")
    assert json_grammar({"enum": [f"word{i}" for i in range(900)]})
    with pytest.raises(SamplerError, match="no such type"):
        json_grammar({"enum": [f"word{i}" for i in range(900)], "type": "no such type"})


def test_every_grammar_of_few_levels_compiles_on_a_quarter_of_its_stack():
    names = [a + b for a in ascii_lowercase for b in ascii_lowercase]
    text, i = "root::=aa\n", 0
    while i < 390:
        text += f'{names[i]}::={names[i + 1]}|"("root")"\n'
        i += 1
    text += f'{names[i]}::="x"\n'
    found, size = [], threading.stack_size(2 << 20)
    try:
        thread = threading.Thread(target=lambda: found.append(compile_gbnf(text)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
    assert found
