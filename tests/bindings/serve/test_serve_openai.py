"""`tamis serve` as its users meet it: a process, and the official client of OpenAI."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import openai
import pytest

pytestmark = pytest.mark.model
KEY = "a key"
COLOURS = [{"role": "user", "content": "Name three colours."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def url(model_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    (folder / "key").write_text(KEY + "\n")
    how = ["-c", "512", "--port", "0", "--parallel", "2", "--alias", "smol", "--metrics"]
    command = [sys.executable, "-m", "tamis", "serve", "-m", str(model_path("smollm2")), *how]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen([*command, "--api-key-file", str(folder / "key")], stderr=log)
    for _ in range(600):
        found = re.search(r"at (http://\S+):", (folder / "log").read_text())
        if found or server.poll() is not None:
            break
        time.sleep(0.1)
    assert found, (folder / "log").read_text()
    yield found[1]
    with stream(found[1]) as response:
        server.send_signal(signal.SIGTERM)
        assert b'"code":"stopping"' in response.read()  # and no half answer that looks whole
    assert server.wait(30) == 0
    text = (folder / "log").read_text()
    assert "Traceback" not in text
    assert "colours" not in text  # no prompt is in the log


def post(url, body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    data = json.dumps(body).encode()
    return urllib.request.Request(f"{url}/v1/chat/completions", data, headers)


def stream(url):
    """A long answer, once it has begun."""
    body = {"messages": COLOURS, "max_tokens": 400, "logit_bias": {"2": -100}, "stream": True}
    response = urllib.request.urlopen(post(url, body), timeout=60)
    assert response.read(64)
    return response


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        yield client


def ask(client, **how):
    given = {"model": "smol", "messages": COLOURS, "temperature": 0, "max_tokens": 16}
    return client.chat.completions.create(**given | how)


def test_models_and_a_chat(client):
    assert [model.id for model in client.models.list()] == ["smol"]
    found = ask(client)
    assert "Red" in found.choices[0].message.content
    assert found.choices[0].finish_reason == "length"
    assert found.usage.total_tokens == found.usage.prompt_tokens + 16


def test_a_stream_says_the_same_with_usage_and_logprobs(client):
    whole = ask(client, logprobs=True, top_logprobs=3)
    tokens = whole.choices[0].logprobs.content
    assert len(tokens) == 16
    assert "".join(token.token for token in tokens) == whole.choices[0].message.content
    assert all(token.top_logprobs[0].logprob == token.logprob <= 0 for token in tokens)
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 16


def test_an_answer_by_a_json_schema(client):
    schema = WEATHER["function"]["parameters"]
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    found = ask(client, response_format=wanted, max_tokens=64)
    assert json.loads(found.choices[0].message.content)["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_is_asked_for_is_called(client, stream):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    found = ask(client, tools=[WEATHER], tool_choice=choice, max_tokens=64, stream=stream)
    if stream:
        calls = [call for chunk in found for call in chunk.choices[0].delta.tool_calls or ()]
    else:
        assert found.choices[0].finish_reason == "tool_calls"
        calls = found.choices[0].message.tool_calls
    # A name comes with the first piece of a call, arguments piece by piece.
    assert [call.function.name for call in calls if call.function.name] == ["get_weather"]
    arguments = "".join(call.function.arguments or "" for call in calls)
    assert json.loads(arguments)["city"] in ("Paris", "Rome")


def test_completions_and_embeddings(client):
    how = {"model": "smol", "prompt": "The capital of France is", "temperature": 0}
    found = client.completions.create(**how, max_tokens=4)
    assert found.choices[0].text.startswith(" Paris")
    vectors = client.embeddings.create(model="smol", input=["a cat", "a dog"]).data
    assert [len(vector.embedding) for vector in vectors] == [576, 576]


def test_errors_are_the_clients_exceptions(client, url):
    with pytest.raises(openai.BadRequestError, match="512") as error:
        ask(client, messages=[{"role": "user", "content": "word " * 600}])
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        ask(client, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def metrics(url):
    request = urllib.request.Request(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as response:
        lines = response.read().decode().splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


def wait_for(url, name, value):
    for _ in range(300):
        if metrics(url)[name] == value:
            return
        time.sleep(0.02)
    raise AssertionError(f"{name} is {metrics(url)[name]}, expected {value}")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_slot(client, url, stream):
    cancelled = int(metrics(url)["tamis_jobs_cancelled_total"])
    body = {"messages": COLOURS, "max_tokens": 400, "logit_bias": {"2": -100}, "stream": stream}
    data = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: "
    head += f"{len(data)}\r\nContent-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + data)
        wait_for(url, "tamis_jobs_running", "1")
        if stream:
            assert connection.recv(64)
    wait_for(url, "tamis_jobs_running", "0")
    wait_for(url, "tamis_jobs_cancelled_total", str(cancelled + 1))  # told once a second


def test_requests_at_once_are_not_mixed(client):
    questions = [f"Repeat the number {n}." for n in (17, 29, 31, 53)]

    def answer(question):
        return ask(client, messages=[{"role": "user", "content": question}], max_tokens=12)

    alone = [answer(question).choices[0].message.content for question in questions]
    found = [""] * len(questions)

    def work(i):
        found[i] = answer(questions[i]).choices[0].message.content

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(questions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone
