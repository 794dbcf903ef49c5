"""Penalties and DRY count the prompt on every route, whether it was read or came from the cache."""

import pytest

LOUD = 60.0  # a bias that makes a token certain, unless a penalty takes it away


def chosen(client, path, prompt, **more):
    """The one token that a prompt is answered with, as text."""
    body = {"prompt": prompt, "max_tokens": 1, "n_predict": 1, "temperature": 0} | more
    if "chat" in path or path.endswith("messages"):
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    if path.endswith("responses"):
        body |= {"input": body.pop("prompt"), "max_output_tokens": body.pop("max_tokens")}
    if path.startswith("/api"):
        names = ("max_tokens", "n_predict", "temperature", *more)
        options = {name: body.pop(name) for name in names if name in body}
        body |= {"options": options | {"num_predict": 1}, "stream": False}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    reply = response.json()
    if path.startswith("/api"):
        return reply["message"]["content"] if "message" in reply else reply["response"]
    if "choices" in reply:
        choice = reply["choices"][0]
        return choice.get("text") or choice["message"]["content"]
    if path.endswith("responses"):
        return reply["output"][0]["content"][0]["text"]
    return reply["content"][0]["text"] if path.endswith("messages") else reply["content"]


@pytest.fixture(scope="module")
def token(client):
    return client.post("/tokenize", json={"content": "x"}).json()["tokens"][0]


ROUTES = [
    "/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses",
    "/api/chat", "/api/generate",
]  # fmt: skip
PENALTIES = [{"repeat_penalty": 1e2}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}]


@pytest.mark.parametrize("route", ROUTES)
def test_a_token_of_the_prompt_is_penalised(client, token, route):
    loud = {"logit_bias": {str(token): LOUD}}
    assert chosen(client, route, "x", **loud) == "x", "the bias is enough without penalties"
    for _cached in range(2):
        assert chosen(client, route, "x", **loud, repeat_penalty=100.0) != "x"
    assert chosen(client, route, "x", **loud, repeat_penalty=100.0, repeat_last_n=0) == "x"


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_what_lies_before_the_window_is_not(client, penalty, cached):
    """80 other tokens follow the one that is asked for: the usual 64 do not reach it, 81 do."""
    other = client.post("/tokenize", json={"content": "q"}).json()["tokens"][0]
    asked = {"n_predict": 1, "temperature": 0, "n_probs": 100, "return_tokens": True}
    asked["cache_prompt"] = cached

    def likely_after(prompt):
        reply = client.post("/completion", json=asked | {"prompt": prompt}).json()
        top = reply["completion_probabilities"][0]["top_logprobs"]
        return {each["id"]: each["logprob"] for each in top}

    token = list(likely_after([other] * 81))[5]
    asked["prompt"] = [token, *[other] * 80]
    likely = likely_after(asked["prompt"])
    behind = max(p for i, p in likely.items() if i not in (token, other)) - likely[token]
    lead = LOUD if "repeat_penalty" in penalty else 1.0  # less than 2, which the others take off
    asked["logit_bias"] = {str(token): behind + lead, str(other): -100}

    def first(**more):
        return client.post("/completion", json=asked | penalty | more).json()["tokens"][0]

    assert first() == token, "64 by default"
    assert first(repeat_last_n=81) != token
    assert first(repeat_last_n=80) == token
    assert first(repeat_last_n=-1) != token
    assert first(repeat_last_n=0) == token


@pytest.mark.parametrize("cached", [True, False])
def test_dry_counts_the_prompt_within_its_window(client, cached):
    """x y z, 5 others, x y: z would go on with it; 10 tokens reach the first x, 9 do not."""
    ids = client.post("/tokenize", json={"content": "xyzabcde"}).json()["tokens"]
    assert len(ids) == 8, "a token a letter"
    x, y, z, *others = ids
    asked = {"prompt": [x, y, z, *others, x, y], "n_predict": 1, "temperature": 0}
    asked |= {"logit_bias": {str(z): LOUD}, "return_tokens": True, "cache_prompt": cached}
    asked |= {"dry_sequence_breakers": []}

    def first(**more):
        return client.post("/completion", json=asked | more).json()["tokens"][0]

    dry = {"dry_multiplier": 1000.0, "dry_allowed_length": 2}
    assert first() == z
    assert first(**dry) != z
    assert first(**dry, dry_penalty_last_n=10) != z
    assert first(**dry, dry_penalty_last_n=9) == z
    assert first(**dry, dry_penalty_last_n=0) == z
