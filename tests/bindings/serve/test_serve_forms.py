"""Requests as they are read and replies as they are written: whole records are compared."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from serving import N_CTX, forms, reader

from tamis.bindings.drop_in.completion import Counts, Likely, Piece, TokenInfo
from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.serve import replies
from tamis.bindings.serve.api import anthropic, llamacpp, ollama, openai, responses
from tamis.bindings.serve.api.readers import READERS
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import ApiError, stopping
from tamis.bindings.serve.jobs import Progress
from tamis.bindings.serve.replies import About
from tamis.bindings.serve.requests import Limits

HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PROGRESS = {"prompt_progress": {"total": 10, "cache": 4, "processed": 7}}
LAST = Counts(4, 6, 2, 0.5, 0.25, None, 3, 1)
TIMES = replies.timings(LAST)
TOKENS = [
    TokenInfo(5, b"a", -0.5, [Likely(6, b"\xff", -1.0)]),
    TokenInfo(7, b"\n", -0.25, []),
]


@pytest.fixture(scope="module")
def read(path):
    return reader(path)


def form_of(read, name, form, body, *, words=("a", "\n"), finish="length", **more):
    """The events and the whole of a reply of two tokens to a request."""
    task = READERS[name](read, Body(body))._replace(seed=11)
    named = [replace(request, id="cmpl-0-1", created=1700) for request in task.requests]
    task = task._replace(requests=named)
    about = About("tiny", "b0", more.get("n_ctx", N_CTX), lambda: read.format)
    pieces = [
        Piece(word, [token], None, (token.id,), None, Counts(4, 6, i, 0.5, 0.25))
        for i, (word, token) in enumerate(zip(words, TOKENS, strict=True), 1)
    ]
    pieces.append(Piece("", [], finish, (), more.get("word"), LAST))
    return forms(form, task, about, pieces, Progress(7, 10, 4))


# --- OpenAI ---------------------------------------------------------------------------------------

USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
USAGE |= {"prompt_tokens_details": {"cached_tokens": 4}}
LOGPROBS = {
    "tokens": ["a", "\n"], "token_logprobs": [-0.5, -0.25],
    "top_logprobs": [{"\ufffd": -1.0, "a": -0.5}, {"\n": -0.25}], "text_offset": [1, 2],
}  # fmt: skip
TEXT = {"id": "cmpl-0-1", "object": "text_completion", "created": 1700, "model": "tiny",
        "system_fingerprint": "b0"}  # fmt: skip


def test_a_completion_in_openais_form(read):
    asked = {"prompt": "a", "logprobs": 1, "return_progress": True}
    asked |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    events, whole = form_of(read, "completion", openai.Text, asked)
    choice = {"index": 0, "text": "a\n", "logprobs": LOGPROBS, "finish_reason": "length"}
    assert whole == TEXT | {"choices": [choice], "usage": USAGE, "timings": TIMES}
    first, one, two, last, end = events
    assert first == TEXT | {"choices": []} | PROGRESS
    for event, text, n in ((one, "a", 1), (two, "\n", 2), (last, "", 2)):
        assert event["choices"][0]["text"] == text
        assert event["choices"][0]["index"] == 0
        assert event["choices"][0]["finish_reason"] == ("length" if event is last else None)
        assert event["usage"] == USAGE | {"completion_tokens": n, "total_tokens": n + 1}
        assert event.keys() == TEXT.keys() | {"choices", "usage"}
    assert one["choices"][0]["logprobs"] == {
        "tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"\ufffd": -1.0, "a": -0.5}],
        "text_offset": [1],
    }  # fmt: skip
    assert end == TEXT | {"choices": [], "usage": USAGE, "timings": TIMES}


@pytest.mark.parametrize("more", [{}, {"timings_per_token": True}, {"verbose": True}])
def test_a_chat_in_openais_form(read, more):
    events, whole = form_of(read, "chat", openai.Chat, HELLO | more)
    n = READERS["chat"](read, Body(HELLO)).prompt_tokens
    usage = USAGE | {"prompt_tokens": n, "total_tokens": n + 2}
    verbose = {"__verbose": {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}}
    verbose = verbose if "verbose" in more else {}
    head = TEXT | {"id": "chatcmpl-0-1", "object": "chat.completion"}
    message = whole["choices"][0].pop("message")
    assert (message["role"], message["content"]) == ("assistant", "a\n")
    choice = {"index": 0, "logprobs": None, "finish_reason": "length"}
    assert whole == head | {"choices": [choice], "usage": usage, "timings": TIMES} | verbose
    head |= {"object": "chat.completion.chunk"}
    first, *_, last = events
    role = {"index": 0, "delta": {"role": "assistant", "content": None}, "logprobs": None}
    assert first == head | {"choices": [role | {"finish_reason": None}]}
    assert last["choices"][0]["finish_reason"] == "length"
    assert (last["timings"], {k: last[k] for k in verbose}) == (TIMES, verbose)
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == "a\n"
    timed = ["timings" in event for event in events[1:-1]]
    assert set(timed) == {"timings_per_token" in more}
    assert not any("usage" in event for event in events)


# --- llama.cpp ------------------------------------------------------------------------------------


def settings_of(**more):
    usual = {
        "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "typical_p": 1.0,
        "repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "mirostat": 0,
        "mirostat_tau": 5.0, "mirostat_eta": 0.1, "logit_bias": [], "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0, "top_n_sigma": -1.0, "xtc_probability": 0.0,
        "xtc_threshold": 0.1, "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2,
        "dry_penalty_last_n": -1, "dry_sequence_breakers": ["\n", ":", '"', "*"], "min_keep": 0,
        "repeat_last_n": 64, "ignore_eos": False, "seed": 11, "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
    }  # fmt: skip
    return usual | more


def test_the_settings_of_a_completion_in_llama_cpps_names(path, read):
    assert llamacpp.usual_settings(read) == settings_of(seed=-1, n_predict=-1)
    given = reader(path, seed=7, n_predict=9, temperature=0.5)
    usual = settings_of(seed=7, n_predict=9, temperature=0.5)
    assert llamacpp.usual_settings(given) == usual
    biased = Sampling(logit_bias={5: 1.5, 6: -math.inf}, repeat_last_n=0, ignore_eos=True)
    found = llamacpp.settings(biased, 3, [8])
    assert found["logit_bias"] == [
        {"token": 5, "bias": 1.5}, {"token": 6, "bias": None}, {"token": 8, "bias": None}
    ]  # fmt: skip
    assert (found["repeat_last_n"], found["seed"], found["ignore_eos"]) == (0, 3, True)
    assert llamacpp.settings(Sampling(), 3, [8])["logit_bias"] == []


def likely(**how):
    other = {"id": 6, "token": "\ufffd", "bytes": [255]}
    if how.get("post"):
        first = {"prob": math.exp(-0.5), "top_probs": [other | {"prob": math.exp(-1)}]}
        second = {"prob": math.exp(-0.25), "top_probs": []}
    else:
        first = {"logprob": -0.5, "top_logprobs": [other | {"logprob": -1.0}]}
        second = {"logprob": -0.25, "top_logprobs": []}
    return [
        {"id": 5, "token": "a", "bytes": [97]} | first,
        {"id": 7, "token": "\n", "bytes": [10]} | second,
    ]


@pytest.mark.parametrize("post", [False, True])
def test_a_completion_in_llama_cpps_form(read, post):
    asked = {
        "prompt": "a",
        "n_predict": 2,
        "n_probs": 1,
        "post_sampling_probs": post,
        "stop": ["z"],
    }
    asked |= {"return_progress": True, "timings_per_token": True, "return_tokens": True}
    events, whole = form_of(read, "llama completion", llamacpp.Completion, asked)
    last = {
        "index": 0, "content": "a\n", "tokens": [5, 7], "id_slot": -1, "stop": True,
        "model": "tiny", "tokens_predicted": 2, "tokens_evaluated": 1, "prompt": "a",
        "has_new_line": True, "truncated": False, "stop_type": "limit", "stopping_word": "",
        "tokens_cached": 2, "timings": TIMES,
    }  # fmt: skip
    said = settings_of(
        n_predict=2, max_tokens=2, stop=["z"], stream=False, n_probs=1,
        post_sampling_probs=post, timings_per_token=True,
    )  # fmt: skip
    assert whole.pop("generation_settings") == said
    assert whole == last | {"completion_probabilities": likely(post=post)}
    progress, one, two, end = events
    assert progress.pop("prompt_progress") == PROGRESS["prompt_progress"]
    assert progress.pop("timings")["cache_n"] == 4
    assert progress == {"index": 0, "content": "", "tokens": [], "stop": False}
    for i, event in enumerate((one, two)):
        assert event == {
            "index": 0, "content": "a\n"[i], "tokens": [(5, 7)[i]], "stop": False, "id_slot": -1,
            "tokens_predicted": i + 1, "tokens_evaluated": 1,
            "completion_probabilities": [likely(post=post)[i]],
            "timings": replies.timings(Counts(4, 6, i + 1, 0.5, 0.25)),
        }  # fmt: skip
    assert end.pop("generation_settings") == said | {"stream": True}
    assert end == last | {"content": "", "tokens": []}


@pytest.mark.parametrize(
    ("finish", "word", "n_ctx", "kind", "truncated"),
    [("length", None, 4, "limit", False), ("length", None, 3, "limit", True),
     ("length", None, 2, "limit", True), ("stop", None, 3, "eos", False),
     ("stop", "z", 3, "word", False)],
)  # fmt: skip
def test_why_a_completion_ended(read, finish, word, n_ctx, kind, truncated):
    how = {"finish": finish, "word": word, "n_ctx": n_ctx, "words": ("a", "b")}
    _, whole = form_of(read, "llama completion", llamacpp.Completion, {"prompt": "a"}, **how)
    names = ("stop_type", "truncated", "stopping_word", "has_new_line", "tokens")
    found = [whole[name] for name in names]
    assert found == [kind, truncated, word or "", False, []]
    assert whole["generation_settings"]["n_predict"] == -1
    assert "completion_probabilities" not in whole


def test_fields_of_a_reply_are_chosen_by_their_paths(read):
    asked = {"prompt": ["a"], "response_fields": ["content", "generation_settings/top_k", "x/y"]}
    _, whole = form_of(read, "llama completion", llamacpp.Completion, asked)
    assert whole == [{"content": "a\n", "generation_settings/top_k": 40}]
    asked = {"prompt": "a", "response_fields": "content"}
    assert "model" in form_of(read, "llama completion", llamacpp.Completion, asked)[1]


def test_what_a_reply_repeats_of_a_completion(read):
    eog = sorted(read.text.unbounded.eog)
    for prompt, prompts, many in (
        ("a", ["a"], False), (["a"], ["a"], True), ([97, 98], ["ab"], False),
        (["a", [98]], ["a", "b"], True),
    ):  # fmt: skip
        task = READERS["llama completion"](read, Body({"prompt": prompt}))
        assert task.about == {
            "n_predict": -1, "tokens": False, "fields": [], "many": many, "prompts": prompts,
            "eog": eog,
        }  # fmt: skip
        assert {(r.logprobs, r.post_sampling) for r in task.requests} == {(None, False)}
    two = READERS["llama completion"](read, Body({"prompt": "a", "n": 2, "logprobs": 3}))
    assert (two.about["many"], [r.logprobs for r in two.requests]) == (True, [3, 3])


def test_tokens_in_llama_cpps_form_and_in_vllms(read):
    tokens = READERS["tokenize"]
    for special in (False, True):
        ids = read.text.unbounded.encode("ab", add_special=special)
        assert tokens(read, Body({"content": "ab", "add_special": special})) == {"tokens": ids}
        asked = Body({"prompt": "ab", "add_special_tokens": special})
        found = {"count": len(ids), "max_model_len": N_CTX, "tokens": ids, "token_strs": None}
        assert tokens(read, asked) == found
    ids = read.text.unbounded.encode("ab", add_special=True)
    strs = [read.text.unbounded.piece(i, special=True).decode() for i in ids]
    shown = tokens(read, Body({"prompt": "ab", "return_token_strs": True}))
    assert (shown["tokens"], shown["token_strs"]) == (ids, strs)
    assert tokens(read, Body({})) == {"tokens": []}
    eog = read.text.vocab.tokens[max(read.text.unbounded.eog)]
    one = tokens(read, Body({"content": eog, "with_pieces": True}))
    assert one == {"tokens": [{"id": max(read.text.unbounded.eog), "piece": eog}]}
    (several,) = (tokens(read, Body({"content": eog, "parse_special": False})).values(),)
    assert len(*several) > 1
    assert llamacpp._with_pieces(read, [255])[0]["piece"] == [255]
    asked = Body({"prompt": "\xff", "return_token_strs": True, "add_special_tokens": False})
    assert "".join(tokens(read, asked)["token_strs"]).count("\ufffd") == 2
    chat = tokens(read, Body(HELLO))
    assert chat["count"] == READERS["count chat"](read, Body(HELLO)) == len(chat["tokens"])
    for ids in (None, []):
        assert READERS["detokenize"](read, Body({"tokens": ids})) == ""


def test_documents_to_rank_have_a_limit_and_fit_the_context(path):
    asked = {"query": "a", "documents": ["b"] * 1024}
    assert len(llamacpp.documents(Body(asked))) == 1024
    for wrong, param in (
        ({"documents": ["b"] * 1025}, "documents"), ({"documents": []}, "documents"),
        ({"documents": "b"}, "documents"), ({"texts": [5]}, "texts"), ({"query": 5}, "query"),
        ({"documents": [{"text": 5}]}, "documents"), ({"texts": []}, "texts"),
    ):  # fmt: skip
        with pytest.raises(ApiError) as refused:
            llamacpp.documents(Body(asked | wrong))
        assert (refused.value.status, refused.value.param) == (400, param)
    short, body = reader(path), Body({"query": "a", "documents": ["b"]})
    n = len(READERS["rerank"](short, body).texts[0])
    short.limits = Limits(n, 8)
    assert len(READERS["rerank"](short, body).texts) == 1
    short.limits = Limits(n - 1, 8)
    with pytest.raises(ApiError, match=f"{n} tokens"):
        READERS["rerank"](short, body)


def test_dimensions_and_norms_have_both_their_ends(read):
    for field, low, high in (("dimensions", 1, 1 << 20), ("embd_normalize", -1, 1 << 10)):
        for value in (low, high):
            found = READERS["embeddings"](read, Body({"input": "a", field: value}))
            assert value in (found.dimensions, found.norm)
        for value in (low - 1, high + 1):
            with pytest.raises(ApiError, match=f"{field} is {value}, expected {low} to {high}"):
                READERS["embeddings"](read, Body({"input": "a", field: value}))
    packed = READERS["embeddings"](read, Body({"input": "a", "encoding_format": "base64"}))
    assert (packed.packed, packed.dimensions, packed.norm, packed.ignored) == (True, None, None, ())
    with pytest.raises(ApiError) as refused:
        READERS["embeddings"](read, Body({"input": "a", "encoding_format": "int8"}))
    assert refused.value.param == "encoding_format"
    assert READERS["embeddings"](read, Body({"input": [97] * N_CTX})).texts == [[97] * N_CTX]
    with pytest.raises(ApiError, match=str(N_CTX + 1)):
        READERS["embeddings"](read, Body({"input": [97] * (N_CTX + 1)}))


# --- ollama ---------------------------------------------------------------------------------------

END = {
    "done": True, "done_reason": "length", "total_duration": 750_000_000, "load_duration": 0,
    "prompt_eval_duration": 500_000_000, "eval_count": 2, "eval_duration": 250_000_000,
}  # fmt: skip


def undated(line):
    assert line.pop("created_at")[-1] == "Z"
    return line


def test_a_chat_in_ollamas_form(read):
    asked = HELLO | {"logprobs": True, "top_logprobs": 1}
    events, whole = form_of(read, "ollama chat", ollama.Chat, asked)
    n = READERS["chat"](read, Body(HELLO)).prompt_tokens
    end = END | {"prompt_eval_count": n}
    head = {"model": "tiny"}
    likely = whole.pop("logprobs")
    assert [(each["token"], each["logprob"]) for each in likely] == [("a", -0.5), ("\n", -0.25)]
    assert undated(whole) == head | {"message": {"role": "assistant", "content": "a\n"}} | end
    lines = [undated(event) for event in events]
    assert lines[-1] == head | {"message": {"role": "assistant", "content": ""}} | end
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line["message"]["content"] for line in lines) == "a\n"


@pytest.mark.parametrize("raw", [True, False])
def test_a_text_in_ollamas_form(read, raw):
    events, whole = form_of(read, "ollama generate", ollama.Generate, {"prompt": "a", "raw": raw})
    n = whole["prompt_eval_count"]
    assert (n == 1) is raw
    end = END | {"prompt_eval_count": n, "model": "tiny"}
    assert undated(whole) == end | {"response": "a\n"}
    lines = [undated(event) for event in events]
    assert lines[-1] == end | {"response": ""}
    assert lines[0]["done"] is False
    assert "".join(line["response"] for line in lines) == "a\n"


def test_ollamas_lines(read):
    task = READERS["ollama chat"](read, Body(HELLO))
    about = About("tiny", "b0", N_CTX, lambda: read.format)
    for form, part in ((ollama.Chat, "message"), (ollama.Generate, "response")):
        reply = form(task, about)
        line = undated(json.loads(reply.alive()))
        text = {"role": "assistant", "content": ""} if part == "message" else ""
        assert line == {"model": "tiny", "done": False, part: text}
        assert reply.error(stopping(), "/x") == '{"error":"the server is stopping"}\n'
        assert (reply.media, reply.closing) == ("application/x-ndjson", "")


def test_ollamas_messages_and_words_are_openais():
    call = {"function": {"name": "f", "arguments": {"a": "é"}}}
    given = {"role": "tool", "thinking": 5, "tool_name": "g", "tool_calls": [call], "odd": 1}
    assert ollama._message(given) == {
        "role": "tool", "content": "", "reasoning_content": "5", "name": "g",
        "tool_calls": [
            {"id": "call_0", "type": "function",
             "function": {"name": "f", "arguments": '{"a": "é"}'}}
        ],
    }  # fmt: skip
    named = ollama._call({"id": "x", "function": {"name": "f"}}, 3)
    assert named == {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    whole = {"role": "user", "content": "a", "name": "n", "tool_call_id": "t"}
    assert ollama._message(whole | {"images": [], "tool_calls": []}) == whole
    part = {"type": "image_url", "image_url": {"url": "data:image/*;base64,eA=="}}
    assert ollama._message(whole | {"images": ["eA=="]}) == whole | {
        "content": [part, {"type": "text", "text": "a"}]
    }
    for wrong in ({"images": "x"}, {"images": [5]}, {"tool_calls": [{}]}, {"tool_calls": [5]}):
        with pytest.raises(ApiError) as refused:
            ollama._message(whole | wrong)
        assert refused.value.param == "messages"
    for think, found in (
        (None, {}), (True, {"enable_thinking": True}), (False, {"enable_thinking": False}),
        *((e, {"enable_thinking": True, "reasoning_effort": e}) for e in ("low", "medium", "high")),
    ):  # fmt: skip
        assert ollama._thinking(Body({"think": think})) == found
    schema = {"type": "object"}
    for form, found in (
        (None, {}), ("", {}), ("json", {"response_format": {"type": "json_object"}}),
        (schema, {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
    ):  # fmt: skip
        assert ollama._format(Body({"format": form})) == found
    for name, value in (("think", "xhigh"), ("format", "xml")):
        with pytest.raises(ApiError) as refused:
            (ollama._thinking if name == "think" else ollama._format)(Body({name: value}))
        assert refused.value.param == name


def test_texts_of_ollamas_embeddings(read):
    embed = READERS["ollama embed"]
    for given in ([], ""):
        assert embed(read, Body({"input": given})).texts == []
    assert embed(read, Body({"prompt": "a"})).texts == [[97]]
    long = {"input": [[97] * (N_CTX + 5)]}
    assert embed(read, Body(long)).texts == [[97] * N_CTX]
    options = {"options": {"num_ctx": 5, "num_gpu": 1}}
    assert embed(read, Body({"input": "a"} | options)).ignored == ("options.num_ctx",)


# --- Anthropic and Responses ----------------------------------------------------------------------


def test_a_message_in_anthropics_form(read):
    asked = HELLO | {"max_tokens": 2}
    events, whole = form_of(read, "messages", anthropic.Messages, asked)
    n = READERS["messages"](read, Body(asked)).prompt_tokens
    usage = {
        "input_tokens": n - 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
        "output_tokens": 2,
    }  # fmt: skip
    name = whole.pop("id")
    message = {"type": "message", "role": "assistant", "model": "tiny", "stop_sequence": None}
    content = [{"type": "text", "text": "a\n"}]
    end = {"content": content, "stop_reason": "max_tokens", "usage": usage}
    assert whole == message | end
    first, *_, delta, last = events
    begun = {"content": [], "stop_reason": None, "id": name}
    assert first["type"] == "message_start"
    assert {k: first["message"][k] for k in begun | message} == begun | message
    stop = {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta == {"type": "message_delta", "delta": stop, "usage": usage}
    assert last == {"type": "message_stop"}
    blocks = [event for event in events if event["type"].startswith("content_block")]
    assert blocks[0] == {
        "type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}
    }  # fmt: skip
    assert blocks[-1] == {"type": "content_block_stop", "index": 0}
    assert "".join(block["delta"]["text"] for block in blocks[1:-1]) == "a\n"
    for text, found in (('{"a":1}', {"a": 1}), ("[1]", {}), ('{"a', {}), ("[" * 99999, {})):
        assert anthropic.arguments(text) == found


REPEATED = {
    "instructions": None, "max_output_tokens": 2, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "reasoning": {"effort": None, "summary": None},
    "temperature": 0.8, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [],
    "top_p": 0.95, "top_logprobs": 0, "user": None,
}  # fmt: skip


def test_a_response_in_openais_form(read):
    asked = {"input": "hi", "max_output_tokens": 2}
    events, whole = form_of(read, "responses", responses.Responses, asked)
    n = READERS["responses"](read, Body(asked)).prompt_tokens
    part = {"type": "output_text", "text": "a\n", "annotations": [], "logprobs": []}
    item = {"type": "message", "status": "completed", "content": [part], "role": "assistant"}
    item |= {"id": "msg_010"}
    head = {
        "id": "resp_01", "object": "response", "created_at": 1700, "background": False,
        "error": None, "model": "tiny", "previous_response_id": None, "store": False,
        "truncation": "disabled",
    } | REPEATED  # fmt: skip
    begun = head | {"status": "in_progress", "output": [], "usage": None}
    begun |= {"incomplete_details": None}
    usage = {
        "input_tokens": n, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 2, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": n + 2,
    }  # fmt: skip
    end = head | {"status": "incomplete", "output": [item], "usage": usage}
    end |= {"incomplete_details": {"reason": "max_output_tokens"}}
    assert whole == end | {"timings": TIMES}
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    for event, kind in zip(events[:2], ("created", "in_progress"), strict=True):
        assert event["type"] == f"response.{kind}"
        assert event["response"] == begun
    assert (events[-1]["type"], events[-1]["response"]) == ("response.incomplete", end)
    assert events[-1]["timings"] == TIMES
    at = {"item_id": "msg_010", "output_index": 0, "content_index": 0}
    (added,) = [event for event in events if event["type"] == "response.content_part.added"]
    assert {k: added[k] for k in at} == at
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert all({k: event[k] for k in at} == at for event in deltas)
    assert "".join(event["delta"] for event in deltas) == "a\n"
    done = events[-4:-1]
    assert [event["type"] for event in done] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done"
    ]  # fmt: skip
    assert (done[0]["text"], done[1]["part"], done[2]["item"]) == ("a\n", part, item)


def test_items_are_messages_with_their_tools_and_what_is_left_out_named():
    tools = [
        {"type": "function", "name": "f"}, {"type": "custom", "name": "c", "description": "d",
         "format": {"syntax": "lark", "definition": "x"}}, {"type": "local_shell"},
        {"type": "web_search"}, {"type": "namespace", "tools": [{"type": "function", "name": "g"}]},
    ]  # fmt: skip
    body = {
        "input": "hi", "instructions": "i", "tools": tools, "max_output_tokens": 5, "odd": 1,
        "include": ["reasoning.encrypted_content", "x"], "reasoning": {"effort": "low", "odd": 1},
        "text": {"verbosity": "low"}, "truncation": "auto", "tool_choice": {"type": "local_shell"},
    }  # fmt: skip
    fields, kinds = responses.as_chat(Body(body))
    assert kinds == {"f": "function", "c": "custom", "local_shell": "local_shell", "g": "function"}
    functions = [tool["function"] for tool in fields.pop("tools")]
    assert [(f["name"], f["description"]) for f in functions] == [
        ("f", ""), ("c", "d\nThe input must match this lark grammar:\nx"), ("local_shell", ""),
        ("g", ""),
    ]  # fmt: skip
    assert functions[0]["parameters"] == responses.NO_PARAMETERS
    assert functions[1]["parameters"] == responses._INPUT
    assert functions[2]["parameters"] == responses._SHELL
    assert fields == {
        "messages": [{"role": "system", "content": "i"}, {"role": "user", "content": "hi"}],
        "add_generation_prompt": True, "tools.web_search": True, "include.x": True,
        "reasoning.odd": 1, "text.verbosity": "low", "truncation": "auto", "max_tokens": 5,
        "reasoning_effort": "low", "odd": 1,
        "tool_choice": {"type": "function", "function": {"name": "local_shell"}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ended", "word", "own", "found"),
    [
        ("stop", "END", (), ("stop_sequence", "END")),
        ("stop", "<|end|>", ("<|end|>",), ("end_turn", None)),  # the template's own
        ("stop", None, (), ("end_turn", None)),
        ("length", "END", (), ("max_tokens", None)),
        ("tool_calls", "END", (), ("tool_use", None)),
        (None, None, (), ("end_turn", None)),
    ],
)
@pytest.mark.parametrize(("tool", "required"), [(None, False), ("f", False), (None, True)])
def test_why_an_answer_ended_in_anthropics_words(ended, word, own, found, tool, required):
    def finish(reason, *, must):
        assert must is (tool is not None or required)
        return reason

    reply = SimpleNamespace(
        task=SimpleNamespace(wanted=SimpleNamespace(tool=tool, required=required)),
        about=SimpleNamespace(format=lambda: SimpleNamespace(stop=own)),
        _parser=SimpleNamespace(finish=finish),
    )
    assert anthropic.Messages._reason(reply, Piece("", [], ended, word=word)) == found
