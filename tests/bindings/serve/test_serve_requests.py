"""Requests read for a tiny model: each limit at its number, media refused, keys that are none."""

import math
from types import SimpleNamespace

import pytest
from serving import N_CTX, reader

from tamis.bindings.serve import requests as rules
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.http import ollama_routes
from tamis.bindings.serve.requests import MOST_TOKENS
from tamis.cli.commands import serve as command
from tamis.cli.options.errors import UsageError

ASK = {"prompt": [5, 6]}
SAY = {"messages": [{"role": "user", "content": "the hand"}]}


@pytest.fixture(scope="module")
def read(path):
    found = reader(path)
    assert found.format, "read once: a test's time is its own"
    return found


def completion(read, **fields):
    return read.completion_task(Body(ASK | fields))


def chat(read, **fields):
    return read.chat_task(Body(SAY | fields))


def refused(work, *given, **fields):
    with pytest.raises(ApiError) as error:
        work(*given, **fields)
    assert error.value.status == 400
    return error.value


NUMBERS = {
    "n": (1, 8),
    "n_cmpl": (1, 8),
    "best_of": (1, 1),
    "speculative.n_max": (0, 64),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "max_tokens": (-1, MOST_TOKENS),
    "n_predict": (-1, MOST_TOKENS),
    "logprobs": (0, 20),
    "n_keep": (-1, 1 << 30),
    "id_slot": (-1, 1 << 16),
    "temperature": (0, 100),
    "top_k": (-1, 1 << 30),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0, 1),
    "repeat_penalty": (0.01, 100),
    "repetition_penalty": (0.01, 100),
    "repeat_last_n": (-1, 1 << 20),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "mirostat": (0, 2),
    "mirostat_tau": (0, 1e6),
    "mirostat_eta": (0, 1e6),
    "dynatemp_range": (0, 100),
    "dynatemp_exponent": (0, 1e6),
    "top_n_sigma": (-1, 1e6),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "dry_multiplier": (0, 1e6),
    "dry_base": (0, 1e6),
    "dry_allowed_length": (1, 1 << 30),
    "dry_penalty_last_n": (-1, 1 << 30),
    "min_keep": (0, 1 << 30),
}
UNBOUNDED = {"mirostat"}  # 3 is refused by the sampler


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_a_range_with_both_ends(read, name):
    low, high = NUMBERS[name]
    for value in (low, high):
        completion(read, **{name: value})
    below = low - 1 if isinstance(low, int) and isinstance(high, int) and high > 2 else low - 1e-3
    for value in (below, *([] if name in UNBOUNDED else [high + max(1, high * 1e-3)])):
        value = int(value) if isinstance(high, int) and high > 100 else value
        assert name in refused(completion, read, **{name: value}).message


def test_numbers_reach_the_sampler_by_their_names(read):
    given = {
        "top_k": 7, "top_p": 0.5, "min_p": 0.25, "typical_p": 0.75, "repeat_last_n": 9,
        "frequency_penalty": 0.5, "presence_penalty": 1.5, "mirostat_tau": 3.0,
        "mirostat_eta": 0.25, "dynatemp_range": 0.5, "dynatemp_exponent": 2.0,
        "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.25,
        "dry_multiplier": 0.5, "dry_base": 1.5, "dry_allowed_length": 3,
        "dry_penalty_last_n": 99, "min_keep": 2, "ignore_eos": True,
    }  # fmt: skip
    found = completion(read, temperature=0.5, mirostat=2, **given).sampling
    assert {name: getattr(found, name) for name in given} == given
    assert (found.temp, found.mirostat_mode, found.repeat_penalty) == (0.5, 2, 1.0)
    assert completion(read, top_k=-1).sampling.top_k == 0
    assert completion(read, repetition_penalty=1.5).sampling.repeat_penalty == 1.5
    both = completion(read, repetition_penalty=1.5, repeat_penalty=1.25)
    assert both.sampling.repeat_penalty == 1.25
    assert completion(read, dry_sequence_breakers="ab").sampling.dry_sequence_breakers == ("ab",)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, None),
        ({}, None),
        ([], None),
        ({"5": 1, "6": -1.5}, {5: 1.0, 6: -1.5}),
        ([[5, 1], [6, False]], {5: 1.0, 6: -math.inf}),
        ({"5": False}, {5: -math.inf}),
    ],
)
def test_biases_are_of_ids_or_texts(read, given, found):
    assert completion(read, logit_bias=given).sampling.logit_bias == found


@pytest.mark.parametrize(
    "given",
    [{"-1": 1}, {"100000": 1}, [[-1, 1]], [[5]], [5], {"5": "x"}, [[True, 1]], {"5": None}, "ab"],
)
def test_what_is_no_bias_is_refused(read, given):
    assert "logit_bias" in refused(completion, read, logit_bias=given).message


def test_as_many_texts_and_choices_as_may_be(read):
    assert len(completion(read, prompt=[[5]] * 8).requests) == 8
    assert "above 8" in refused(completion, read, prompt=[[5]] * 9).message
    assert len(completion(read, prompt=[[5]] * 4, n=2).requests) == 8
    assert "above 8" in refused(completion, read, prompt=[[5]] * 4, n=3).message
    assert len(read.prompts([[5]] * rules.MAX_INPUTS)) == rules.MAX_INPUTS == 256
    assert "at most 256" in refused(read.prompts, [[5]] * 257).message
    # One id for all choices of a request.
    assert len({request.id for request in completion(read, n=3).requests}) == 1
    assert completion(read, n=3, best_of=3)


def test_stops_have_a_number_and_a_length(read):
    assert completion(read, stop=["a" * 256] * 16).requests[0].stop == ("a" * 256,) * 16
    assert completion(read, stop=["", "b"]).requests[0].stop == ("b",)
    for wrong in (["a" * 257], ["a"] * 17, 5):
        assert "stop" in refused(completion, read, stop=wrong).message
    assert len(completion(read, dry_sequence_breakers=["b" * 40] * 16).requests) == 1
    for wrong in (["b" * 41], ["b"] * 17, [""]):
        assert "dry_sequence" in refused(completion, read, dry_sequence_breakers=wrong).message


def test_a_prompt_leaves_room_for_a_token(read):
    request = completion(read, prompt=[5] * (N_CTX - 1)).requests[0]
    assert request.max_tokens == 1
    error = refused(completion, read, prompt=[5] * N_CTX)
    assert error.code or error.kind
    assert str(N_CTX) in error.message
    assert completion(read).requests[0].max_tokens == 16
    assert completion(read, max_tokens=-1).requests[0].max_tokens == N_CTX - 2
    assert completion(read, max_tokens=0).requests[0].max_tokens == 0
    assert completion(read, max_tokens=N_CTX).requests[0].max_tokens == N_CTX - 2
    most = rules.MAX_SHIFTED
    shifted = completion(read, max_tokens=most, context_shift=True).requests[0]
    assert (shifted.max_tokens, shifted.shifts) == (most, True)
    assert most == 131072
    error = refused(completion, read, max_tokens=most + 1, context_shift=True)
    assert "context_shift with 131073 tokens" in error.message
    assert "max_tokens is 0" in refused(chat, read, max_tokens=0).message
    assert chat(read, max_tokens=1).requests[0].max_tokens == 1


@pytest.mark.parametrize(("given", "kept"), [(None, 1), (0, 1), (1, 2), (9, 2), (-1, 2)])
def test_tokens_that_a_shift_keeps(read, given, kept):
    assert completion(read, n_keep=given).requests[0].n_keep == kept


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [[]], [True], [5, None], [5, 1.5], {}, {"content": []}, {"content": [5]},
     {"prompt_string": "a", "multimodal_data": ["x"]}, [[5, -1]], [-1], [1 << 40], 5],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(read, prompt):
    if prompt == "":  # its first token is that of any text
        assert completion(read, prompt=prompt).requests[0].prompt == [read.text.tokenizer.bos]
    else:
        assert refused(completion, read, prompt=prompt).param in ("prompt", None)


def test_the_last_token_of_the_vocabulary_is_one(read):
    last = len(read.text.vocab) - 1
    assert completion(read, prompt=[0, last]).requests[0].prompt == [0, last]
    assert f"0 to {last}" in refused(completion, read, prompt=[last + 1]).message


MEDIA = {
    "image": ("image_url", "input_image", "image"),
    "audio": ("input_audio", "audio"),
    "video": ("input_video", "video_url"),
    "file": ("file", "input_file", "document"),
}


@pytest.mark.parametrize(("word", "kind"), [(w, k) for w, kinds in MEDIA.items() for k in kinds])
def test_media_are_refused_whatever_they_point_to(read, monkeypatch, word, kind):
    """No address or path of a client's is opened: not even looked at."""
    monkeypatch.setattr("builtins.open", None)
    for where in ("file:///etc/passwd", "http://127.0.0.1/x", "/etc/passwd"):
        part = {"type": kind, kind: {"url": where, "path": where}}
        for content in ([part], [{"type": "text", "text": "a"}, part]):
            error = refused(chat, read, messages=[{"role": "user", "content": content}])
            assert error.message.startswith(f"{word} input is not supported")
            assert where not in error.message


@pytest.mark.parametrize(
    "messages",
    [
        [], None, {}, ["a"], [{}], [{"role": 5}], [{"role": "user", "content": 5}],
        [{"role": "user", "content": [5]}], [{"role": "user", "content": [{"text": 5}]}],
        [{"role": "user"}, {"role": "assistant"}, {"role": "assistant"}],
        [{"role": "user", "content": "a"}] * 4097,
    ],
)  # fmt: skip
def test_what_are_no_messages(read, messages):
    assert refused(chat, read, messages=messages).message


def test_as_many_messages_and_tools_as_may_be(read):
    assert (rules.MAX_MESSAGES, rules.MAX_TOOLS, rules.MAX_ADAPTERS) == (4096, 128, 64)
    many = [{"role": "user", "content": ""}] * 4097
    assert "4097 entries, expected at most 4096" in refused(chat, read, messages=many).message
    assert len(rules._messages(Body({"messages": many[:-1]}))) == 4096
    tool = {"type": "function", "function": {"name": "f"}}
    error = refused(chat, read, tools=[tool] * 129)
    assert "129 entries, expected at most 128" in error.message
    for wrong in ([5], [{}], [{"function": 5}], [{"function": {}}], [{"function": {"name": 5}}]):
        assert refused(chat, read, tools=wrong).param == "tools"
    scale = {"id": 0, "scale": 1}
    assert len(completion(read, lora=[scale] * 64).lora) == 64
    assert "at most 64" in refused(completion, read, lora=[scale] * 65).message


@pytest.mark.parametrize(("salt", "found"), [(None, ""), ("a", "a"), ("a" * 1024, "a" * 1024)])
def test_a_salt(read, salt, found):
    assert completion(read, cache_salt=salt).salt == found


@pytest.mark.parametrize("salt", ["", "a" * 1025, 5])
def test_what_is_no_salt(read, salt):
    assert "cache_salt" in refused(completion, read, cache_salt=salt).message


def test_what_was_not_heeded_is_named_and_what_changes_nothing_is_not(read):
    task = completion(read, odd=1, user="x", metadata={}, even=None)
    assert task.ignored == ("odd",)
    assert completion(read, cache_prompt=False).cached is False
    assert completion(read).cached is True
    assert (completion(read, id_slot=-1).slot, completion(read, id_slot=0).slot) == (None, 0)


@pytest.mark.parametrize(
    ("messages", "how", "continued"),
    [
        (["user"], {}, False),
        (["user", "assistant"], {}, True),
        (["user", "assistant"], {"continue_final_message": False}, False),
        (["user", "assistant"], {"continue_final_message": True}, True),
        (["user", "assistant"], {"add_generation_prompt": True}, False),
        (["user", "assistant"], {"add_generation_prompt": False}, False),
    ],
)
def test_an_answer_goes_on_with_an_assistants_last_message(messages, how, continued):
    given = [{"role": role, "content": "a"} for role in messages]
    assert rules._continued(Body(how), given) == continued


@pytest.mark.parametrize(
    ("messages", "how"),
    [
        (["user"], {"continue_final_message": True}),
        (["user", "assistant"], {"continue_final_message": True, "add_generation_prompt": True}),
    ],
)
def test_what_cannot_go_on_is_refused(messages, how):
    given = [{"role": role, "content": "a"} for role in messages]
    assert refused(rules._continued, Body(how), given).param == "continue_final_message"


@pytest.mark.parametrize(
    "how",
    [
        {"reasoning_effort": "much"}, {"reasoning_format": "x"}, {"thinking_budget": -2},
        {"enable_thinking": 1}, {"chat_template_kwargs": {"enable_thinking": 5}},
        {"chat_template_kwargs": 5},
    ],
)  # fmt: skip
def test_what_is_said_of_thoughts_is_one_of_few_words(read, how):
    assert refused(chat, read, **how).message


@pytest.mark.parametrize(
    ("how", "on", "budget", "shown"),
    [
        ({}, None, None, True),
        ({"reasoning_effort": "none"}, False, None, True),
        ({"reasoning_effort": "low"}, None, None, True),
        ({"enable_thinking": True, "thinking_budget": 0}, True, 0, True),
        ({"thinking_budget_tokens": -1}, None, None, True),
        ({"thinking_budget": 3, "reasoning_budget": 7}, None, 7, True),
        ({"reasoning_format": "none"}, None, None, False),
        ({"reasoning_effort": "none", "enable_thinking": True}, True, None, True),
    ],
)
def test_how_a_model_thinks(how, on, budget, shown):
    wanted = SimpleNamespace(formed=False)
    found, _ = rules._thinking(Body(how), wanted)
    assert (found.on, found.budget, found.shown) == (on, budget, shown)
    if how == {}:
        assert rules._thinking(Body(how), SimpleNamespace(formed=True))[0].on is False


# --- models by name -------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """Two models, of which files are noted that are removed."""
    models = [SimpleNamespace(name=name) for name in ("a.gguf", "b.gguf")]
    removed = []
    monkeypatch.setattr(ollama_routes.registry, "installed", lambda: models)
    files = {"a.gguf": ["/m/a.gguf"], "b.gguf": ["/m/b1.gguf", "/m/b2.gguf"]}
    monkeypatch.setattr(ollama_routes.registry, "model_files", lambda model: files[model.name])
    monkeypatch.setattr(ollama_routes.registry, "remove", removed.append)
    return models, removed


def test_a_model_is_removed_by_its_very_name_and_no_file_else(installed):
    models, removed = installed
    server = SimpleNamespace(serves=lambda path: False)
    for name in ("../a.gguf", "/m/a.gguf", "a", "", "A.gguf", "hf:a.gguf", "./a.gguf"):
        with pytest.raises(ApiError) as error:
            ollama_routes.remove(server, name)
        assert (error.value.status, error.value.code) == (404, "model_not_found")
    assert removed == []
    ollama_routes.remove(server, "b.gguf")
    assert removed == [models[1]]


@pytest.mark.parametrize("served", ["/m/b1.gguf", "/m/b2.gguf"])
def test_a_model_of_which_any_part_is_served_stays(installed, served):
    with pytest.raises(ApiError) as error:
        ollama_routes.remove(SimpleNamespace(serves=served.__eq__), "b.gguf")
    assert (error.value.status, error.value.code) == (409, "in_use")
    assert installed[1] == []


@pytest.mark.parametrize(
    ("error", "why"),
    [(OSError(13, "Permission denied"), "Permission denied"), (OSError(), "it cannot be removed")],
)
def test_a_model_that_cannot_be_removed_is_said_to_stay(installed, monkeypatch, error, why):
    def remove(model):
        raise error

    monkeypatch.setattr(ollama_routes.registry, "remove", remove)
    with pytest.raises(ApiError, match=f"the model's file: {why}") as found:
        ollama_routes.remove(SimpleNamespace(serves=lambda path: False), "b.gguf")
    assert (found.value.status, found.value.code) == (500, "failed")


@pytest.mark.parametrize(
    ("n", "text"),
    [(999_400_000, "999M"), (999_999_999, "1000M"), (10**9, "1.0B"), (7_241_732_096, "7.2B")],
)
def test_parameters_are_counted_in_millions_or_billions(n, text):
    assert ollama_routes._billions(n) == text


def test_a_body_that_only_loads_a_model_is_small():
    assert ollama_routes._small(b"{" + b" " * 1022 + b"}").fields == {}
    assert ollama_routes._small(b"{" + b" " * 1023 + b"}") is None


def test_a_models_name_has_a_length():
    read = ollama_routes._model_name
    assert read(Body({"model": "a" * 512})) == "a" * 512
    assert (read(Body({"name": "b"})), read(Body({"model": "a", "name": "b"}))) == ("b", "a")
    assert read(Body({})) == ""
    assert refused(read, Body({"model": "a" * 513})).param == "model"
    assert refused(read, Body({"model": 5})).param == "model"


# --- who may ask ----------------------------------------------------------------------------------


def access(**how):
    given = {"api_key": None, "api_key_file": None, "host": "127.0.0.1", "allow_host": []}
    return command._access(SimpleNamespace(**(given | {"cors_origins": []} | how)))


@pytest.mark.parametrize("key", ["", " ", "\n", "\t\r\n", "a\0b", "a\x0bb", "a\x0cb", "a\rb"])
def test_a_key_that_is_none_is_refused_also_in_a_file(tmp_path, key):
    file = tmp_path / "keys"
    file.write_bytes(key.encode())
    for how in ({"api_key": key}, {"api_key_file": str(file)}):
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(UsageError):
                access(host=host, **how)
    with pytest.raises(UsageError, match="empty"):
        access(api_key_file="")


def test_keys_are_lines_and_the_file_goes_before(tmp_path):
    file = tmp_path / "keys"
    file.write_text(" one \n\n two\n")
    assert access(api_key_file=str(file)).keys == ("one", "two")
    assert access(api_key="k").keys == ("k",)
    assert access(api_key="other", api_key_file=str(file)).keys == ("one", "two")
    assert access().key == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.2", "::", "127.0.0.1,0.0.0.0", "example"])
def test_who_lets_others_in_has_a_key(host):
    with pytest.raises(UsageError, match="--api-key-file"):
        access(host=host)
    found = access(host=host, api_key="k")
    assert set(found.hosts) >= {"localhost", *host.split(",")}
    assert set(found.hosts) - set(host.split(",")) == {"localhost", "127.0.0.1", "::1"} - set(
        host.split(",")
    )


def test_names_and_origins_are_in_lower_case():
    found = access(allow_host=["Box.LAN"], cors_origins=["HTTPS://Site/"])
    assert found.hosts[-1] == "box.lan"
    assert found.origins == ("https://site",)
    for wrong in ([""], [" "], ["a", ""]):
        with pytest.raises(UsageError, match="--allow-host"):
            access(allow_host=wrong)
    with pytest.raises(UsageError, match="--cors-origins"):
        access(cors_origins=["*"])
    assert access(cors_origins=["*"], api_key="k").origins == ("*",)
