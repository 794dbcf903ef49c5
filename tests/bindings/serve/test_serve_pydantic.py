"""Models of pydantic through openai-python's own helpers, answered by a real model."""

import warnings

import openai
import pytest
from pydantic import BaseModel, create_model
from pydantic_models import KINDS
from serving import local_server
from starlette.testclient import TestClient

from tamis.engine.engine import Engine

pytest.importorskip("llguidance")

pytestmark = pytest.mark.model


# The texts of these are read by pydantic more narrowly than their schemas say.
NARROWER = {"decimal"}
HINTS = {"recursive": 'a tree of one leaf, {"field": {"value": 1, "below": []}}'}
ENDLESS = {"recursive"}  # the small model nests on until the limit of tokens


@pytest.fixture(scope="module")
def client(model_path):
    with Engine.load(model_path("smollm2"), n_threads=2) as engine:
        server = local_server(engine, [engine.session(n_ctx=1024, n_ubatch=128)])
        with TestClient(server.app, base_url="http://localhost") as http:
            yield openai.OpenAI(base_url="http://localhost/v1", api_key="x", http_client=http)
        server.stop()
        server.close()


def model_of(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return create_model("Record", field=(KINDS[kind], ...), __base__=BaseModel)


def asked(kind):
    content = f"Make a short record as an example of: {HINTS.get(kind, kind)}. Answer in JSON."
    how = {"model": "m", "temperature": 0, "max_tokens": 200, "seed": 1, "repeat_penalty": 1.3}
    extra = {"repeat_penalty": how.pop("repeat_penalty")}
    return how | {"messages": [{"role": "user", "content": content}], "extra_body": extra}


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in NARROWER | ENDLESS])
def test_an_answer_is_parsed_as_the_model(client, kind):
    model = model_of(kind)
    found = client.chat.completions.parse(**asked(kind), response_format=model)
    assert isinstance(found.choices[0].message.parsed, model)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NARROWER])
def test_the_arguments_of_a_call_are_parsed_as_the_model(client, kind):
    tool = openai.pydantic_function_tool(model_of(kind), name="put")
    found = client.chat.completions.parse(**asked(kind), tools=[tool], tool_choice="required")
    (call,) = found.choices[0].message.tool_calls
    assert call.function.name == "put"
    assert isinstance(call.function.parsed_arguments, BaseModel)


@pytest.mark.parametrize("kind", ["nested", "tuple"])
def test_an_answer_of_responses_is_parsed_as_the_model(client, kind):
    model, how = model_of(kind), asked(kind)
    found = client.responses.parse(
        model="m", input=how["messages"], max_output_tokens=200, text_format=model
    )
    assert isinstance(found.output_parsed, model)
