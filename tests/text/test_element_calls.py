"""Calls whose arguments are elements within elements, as MiniMax M3 writes them."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.text.calls.elements import attributes, element_arguments
from tamis.text.calls.values import Tools
from tamis.text.chat_format import ChatFormat
from tamis.text.chat_template import ChatTemplate
from tamis.text.tool_calls import OutputParser, message_of

NS = "]<]minimax[>["
PARAMETERS = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "rows": {"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
        "where": {
            "type": "object",
            "properties": {"item": {"type": "boolean"}, "note": {"type": ["string", "null"]}},
        },
        "any": {},
    },
}
TOOLS = [{"type": "function", "function": {"name": "put", "parameters": PARAMETERS}}]
TEMPLATE = (
    "{% set ns = ']<]minimax[>[' %}"
    "{% macro xml(v) %}{% if v is mapping %}{% for k, w in v.items() if w is not none %}"
    "{{ ns }}<{{ k }}>{{ xml(w) }}{{ ns }}</{{ k }}>{% endfor %}"
    "{% elif v is iterable and v is not string %}{% for w in v %}{{ ns }}<item>{{ xml(w) }}"
    "{{ ns }}</item>{% endfor %}{% elif v is boolean %}{{ v | tojson }}{% else %}{{ v }}{% endif %}"
    "{% endmacro %}"
    "{% for m in messages %}]~b]{{ m.role }}\n{{ m.content or '' }}{% if m.tool_calls %}"
    "{{ ns }}<tool_call>\n{% for c in m.tool_calls %}"
    '{{ ns }}<invoke name="{{ c.function.name }}">{{ xml(c.function.arguments) }}'
    "{{ ns }}</invoke>\n"
    "{% endfor %}{{ ns }}</tool_call>{% endif %}[e~[\n{% endfor %}"
    "{% if add_generation_prompt %}]~b]assistant\n{% endif %}"
)
FORMAT = ChatFormat.of(ChatTemplate(TEMPLATE))


def written(*arguments: dict) -> str:
    calls = [{"function": {"name": "put", "arguments": a}} for a in arguments]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    whole = ChatTemplate(TEMPLATE).render([message], add_generation_prompt=False)
    return whole.removeprefix("]~b]assistant\n").removesuffix("[e~[\n")


def read(text: str, step: int = 10**9, **end: bool) -> dict:
    parser = OutputParser(FORMAT, tools=TOOLS, new_id=lambda: "id")
    deltas = [d for i in range(0, len(text), step) for d in parser.push(text[i : i + step])]
    return message_of([*deltas, *parser.finish(**end)])


def arguments(text: str, step: int = 10**9) -> list[dict]:
    found = read(text, step).get("tool_calls") or []
    return [json.loads(call["function"]["arguments"]) for call in found]


def test_the_format_is_read_off_the_template():
    assert FORMAT.tools is not None
    assert FORMAT.tools.style == "elements"
    assert FORMAT.tools.openers == (f"{NS}<tool_call>", f'{NS}<invoke name="')
    assert FORMAT.tools.closers == (f"{NS}</invoke>", f"{NS}</tool_call>")
    assert NS in FORMAT.marks(), "a parser must see the control token"


@pytest.mark.parametrize("step", [1, 3, 7, 10**9])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"path": ""},
        {"path": " a\n", "size": -3},
        {"path": "true", "tags": ["1", "null", ""]},
        {"tags": [], "where": {}},
        {"rows": [[1, 2.5], [], [-1e-7]]},
        {"where": {"item": False, "note": "x"}},
        {"any": {"a": [{"b": "c"}], "d": 1}},
        {"path": f"{NS}</invoke>\n{NS}</tool_call>", "size": 1},
        {"path": f"a{NS}<size>1{NS}</size>", "tags": [f"{NS}<item>", f"{NS}</invoke>"]},
        {"path": f"see {NS}</path> here"},
    ],
)
def test_arguments_come_back_with_the_types_of_their_schema(given, step):
    assert arguments(written(given), step) == [given]
    assert arguments(written(given, {"size": 2}), step) == [given, {"size": 2}]


@settings(max_examples=60, deadline=None)
@given(
    given=st.fixed_dictionaries(
        {
            "path": st.lists(st.sampled_from([NS, "<", "a", "</", ">", "item", " "])).map("".join),
            "size": st.integers(),
            "tags": st.lists(st.text("ab<]\n", max_size=4), max_size=3),
            "rows": st.lists(st.lists(st.integers(), max_size=2), max_size=3),
        }
    )
)
def test_any_arguments_come_back_in_any_pieces(given):
    text = written(given)
    whole = read(text)
    assert all(read(text, step) == whole for step in (1, 3, 7))
    if f"{NS}</path>" not in given["path"]:
        assert arguments(text) == [given]


@pytest.mark.parametrize(
    "text",
    [
        f'{NS}<tool_call>\n{NS}<invoke name="put">{NS}<path>a',
        f'{NS}<tool_call>\n{NS}<invoke name="put">words{NS}</invoke>',
        f'{NS}<invoke name="">{NS}</invoke>',
    ],
)
def test_what_cannot_be_read_is_text(text):
    message = read(text)
    assert "tool_calls" not in message
    assert message["content"] == text


def test_a_call_that_the_limit_cuts_off_is_text():
    text = f'{NS}<tool_call>\n{NS}<invoke name="put">{NS}<path>a{NS}</path>'
    assert read(text, cut=True)["content"] == text
    assert arguments(text) == [{"path": "a"}], "the model ended its answer: it may lack a mark"


@pytest.mark.parametrize(
    "piece",
    [f"{NS}<a>", f"{NS}<a>{NS}<b>{NS}</a>", f"{NS}</a>", f"{NS}</a> x", f"{NS}<a>{NS}</b>", NS],
)
def test_hostile_elements_take_time_in_proportion(piece):
    place = Tools(TOOLS).arguments("put")

    def seconds(n: int) -> float:
        begun = time.process_time()
        element_arguments(piece * n, NS, place)
        return time.process_time() - begun

    assert seconds(40_000) < 20 * seconds(4_000) + 0.2


def test_attributes_are_unescaped():
    assert attributes(' tool="a&quot;b" index="1"') == {"tool": 'a"b', "index": "1"}
    assert attributes(' key="&amp;quot;" type=') == {"key": "&quot;"}
