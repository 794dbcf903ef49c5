"""tamis.Llama does what programs written for llama_cpp.Llama expect of it."""

import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.compat import (
    Llama,
    LlamaDiskCache,
    LlamaGrammar,
    LlamaPromptLookupDecoding,
    LlamaRAMCache,
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    StoppingCriteriaList,
)
from tamis.bindings.drop_in import chat as chats
from tamis.bindings.drop_in.completion import Piece
from tamis.bindings.drop_in.tools import allowed, call_schema, plain_messages
from tamis.engine.engine import Engine
from tamis.fetch import registry as models
from tamis.sampling.chain import SamplerError, SamplerParams
from tamis.sampling.grammar import Grammar
from tamis.sampling.vocabulary import Bytes, GrammarTokenizer

PROMPT = "the hand over there is of an other"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "pick",
            "parameters": {
                "type": "object",
                "properties": {"it": {"enum": ["a", "b"]}},
                "required": ["it"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec()))


@pytest.fixture(scope="module")
def shared(path):
    llama = Llama(path, n_ctx=1024, seed=1, verbose=False)
    yield llama
    llama.close()


@pytest.fixture
def llm(shared):
    shared.set_cache(None)
    shared.set_seed(1)
    shared.draft_model = None
    shared.reset()
    return shared


def text_of(completion):
    return completion["choices"][0]["text"]


def delta_of(chunk):
    return chunk["choices"][0]["delta"]


def test_a_completion_is_the_engines_greedy_text_in_openais_shape(llm, path):
    engine = Engine.load(path)
    session = engine.session(n_ctx=256)
    ids = engine.tokenizer.encode(PROMPT)
    pieces = list(session.generate(ids, SamplerParams(temp=0), max_tokens=12))
    engine.close()
    found = llm(PROMPT, max_tokens=12, temperature=0)
    assert text_of(found) == "".join(p.text for p in pieces)
    assert found["id"].startswith("cmpl-")
    assert found["object"] == "text_completion"
    assert found["model"] == path
    assert found["choices"][0]["finish_reason"] == "length"
    n = len(ids)
    usage = {"prompt_tokens": n, "completion_tokens": 12, "total_tokens": n + 12}
    assert found["usage"] == usage


def test_penalties_count_the_prompt_read_or_cached(llm):
    """A bias makes a token of the prompt certain, unless a penalty divides its logit by 100."""
    (token,) = llm.tokenize(b"x", add_bos=False)
    prompt, loud = [token, 5, 6], {"temperature": 0, "logit_bias": {token: 60.0}, "max_tokens": 1}
    assert text_of(llm(prompt, **loud)) == "x"
    for _cached in range(2):
        assert text_of(llm(prompt, repeat_penalty=100.0, **loud)) != "x"
        llm.last_n_tokens_size = 2
        assert text_of(llm(prompt, repeat_penalty=100.0, **loud)) == "x", "beyond the window"
        llm.last_n_tokens_size = 64
    messages = [{"role": "user", "content": "x"}]
    for penalty, same in ((1.0, True), (100.0, False)):
        found = llm.create_chat_completion(messages, repeat_penalty=penalty, **loud)
        assert (found["choices"][0]["message"]["content"] == "x") is same


def test_generate_and_sample_penalise_the_text_so_far(llm):
    free = next(llm.generate([5, 6], temp=0))
    sharp = {"temp": 0, "repeat_penalty": 1e6}
    assert next(llm.generate([free, 5, 6], **sharp)) != free
    assert llm.sample(**sharp) != free
    assert next(llm.generate([5, 6], reset=False, **sharp)) != free
    llm.reset()
    llm.eval([free, 5, 6])
    assert llm.sample(**sharp) not in (free, 5, 6)


def test_a_stream_is_the_whole_in_pieces(llm):
    whole = llm(PROMPT, max_tokens=20, temperature=0)
    chunks = list(llm(PROMPT, max_tokens=20, temperature=0, stream=True))
    assert "".join(map(text_of, chunks)) == text_of(whole)
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len({c["id"] for c in chunks}) == 1


def test_an_answer_ends_before_a_stop_string_and_after_echo_comes_the_prompt(llm):
    whole = text_of(llm(PROMPT, max_tokens=24, temperature=0))
    stop = whole[6:8]
    found = llm(PROMPT, max_tokens=24, temperature=0, stop=[stop], echo=True)
    assert text_of(found) == PROMPT + whole[: whole.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert (
        text_of(llm(PROMPT, max_tokens=24, temperature=0, stop=stop)) == whole[: whole.index(stop)]
    )


def test_no_limit_means_to_the_end_of_the_context(path):
    llm = Llama(path, n_ctx=24, verbose=False)
    for limit in (None, -1, 0, 1000):
        usage = llm(PROMPT, max_tokens=limit, temperature=0, logit_bias=no_end(llm))["usage"]
        assert usage["total_tokens"] == 24
    with pytest.raises(ValueError, match="exceed context window of 24"):
        llm(PROMPT + PROMPT)
    llm.close()


def no_end(llm):
    return dict.fromkeys(llm.engine.tokenizer.eog, -100.0)


def test_logprobs_belong_to_the_tokens_of_the_text(path):
    llm = Llama(path, n_ctx=128, logits_all=True, verbose=False)
    found = llm(PROMPT, max_tokens=6, temperature=0, logprobs=3, echo=True)
    logprobs = found["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == text_of(found)
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["text_offset"][1] == len(logprobs["tokens"][0])
    generated = zip(logprobs["token_logprobs"][-6:], logprobs["top_logprobs"][-6:], strict=True)
    for logprob, top in generated:
        assert logprob == pytest.approx(max(top.values())), "greedy takes the likeliest"
    rows = Llama.logits_to_logprobs(llm.scores[: llm.n_tokens])
    ids = llm.tokenize(PROMPT.encode())
    assert logprobs["token_logprobs"][1] == pytest.approx(float(rows[0, ids[1]]), abs=1e-4)
    chunks = list(llm(PROMPT, max_tokens=6, temperature=0, logprobs=1, stream=True))
    streamed = [
        p
        for c in chunks
        for p in (c["choices"][0]["logprobs"] or {"token_logprobs": []})["token_logprobs"]
    ]
    assert streamed == pytest.approx(logprobs["token_logprobs"][-6:], abs=1e-3)
    echoed = list(llm(PROMPT, max_tokens=6, temperature=0, logprobs=1, stream=True, echo=True))
    for found in (chunks[0], echoed[1]):
        assert found["choices"][0]["logprobs"]["text_offset"][0] == len(PROMPT)
    llm.close()


def test_echo_with_logprobs_needs_the_logits_of_the_prompt(llm):
    with pytest.raises(ValueError, match="logits_all=True"):
        llm(PROMPT, logprobs=1, echo=True)


def test_a_seed_gives_the_same_text_again(llm):
    drawn = [text_of(llm(PROMPT, max_tokens=16, temperature=2.0, seed=s)) for s in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_calls_without_a_seed_differ_and_are_drawn_by_the_constructors(llm):
    def answers():
        found = []
        for _ in range(3):
            llm.reset()
            found.append(text_of(llm(PROMPT, max_tokens=16, temperature=2.0)))
        return found

    first = answers()
    assert len(set(first)) == 3, "who asks again wants another answer"
    llm.set_seed(1)
    llm.set_cache(LlamaRAMCache())
    assert answers() == first, "a state from the cache does not bring its seed"
    llm.set_seed(-1)  # LangChain's default
    assert answers() != answers(), "as without any seed"


def test_biases_processors_and_criteria_see_and_change_the_answer(llm):
    token = llm.tokenize(b"w", add_bos=False)[0]
    forced = llm(PROMPT, max_tokens=3, temperature=0, logit_bias={str(token): 1000.0})
    assert text_of(forced) == "www"
    seen = []

    def only(ids, scores):
        seen.append(ids.tolist())
        scores[:] = -np.inf
        scores[token] = 0
        return scores

    found = llm(PROMPT, max_tokens=3, logits_processor=LogitsProcessorList([only]))
    assert text_of(found) == "www"
    prompt = llm.tokenize(PROMPT.encode())
    assert seen == [prompt + [token] * i for i in range(3)]
    ends = StoppingCriteriaList([lambda ids, logits: len(ids) >= len(prompt) + 2])
    found = llm(PROMPT, max_tokens=9, temperature=0, stopping_criteria=ends)
    assert found["usage"]["completion_tokens"] == 2
    assert found["choices"][0]["finish_reason"] == "stop"
    end = llm.token_eos()
    early = MinTokensLogitsProcessor(4, end)
    bias = {end: 1000.0}
    found = llm(
        PROMPT, temperature=0, logits_processor=LogitsProcessorList([early]), logit_bias=bias
    )
    assert found["usage"]["completion_tokens"] == 4
    assert found["choices"][0]["finish_reason"] == "stop"


def test_what_two_prompts_begin_with_alike_runs_once(llm, monkeypatch):
    ran = []
    prefill = llm._session.prefill
    monkeypatch.setattr(llm._session, "prefill", lambda ids: ran.append(len(ids)) or prefill(ids))
    llm(PROMPT, max_tokens=1, temperature=0)
    llm(PROMPT + " hand over", max_tokens=1, temperature=0)
    n, more = (len(llm.tokenize(t.encode())) for t in (PROMPT, PROMPT + " hand over"))
    assert ran == [n, more - n]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_the_number_of_steps_and_not_the_text(llm, monkeypatch, temperature):
    """Also where tokens are drawn: every one is drawn from the logits it would have without."""
    prompt = "the hand and the hand and the hand"
    settings = {"max_tokens": 60, "temperature": temperature, "seed": 3}
    plain = llm(prompt, **settings)
    llm.draft_model = LlamaPromptLookupDecoding(num_pred_tokens=4)
    llm.reset()
    calls = []
    append = llm._append
    monkeypatch.setattr(
        llm, "_append", lambda ids, **kw: calls.append(len(ids)) or append(ids, **kw)
    )
    drafted = llm(prompt, **settings)
    assert text_of(drafted) == text_of(plain)
    assert drafted["usage"] == plain["usage"]
    assert any(n > 1 for n in calls[1:])
    if temperature == 0:
        assert len(calls) < drafted["usage"]["completion_tokens"]


def test_a_draft_that_is_never_right_costs_nothing_but_time(llm):
    plain = text_of(llm(PROMPT, max_tokens=12, temperature=0))
    llm.draft_model = lambda ids: np.array([1, 2, 3], np.int32)
    assert text_of(llm(PROMPT, max_tokens=12, temperature=0)) == plain
    n = len(llm.tokenize(PROMPT.encode()))
    assert llm.n_tokens == n + 11, "the last token is given out before it is run"


def test_prompt_lookup_proposes_what_followed_before():
    lookup = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=3)
    assert lookup(np.array([1, 2, 3, 4, 5, 1, 2])).tolist() == [3, 4, 5]
    assert lookup(np.array([7, 2, 3, 9, 2])).tolist() == [3, 9, 2]
    assert lookup(np.array([1, 2, 3])).tolist() == []


def test_a_stream_that_another_call_overtakes_ends_with_an_error(llm):
    stream = llm(PROMPT, max_tokens=8, stream=True, temperature=0)
    next(stream)
    llm("the", max_tokens=1)
    with pytest.raises(RuntimeError, match="taken over"):
        list(stream)


def test_eval_sample_and_generate_are_steps_of_the_same_text(llm):
    prompt = llm.tokenize(PROMPT.encode())
    expected = text_of(llm(PROMPT, max_tokens=5, temperature=0))
    llm.reset()
    llm.eval(prompt)
    found = []
    for _ in range(5):
        found.append(llm.sample(temp=0))
        llm.eval([found[-1]])
    assert llm.detokenize(found, prev_tokens=prompt).decode("utf-8", "replace") == expected
    assert list(llm.eval_tokens) == prompt + found
    tokens = llm.generate(prompt, temp=0)
    assert [next(tokens) for _ in range(5)] == found
    assert tokens.send([3, 4]) is not None
    assert list(llm.eval_tokens) == prompt + found + [3, 4]
    llm.reset()
    llm.eval(prompt)
    assert next(llm.generate([], temp=0, reset=False)) == found[0], "goes on where eval ended"


def test_what_sample_draws_by_belongs_to_the_last_token(llm):
    prompt = llm.tokenize(b"the hand and the hand and the hand")
    expected = [token for token, _ in zip(llm.generate(prompt, temp=0), range(12), strict=False)]
    llm.draft_model = LlamaPromptLookupDecoding(num_pred_tokens=4)
    for n in range(1, 12):
        llm.reset()
        given = list(zip(llm.generate(prompt, temp=0), range(n), strict=False))
        assert llm.sample(temp=0) == expected[llm.n_tokens - len(prompt)], "drafts are not the text"
        assert len(given) == n
    llm.n_tokens = 3
    with pytest.raises(ValueError, match="call eval"):
        llm.sample()


def test_a_state_comes_back(llm):
    expected = text_of(llm(PROMPT, max_tokens=6, temperature=0))
    state = llm.save_state()
    assert state.llama_state_size == len(state.llama_state) > 0
    llm("a whole other text of some length", max_tokens=3)
    llm.load_state(state)
    assert llm.input_ids.tolist() == state.input_ids.tolist()
    assert text_of(llm(PROMPT, max_tokens=6, temperature=0)) == expected


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_a_cache_brings_back_the_longest_common_beginning(llm, kind, tmp_path, monkeypatch):
    cache = LlamaRAMCache() if kind == "memory" else LlamaDiskCache(str(tmp_path / "cache"))
    llm.set_cache(cache)
    expected = text_of(llm(PROMPT, max_tokens=6, temperature=0))
    llm("is it", max_tokens=2)
    assert llm.tokenize(PROMPT.encode()) in cache
    ran = []
    prefill = llm._session.prefill
    monkeypatch.setattr(llm._session, "prefill", lambda ids: ran.append(len(ids)) or prefill(ids))
    assert text_of(llm(PROMPT, max_tokens=6, temperature=0)) == expected
    assert sum(ran) <= 1, "only the last token of the prompt runs again"
    assert cache.cache_size > 0
    with pytest.raises(KeyError):
        cache[[0]]
    small = (
        LlamaRAMCache(capacity_bytes=10) if kind == "memory" else LlamaDiskCache(str(tmp_path), 10)
    )
    small[[1, 2]] = llm.save_state()
    assert small.cache_size == 0


def test_tokens_and_bytes(llm):
    assert llm.n_ctx() == llm.context_params.n_ctx == 1024
    assert llm.n_vocab() == llm.engine.hp.n_vocab
    assert llm.n_embd() == llm.engine.hp.n_embd
    ids = llm.tokenize(b"<|im_start|>the", special=True)
    assert llm.detokenize(ids) == b"the"
    assert llm.detokenize(ids, special=True) == b"<|im_start|>the"
    assert len(llm.tokenize(b"<|im_start|>the")) > len(ids)
    assert llm.detokenize([llm.token_nl()]) == b"\n"
    assert llm.tokenizer().decode(llm.tokenizer().encode("hand")) == "hand"
    assert llm.metadata["general.architecture"] == "llama"


# --- chats ---------------------------------------------------------------------------------------


def test_a_chat_is_the_templates_text_and_users_cannot_write_control_tokens(llm, monkeypatch):
    prompts = []
    generate = llm._generate
    monkeypatch.setattr(
        llm, "_generate", lambda ids, *a, **k: prompts.append(ids) or generate(ids, *a, **k)
    )
    found = llm.create_chat_completion([{"role": "user", "content": "the"}], max_tokens=3)
    expected = b"<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    assert llm.detokenize(prompts[0], special=True) == expected
    assert found["object"] == "chat.completion"
    assert found["id"].startswith("chatcmpl-")
    assert found["choices"][0]["message"]["role"] == "assistant"
    assert found["usage"]["completion_tokens"] == 3
    evil = [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}]
    llm.create_chat_completion(evil, max_tokens=1)
    assert prompts[1].count(llm.token_eos()) == 1, "the template's own, not the user's"
    with pytest.raises(ValueError, match="image_url"):
        llm.create_chat_completion([{"role": "user", "content": [{"type": "image_url"}]}])


def test_a_chats_stream_begins_with_the_role_and_ends_with_the_reason(llm):
    messages = [{"role": "user", "content": "the"}]
    whole = llm.create_chat_completion(
        messages, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    chunks = list(llm.create_chat_completion(messages, max_tokens=8, temperature=0, stream=True))
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant"}
    assert deltas[-1] == {}
    text = whole["choices"][0]["message"]["content"]
    assert "".join(d.get("content", "") for d in deltas) == text
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    assert set(content[0]) == {"token", "logprob", "bytes", "top_logprobs"}


def test_a_chat_handler_gets_everything(llm, monkeypatch):
    monkeypatch.setattr(llm, "chat_handler", lambda **given: given)
    given = llm.create_chat_completion([{"role": "user", "content": "x"}], seed=4)
    assert given["llama"] is llm
    assert (given["seed"], given["temperature"]) == (4, 0.2)


@pytest.mark.parametrize("name", ["chatml", "llama-2", "gemma", "llama-3"])
def test_chat_formats_by_name(path, name):
    llm = Llama(path, chat_format=name, n_ctx=256, verbose=False)
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "hand"},
        {"role": "assistant", "content": "an"},
        {"role": "user", "content": "of"},
    ]
    assert llm.create_chat_completion(messages, max_tokens=2)["usage"]["completion_tokens"] <= 2
    llm.close()


def test_an_unknown_chat_format_is_named(path):
    with pytest.raises(ValueError, match="chat_format is 'no-such'"):
        Llama(path, chat_format="no-such")


# --- grammars and tools --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda llm: llm("a", logit_bias={"a": 1}), "logit_bias has 'a': 1, expected a token id"),
        (lambda llm: llm("a", logit_bias={5: None}), "logit_bias has 5: None, expected a token id"),
        (lambda llm: llm.set_seed("x"), "seed is 'x', expected a whole number"),
        (lambda llm: llm.generate("x"), "tokens is 'x', expected a list of whole numbers"),
    ],
)
def test_wrong_arguments_are_reported_with_what_is_expected(llm, call, said):
    with pytest.raises(TypeError) as found:
        call(llm)
    assert said in str(found.value)


def test_token_ids_of_a_bias_may_be_text_as_in_json(llm):
    biased = [llm("the cat", max_tokens=3, temperature=0, logit_bias={i: 99}) for i in (9, "9")]
    assert biased[0]["choices"] == biased[1]["choices"]


@pytest.fixture
def grammars():
    return pytest.importorskip("llguidance")


def test_an_answer_keeps_to_a_gbnf_grammar(llm, grammars):
    grammar = LlamaGrammar.from_string('root ::= " " ("hand" | "other") "."')
    for seed in range(3):
        found = llm(PROMPT, grammar=grammar, max_tokens=20, seed=seed)
        assert text_of(found) in (" hand.", " other.")
        assert found["choices"][0]["finish_reason"] == "stop"
    with pytest.raises(ValueError, match="grammar"):
        llm(PROMPT, grammar=LlamaGrammar.from_string("root ::= ("))


def test_what_of_a_schema_is_not_enforced_is_a_warning(llm, grammars):
    schema = {"type": "array", "items": {"enum": ["a", None]}, "maxItems": 1}
    loose = {"type": "array", "items": {"type": "string", "maxLength": 1}, "uniqueItems": True}
    form = {"type": "json_object", "schema": loose | {"maxItems": 2}}
    messages = [{"role": "user", "content": "the"}]
    with pytest.warns(UserWarning, match="does not enforce #/uniqueItems"):
        llm.create_chat_completion(messages, response_format=form, max_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.create_chat_completion(
            messages, response_format={"type": "json_object", "schema": schema}, max_tokens=4
        )


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_an_answer_keeps_to_a_json_schema(llm, grammars, kind):
    schema = TOOLS[0]["function"]["parameters"]
    form = {"type": kind, "schema": schema, "json_schema": {"name": "x", "schema": schema}}
    messages = [{"role": "user", "content": "the"}]
    found = llm.create_chat_completion(messages, response_format=form, temperature=1.5)
    answer = json.loads(found["choices"][0]["message"]["content"])
    assert answer in ({"it": "a"}, {"it": "b"}), "as in llama.cpp, no properties of its own making"
    with pytest.raises(ValueError, match="no such type"):
        llm.create_chat_completion(messages, response_format={"type": "no such type"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pick"}}])
def test_a_tool_that_must_be_called_is(llm, grammars, choice):
    messages = [{"role": "user", "content": "the"}]
    found = llm.create_chat_completion(messages, tools=TOOLS, tool_choice=choice)
    choice_found = found["choices"][0]
    (call,) = choice_found["message"]["tool_calls"]
    assert choice_found["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "pick"
    assert json.loads(call["function"]["arguments"])["it"] in ("a", "b")
    chunks = list(
        llm.create_chat_completion(messages, tools=TOOLS, tool_choice=choice, stream=True)
    )
    calls = [d for c in chunks for d in delta_of(c).get("tool_calls", ())]
    assert [c["function"].get("name") for c in calls[:2]] == ["pick", None], "once, then arguments"
    assert json.loads("".join(c["function"]["arguments"] for c in calls))["it"] in ("a", "b")
    assert {c["index"] for c in calls} == {0}
    old = [d["function_call"] for c in chunks if "function_call" in (d := delta_of(c))]
    assert old == ([] if choice == "required" else [c["function"] for c in calls])
    short = llm.create_chat_completion(messages, tools=TOOLS, tool_choice=choice, max_tokens=2)
    assert short["choices"][0]["finish_reason"] == "length"
    with pytest.raises(ValueError, match="not among the tools"):
        llm.create_chat_completion(messages, tools=TOOLS, tool_choice={"function": {"name": "x"}})


F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("n", [1, 7, 1000])
@pytest.mark.parametrize(
    ("text", "before", "calls"),
    [
        ('<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "", ['{"x": 1}']),
        ('Well. <tool_call>{"name":"f","arguments":{}}</tool_call>', "Well.", ["{}"]),
        ('{"x": 1}', None, []),
        ("just text", None, []),
    ],
)
def test_calls_are_found_as_they_come(llm, text, before, calls, n):
    form = chats.ChatFormat(llm.engine, None)
    parser, message = chats.Parser(chats.Wanted([F], None, None), form), chats.Message()
    for at in range(0, len(text), n):
        message.add(parser.push(Piece(text[at : at + n], [], None)))
    message.add(parser.push(Piece("", [], "stop")))
    assert message.content == (text if before is None else before)
    assert [call["function"] for call in message.calls] == [
        {"name": "f", "arguments": c} for c in calls
    ]


def test_what_the_schemas_of_tools_define_is_found_from_the_root(grammars):
    tree = {"type": "object", "properties": {"of": {"$ref": "#/$defs/Leaf"}}}
    tree["$defs"] = {"Leaf": {"type": "object", "properties": {"up": {"$ref": "#"}}}}
    old = {
        "definitions": {"Leaf": {"const": 1}},
        "properties": {"x": {"$ref": "#/definitions/Leaf"}},
    }
    tools = [{"function": {"name": n, "parameters": p}} for n, p in (("a", tree), ("b", old))]
    found = call_schema(tools)
    text = LlamaGrammar.from_json_schema(json.dumps(found)).compiled_here().text
    tokenizer = GrammarTokenizer(Bytes(), Bytes.n_vocab)
    Grammar(text, tokenizer).accept_all(b'{"name":"b","arguments":{"x":1}}')
    with pytest.raises(SamplerError, match="does not allow token"):
        Grammar(text, tokenizer).accept_all(b'{"name":"b","arguments":{"x":2}}')


def test_a_stream_with_tools_that_calls_none_has_the_answers_logprobs(llm):
    how = {"tools": TOOLS, "max_tokens": 4, "temperature": 0, "logprobs": True, "top_logprobs": 1}
    messages = [{"role": "user", "content": "the"}]
    whole = llm.create_chat_completion(messages, **how)
    chunks = llm.create_chat_completion(messages, stream=True, **how)
    found = [c["choices"][0]["logprobs"] or {"content": []} for c in chunks]
    tokens = [token["bytes"] for each in found for token in each["content"]]
    assert tokens == [t["bytes"] for t in whole["choices"][0]["logprobs"]["content"]]
    assert len(tokens) == 4


def test_messages_about_tools_are_text_where_the_template_knows_none():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "\ngo\n"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    found = plain_messages(messages, TOOLS)
    assert [m["role"] for m in found] == ["system", "user", "assistant", "user"]
    assert found[0]["content"].startswith("Be brief.\n\n# Tools")
    assert '"name": "pick"' in found[0]["content"]
    assert found[1]["content"] == "\ngo\n", "what a message says is left as it is"
    assert found[2]["content"] == '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert found[3]["content"] == "<tool_response>\n2\n</tool_response>"


# --- the rest of the constructor -----------------------------------------------------------------


def test_embeddings_are_pooled_and_normalised(path):
    by_token = Llama(path, embedding=True, verbose=False)
    rows = np.array(by_token.embed(PROMPT))
    assert rows.shape == (len(by_token.tokenize(PROMPT.encode())), by_token.n_embd())
    by_token.close()
    llm = Llama(path, embedding=True, pooling_type=1, n_batch=8, verbose=False)
    found = llm.create_embedding(["the hand", "of"])
    assert [d["index"] for d in found["data"]] == [0, 1]
    assert found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 0
    one = np.array(llm.embed("the hand"))
    assert np.array(found["data"][0]["embedding"]) == pytest.approx(one)
    assert np.linalg.norm(llm.embed("the hand", normalize=True)) == pytest.approx(1)
    with pytest.warns(UserWarning, match="was cut at 8"):
        llm.embed(PROMPT)
    with pytest.raises(ValueError, match="n_batch is 8"):
        llm.embed(PROMPT, truncate=False)
    llm.close()


def test_embeddings_need_a_llama_made_for_them(llm):
    with pytest.raises(RuntimeError, match="embedding=True"):
        llm.embed("x")


def test_a_suffix_uses_the_tokens_for_gaps(llm, monkeypatch):
    with pytest.raises(ValueError, match="filling gaps"):
        llm("the", suffix="of")
    fim = {"pre": 1, "suf": 2, "mid": 3}
    loaded = replace(llm.engine.loaded, vocab=replace(llm.engine.vocab, fim=fim))
    monkeypatch.setattr(llm.engine, "loaded", loaded)
    a, b = (llm.tokenize(t, add_bos=False) for t in (b"the", b"of"))
    assert llm._prompt("the", "of") == [1, *a, 2, *b, 3]
    monkeypatch.setattr(llm, "spm_infill", True)
    assert llm._prompt("the", "of") == [2, *b, 1, *a, 3]


def test_arguments_without_effect_are_named_and_usual_ones_are_silent(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Llama(path, n_ctx=64, n_threads=1, use_mmap=True, flash_attn=True, verbose=False).close()
    with pytest.warns(UserWarning, match="has no effect") as found:
        llm = Llama(path, n_ctx=64, lora_base="x", rope_freq_base=1e4, f16_kv=True, verbose=False)
    assert sorted(str(w.message).split()[0] for w in found) == [
        "f16_kv",
        "lora_base",
        "rope_freq_base",
    ]
    with pytest.warns(UserWarning, match="tfs_z"):
        llm("the", max_tokens=1, tfs_z=0.5)
    llm.close()
    for wrong in ({"type_k": 3}, {"pooling_type": 9}, {"attn": "none such"}, {"n_ctx": -1}):
        with pytest.raises(ValueError, match=r"expected|method"):
            Llama(path, verbose=False, **wrong)


def test_a_choice_among_some_of_the_tools():
    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    of_chat = {"mode": "required", "tools": [{"type": "function", "function": {"name": "b"}}]}
    for choice in (
        {"type": "allowed_tools", "allowed_tools": of_chat},
        {"type": "allowed_tools", "mode": "required", "tools": [{"name": "b"}]},  # responses
    ):
        assert allowed(tools, choice) == ([tools[1]], "required")
    assert allowed(tools, "auto") == (tools, "auto")
    one = {"type": "function", "function": {"name": "a"}}
    assert allowed(tools, one) == (tools, one)
    for wrong in ({"mode": "some"}, {"tools": [{"name": "d"}]}, {"tools": [{}]}):
        with pytest.raises(ValueError, match="tool choice"):
            allowed(tools, {"type": "allowed_tools"} | wrong)


def test_exact_activations_are_the_engines(tmp_path):
    quantized = write_tiny_model(tmp_path / "q4.gguf", TinySpec(type_="Q4_0"))
    ids, rows = list(range(5, 45)), {}
    for precision in ("fast", "exact"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            llm = Llama(str(quantized), n_ctx=64, precision=precision, verbose=False)
        llm.eval(ids)
        rows[precision] = llm.scores[-1].copy()
        llm.close()
        engine = Engine.load(quantized, precision=precision)
        assert np.array_equal(engine.session(n_ctx=64).prefill(ids), rows[precision])
        engine.close()
    assert not np.array_equal(rows["fast"], rows["exact"])
    with pytest.raises(ValueError, match="precision is 'half', expected one of fast, exact"):
        Llama(str(quantized), precision="half", verbose=False)


def test_other_types_and_methods_are_the_engines(path):
    llm = Llama(path, n_ctx=128, attn="window:sink=4,recent=32", verbose=False)
    found = llm(PROMPT, max_tokens=4, logit_bias=no_end(llm))
    assert found["usage"]["completion_tokens"] == 4
    llm.close()
    with pytest.raises(ValueError, match="type_k is q8_0, which needs heads of a multiple of 32"):
        Llama(path, type_k=8, verbose=False)
    with pytest.raises(ValueError, match="draft_model"):
        Llama(path, attn="topk", draft_model=LlamaPromptLookupDecoding(), verbose=False)
    Llama(path, n_ctx=64, draft_model=LlamaPromptLookupDecoding(), verbose=False).close()


def test_a_long_context_reads_by_auto_unless_another_method_is_named(path):
    found = {}
    for attn in (None, "auto", "dense"):
        given = {} if attn is None else {"attn": attn}
        llm = Llama(path, n_ctx=13000, verbose=False, **given)
        whole = llm(PROMPT, max_tokens=4, temperature=0, logit_bias=no_end(llm))
        found[attn] = whole["choices"][0]["text"], llm._session.selector
        llm.close()
    assert found[None] == found["auto"]
    assert found["dense"][0] == found["auto"][0]  # few tokens are all read
    assert found["dense"][1] != found["auto"][1]


def test_a_llama_is_pickled_by_what_it_was_made_of(llm):
    other = pickle.loads(pickle.dumps(llm))
    assert text_of(other(PROMPT, temperature=0)) == text_of(llm(PROMPT, temperature=0))
    other.close()


def test_from_pretrained_fetches_one_file(path, monkeypatch):
    asked = []
    monkeypatch.setattr(models, "pull", lambda spec, dest: asked.append(spec) or Path(path))
    llm = Llama.from_pretrained("owner/repo-GGUF", "file-Q8_0.gguf", n_ctx=64, verbose=False)
    llm.close()
    assert asked == ["hf:owner/repo-GGUF/file-Q8_0.gguf"]


# --- beside llama_cpp ----------------------------------------------------------------------------


def test_methods_have_llama_cpps_parameters_and_defaults():
    theirs = pytest.importorskip("llama_cpp").Llama
    for name, member in inspect.getmembers(theirs, inspect.isroutine):
        if name.startswith("_") and name not in ("__init__", "__call__"):
            continue
        own = inspect.signature(getattr(Llama, name)).parameters
        for parameter in inspect.signature(member).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                continue
            assert parameter.name in own, (name, parameter.name)
            assert own[parameter.name].default == parameter.default, (name, parameter.name)


def shape(value):
    """A result without its values."""
    if isinstance(value, dict):
        return {key: shape(v) for key, v in value.items()}
    if isinstance(value, list):
        return [shape(v) for v in value[:1]]
    return type(value).__name__


@pytest.mark.model
def test_results_are_llama_cpps_in_shape_and_greedy_text(model_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    path = str(model_path("smollm2"))
    # One thread: llama.cpp spins where several wait, which a busy machine turns to minutes.
    settings = {"n_ctx": 512, "logits_all": True, "n_threads": 1, "verbose": False}
    both = [cls(path, **settings) for cls in (llama_cpp.Llama, Llama)]
    text = "The capital of France is"
    # Not every prompt will do: llama.cpp's rounding decides where two tokens are 0.1 apart.
    messages = [{"role": "user", "content": "Count to five."}]
    calls = {
        "tokens": lambda llm: llm.tokenize(b"Hello <|im_end|> world!\n", special=True),
        "completion": lambda llm: llm(text, max_tokens=12, temperature=0, stop=["\n"]),
        "logprobs": lambda llm: llm(text, max_tokens=4, temperature=0, logprobs=2, echo=True),
        "stream": lambda llm: list(llm(text, max_tokens=3, temperature=0, stream=True))[-1],
        "chat": lambda llm: llm.create_chat_completion(messages, max_tokens=8, temperature=0),
        "chat stream": lambda llm: list(
            llm.create_chat_completion(messages, max_tokens=3, temperature=0, stream=True)
        )[:2],
        "penalty": lambda llm: llm(text, max_tokens=8, temperature=0, repeat_penalty=1.3),
    }
    for name, call in calls.items():
        theirs, own = map(call, both)
        assert shape(own) == shape(theirs), name
        if isinstance(own, dict) and "usage" in own:
            assert own["usage"] == theirs["usage"], name
            choice = "message" if "message" in own["choices"][0] else "text"
            assert own["choices"][0][choice] == theirs["choices"][0][choice], name
    both[1].close()


@pytest.mark.model
def test_the_examples_of_llama_cpps_readme_run_through_a_shim(model_path, root):
    pytest.importorskip("llguidance")
    tests = root / "tests" / "support"
    done = subprocess.run(
        [sys.executable, str(tests / "readme_of_llama_cpp.py"), str(model_path("smollm2"))],
        env=os.environ | {"PYTHONPATH": str(root / "bindings" / "tamis_llama_cpp")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["completion"]["choices"][0]["text"].startswith("Q: Name the planets")
    assert found["chat"]["choices"][0]["message"]["content"]
    assert "team_name" in json.loads(found["schema"]["choices"][0]["message"]["content"])
    (call,) = found["tool"]["choices"][0]["message"]["tool_calls"]
    assert set(json.loads(call["function"]["arguments"])) == {"name", "age"}
    assert found["draft"]["usage"]["completion_tokens"] <= 8
    assert (found["embedding"]["data"], found["embeddings"]) == (1, 2)
    assert len(found["low level"]) > 10


def test_a_fork_beside_a_thread_that_holds_the_lock_goes_on_anew(llm):
    expected = text_of(llm(PROMPT, max_tokens=6, temperature=0))
    held, go_on = threading.Event(), threading.Event()

    def hold():
        with llm._lock:
            held.set()
            go_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        try:
            assert llm.n_tokens == 0  # what the thread was doing to the text is not known
            os.write(write, text_of(llm(PROMPT, max_tokens=6, temperature=0)).encode())
        finally:
            os._exit(0)
    os.close(write)
    _, status = os.waitpid(pid, 0)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert os.read(read, 1 << 16).decode() == expected
    os.close(read)
    assert text_of(llm(PROMPT, max_tokens=6, temperature=0)) == expected


def test_a_fork_within_a_call_keeps_the_lock_and_the_text(llm):
    llm.eval([5, 6, 7])
    with llm._lock:
        pid = os.fork()
        if pid == 0:
            same = llm._lock._is_owned() and llm.n_tokens == 3
            os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
