"""Answers parsed as they come, in the formats that templates show; templates here are abridged."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import within

from tamis.text.calls.gemma import gemma_arguments
from tamis.text.calls.tape import Tape
from tamis.text.chat_format import ChatFormat
from tamis.text.chat_template import ChatTemplate
from tamis.text.thinking import ThinkingBudget
from tamis.text.tool_calls import OutputParser, message_of

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "options": {"type": "object"},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": PROPERTIES}}}
    for name in ("get_weather", "stop")
]
ARGUMENTS = {"city": 'San "José"\nx', "days": 3, "options": {"a": ["}", None, True]}}
ARGUMENTS_JSON = json.dumps(ARGUMENTS)


def chat(assistant: str, end: str = "<|im_end|>", prompt: str = "") -> str:
    """A template: ``assistant`` renders one of the assistant's messages m."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
        + assistant
        + end
        + "\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + prompt + "{% endif %}"
    )


def calls(one: str, before: str = "", between: str = "", after: str = "") -> str:
    return (
        "{% if m.tool_calls %}" + before + "{% for c in m.tool_calls %}{% set f = c.function %}"
        "{% set a = f.arguments %}" + one + "{% if not loop.last %}" + between + "{% endif %}"
        "{% endfor %}" + after + "{% endif %}"
    )


THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
TEXT = "{{ m.content or '' }}"
EACH = "{% for k, v in a.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
XML = EACH + "<parameter={{ k }}>\n" + VALUE + "\n</parameter>\n{% endfor %}"
KEYS = EACH + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + VALUE + "</arg_value>\n{% endfor %}"
JSON = '{"name": "{{ f.name }}", "arguments": {{ a | tojson }}'
TAGGED = '<parameter name="{{ k }}">' + VALUE + "</parameter>\n"
TEMPLATES = {
    "hermes": THOUGHT + TEXT + calls("<tool_call>\n" + JSON + "}\n</tool_call>", between="\n"),
    "llama": TEXT + calls('{"name": "{{ f.name }}", "parameters": {{ a | tojson }}}'),
    "mistral list": TEXT
    + calls(JSON + ', "id": "{{ c.id }}"}', "[TOOL_CALLS][", between=", ", after="]"),
    "mistral": TEXT + calls("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ a | tojson }}"),
    "deepseek r1": THOUGHT
    + TEXT
    + calls(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n{{ a | tojson }}\n```"
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        between="\n",
        after="<｜tool▁calls▁end｜>",
    ),
    "deepseek": THOUGHT
    + TEXT
    + calls(
        "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ a | tojson }}<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        after="<｜tool▁calls▁end｜>",
    ),
    "glm": THOUGHT + TEXT + calls("\n<tool_call>{{ f.name }}\n" + KEYS + "</tool_call>"),
    "qwen coder": TEXT
    + calls("<tool_call>\n<function={{ f.name }}>\n" + XML + "</function>\n</tool_call>"),
    "minimax": THOUGHT
    + TEXT
    + calls(
        '<invoke name="{{ f.name }}">\n' + EACH + TAGGED + "{% endfor %}</invoke>\n",
        "<minimax:tool_call>\n",
        after="</minimax:tool_call>",
    ),
    "kimi": TEXT
    + calls(
        "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        "{{ a | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        after="<|tool_calls_section_end|>",
    ),
    "command r": "{% if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content }}"
    "<|END_THINKING|>{% endif %}{% if m.content %}<|START_TEXT|>{{ m.content }}<|END_TEXT|>"
    "{% endif %}"
    + calls(
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", '
        '"parameters": {{ a | tojson }}}',
        "<|START_ACTION|>[\n    ",
        between=",\n    ",
        after="\n]<|END_ACTION|>",
    ),
    "nemotron": THOUGHT
    + TEXT
    + calls(JSON + "}", "<TOOLCALL>[", between=", ", after="]</TOOLCALL>"),
    "functionary": TEXT + calls("<function={{ f.name }}>{{ a | tojson }}</function>"),
    "apertus": TEXT
    + calls(
        '{"{{ f.name }}": {{ a | tojson }}}',
        "<|tools_prefix|>[",
        between=", ",
        after="]<|tools_suffix|>",
    ),
    "fenced": TEXT
    + calls(
        '{"tool_name": "{{ f.name }}", "parameters": {{ a | tojson }}}',
        "Action:\n```json\n[",
        between=",\n",
        after="]\n```",
    ),
    "kimi k3": "{% if m.reasoning_content %}<|open|>think<|sep|>{{ m.reasoning_content }}"
    "<|close|>think<|sep|>{% endif %}{% if m.content %}<|open|>response<|sep|>{{ m.content }}"
    "<|close|>response<|sep|>{% endif %}"
    + calls(
        '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
        + EACH
        + "<|open|>argument key=\"{{ k }}\" type=\"{{ 'string' if v is string else 'number' "
        "if v is number else 'object' }}\"<|sep|>" + VALUE + "<|close|>argument<|sep|>{% endfor %}"
        "<|close|>call<|sep|>",
        "<|open|>tools<|sep|>",
        after="<|close|>tools<|sep|>",
    ),
    "granite": THOUGHT + TEXT + calls("<tool_call>\n" + JSON + "}\n</tool_call>", between="\n"),
}
SINGLE = {"llama"}  # a second call would be another message


def parser(template: str, prompt: str = "", tools=TOOLS) -> OutputParser:
    ids = itertools.count()
    return OutputParser.for_template(
        ChatTemplate(template), tools=tools, prompt=prompt, new_id=lambda: f"new{next(ids)}"
    )


def parsed(template: str, text: str, prompt: str = "", tools=TOOLS) -> dict:
    p = parser(template, prompt, tools)
    return message_of([*p.push(text), *p.finish()])


def answer(template: str, message: dict) -> str:
    """What a model would write to say ``message``."""
    t, question = ChatTemplate(template), [{"role": "user", "content": "?"}]
    messages = ChatFormat.of(t).normalized([*question, {"role": "assistant", **message}])
    whole = t.render(messages, add_generation_prompt=False, tools=TOOLS)
    return whole.removeprefix(t.render(question, tools=TOOLS)).removesuffix("<|im_end|>\n")


def call(name: str, arguments: dict, id: str = "abcdefg01") -> dict:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": id, "type": "function", "function": function}


def said(message: dict) -> tuple:
    """What is compared of a message: ids of calls are the parser's where a format has none."""
    found = [
        (c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in message.get("tool_calls") or ()
    ]
    return (message.get("content") or "", message.get("reasoning_content", ""), found)


MESSAGES = {
    "text": {"content": "Hello {x}\n\n<b> [y] world"},
    "call": {"content": "", "tool_calls": [call("get_weather", ARGUMENTS)]},
    "text and call": {"content": "Wait.", "tool_calls": [call("get_weather", ARGUMENTS)]},
    "two calls": {
        "content": "",
        "tool_calls": [call("get_weather", ARGUMENTS), call("stop", {}, "abcdefg02")],
    },
    "thought": {"content": "Yes.", "reasoning_content": "Is it?\nIt is."},
    "thought and call": {
        "content": "",
        "reasoning_content": "Let me look.",
        "tool_calls": [call("stop", {"city": "x"})],
    },
}


@pytest.mark.parametrize("what", MESSAGES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_back_however_it_is_cut(name, what):
    template, message = chat(TEMPLATES[name]), MESSAGES[what]
    if "reasoning_content" in message and "reasoning_content" not in template:
        pytest.skip("renders no thoughts")
    if name in SINGLE and what in ("two calls", "text and call"):
        pytest.skip("one call is all of the answer")
    text = answer(template, message)
    whole = parsed(template, text)
    assert said(whole) == said(message)
    one_by_one = parser(template)
    deltas = [delta for c in text for delta in one_by_one.push(c)]
    assert message_of([*deltas, *one_by_one.finish()]) == whole


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_text_is_parsed_the_same_in_any_pieces_and_never_fails(name, data):
    template = chat(TEMPLATES[name])
    marks = sorted(ChatFormat.of(ChatTemplate(template)).marks())
    words = [*marks, *'{}[]":,<x \n', "get_weather", '"name"', '"arguments"', "city"]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=12)))
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    whole = parsed(template, text)
    p, deltas = parser(template), []
    for start, stop in itertools.pairwise([0, *places, len(text)]):
        deltas += p.push(text[start:stop])
    assert message_of([*deltas, *p.finish()]) == whole


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_tools_calls_are_text(name):
    template = chat(TEMPLATES[name])
    text = answer(template, MESSAGES["call"])
    assert parsed(template, text, tools=None)["content"].strip() == text.strip()


@pytest.mark.parametrize(
    "text", ["<tool_call>\nno call</tool_call>", "<tool_call>{1: 2}", "a <tool"]
)
def test_what_is_no_call_is_text(text):
    assert parsed(chat(TEMPLATES["hermes"]), text) == {"role": "assistant", "content": text}


def test_a_call_is_announced_when_the_end_of_its_arguments_is_sure():
    p = parser(chat(TEMPLATES["hermes"]))
    assert p.push('<tool_call>\n{"name": "stop", "arguments": {"city": "Par') == []
    assert said(message_of(p.push('is"}}'))) == ("", "", [("stop", {"city": "Paris"})])


@pytest.mark.parametrize("next", ["\n<tool_call>", "", "\n\nDone."])
def test_a_call_without_escapes_is_announced_when_what_follows_is_known(next):
    """Its last value may hold the marks that seem to end it: then more of them come."""
    p = parser(chat(TEMPLATES["qwen coder"]))
    assert p.push("<tool_call>\n<function=stop>\n<parameter=city>\nParis") == []
    assert p.push("\n</parameter>\n</function>\n</tool_call>") == []
    found = [*p.push(next), *(() if next.endswith(">") else p.finish())]
    assert said(message_of(found)) == (
        next.strip() if next.endswith(".") else "",
        "",
        [("stop", {"city": "Paris"})],
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_is_cut_off_is_text_as_a_whole(name):
    template = chat(TEMPLATES[name])
    text = answer(template, MESSAGES["call"])
    for n in range(1, text.rindex("options")):
        p = parser(template)
        message = message_of([*p.push(text[:n]), *p.finish(cut=True)])
        assert said(message)[0].strip() == text[:n].strip()
        assert said(message)[2] == []


def test_arguments_may_come_before_the_name():
    message = parsed(
        chat(TEMPLATES["hermes"]), '<tool_call>{"arguments": {"days": 3}, "name": "stop"}'
    )
    assert said(message) == ("", "", [("stop", {"days": 3})])


def test_a_prompt_that_ends_in_a_thought_begins_with_one():
    template = chat(TEMPLATES["hermes"], prompt="<think>\n")
    message = parsed(template, "so\n</think>\n\nYes", prompt="<|im_start|>assistant\n<think>\n")
    assert said(message) == ("Yes", "so", [])
    closed = parsed(template, "Yes", prompt="<think>\n\n</think>\n\n")
    assert said(closed) == ("Yes", "", [])


def test_a_thought_that_never_ends_is_a_thought():
    message = parsed(chat(TEMPLATES["hermes"]), "<think>\nwhy <tool_call> not")
    assert said(message) == ("", "why <tool_call> not", [])


HARMONY = "{{ '<|start|>' }}{{ '<|channel|>' }}{{ '<|message|>' }}{{ '<|end|>' }}"


def test_harmony_channels():
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.stop <|constrain|>json<|message|>{"days": 1}<|call|>'
    )
    assert said(parsed(HARMONY, text, "<|start|>assistant")) == ("", "Hm.", [("stop", {"days": 1})])
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    )
    assert said(parsed(HARMONY, text, "<|start|>assistant")) == ("Yes", "Hm.", [])
    assert said(parsed(HARMONY, "Plain.", "<|start|>assistant")) == ("Plain.", "", [])


def test_python_lists_of_calls():
    template = chat(TEXT) + "{# #}{{ '<|tool_list_start|>' if tools }}"
    text = "Now.<|tool_call_start|>[stop(city='a\\nb', days=3), stop()]<|tool_call_end|>"
    expected = ("Now.", "", [("stop", {"city": "a\nb", "days": 3}), ("stop", {})])
    assert said(parsed(template, text)) == expected
    no_call = "<|tool_call_start|>[__import__('os').system('x')]<|tool_call_end|>"
    assert parsed(template, no_call)["content"] == no_call


def test_gemma_objects():
    value = '{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v }}{% endif %}'
    items = EACH + "{{ k }}:" + value + "{{ ',' if not loop.last }}{% endfor %}"
    one = "<|tool_call>call:{{ f.name ~ '{' }}" + items + "{{ '}' }}<tool_call|>"
    text = '<|tool_call>call:stop{city:<|"|>a, "b"}<|"|>,days:3,options:{x:[1,true]}}<tool_call|>'
    expected = [("stop", {"city": 'a, "b"}', "days": 3, "options": {"x": [1, True]}})]
    assert said(parsed(chat(TEXT + calls(one)), text)) == ("", "", expected)


GEMMA_THOUGHT = (
    "{{ '<|channel>thought' + '\\n' + m.reasoning_content + '<channel|>' if m.reasoning_content }}"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\nHm.<channel|>Yes.<channel|>", ("Yes.", "Hm.")),
        ("Yes.<|channel>thought\n<channel|>", ("Yes.", "")),
        ("<|channel><|channel>thought\nHm.<channel|>Yes.", ("Yes.", "Hm.")),
        (
            "<|channel>thought\nA.<channel|>One.<|channel>thought\nB.<channel|>Two.",
            ("One.Two.", "A.B."),
        ),
        ("<|chan", ("<|chan", "")),
    ],
)
def test_gemma_thinks_again_and_leaves_marks(text, expected):
    template = chat(GEMMA_THOUGHT + TEXT)
    assert said(parsed(template, text))[:2] == expected


def test_the_control_token_that_begins_a_thought_is_shown():
    """It is a token of its own, the word after it is another one."""
    assert "<|channel>" in ChatFormat.of(ChatTemplate(chat(GEMMA_THOUGHT + TEXT))).marks()


def gemma_template(told: str = "") -> str:
    """Which has answers of tools as a part of the message that calls them."""
    one = "{{ '<|tool_call>call:' + f.name + '{' }}" + EACH + "{{ k }}:{{ v }}{% endfor %}"
    answers = "{% for r in m.tool_responses %}[{{ r.name }}:{{ r.response.t }}]{% endfor %}"
    body = calls(one + "{{ '}' }}<tool_call|>") + answers + TEXT
    return chat(body) + told


def test_answers_of_tools_go_where_the_first_gemma_templates_have_them():
    found = ChatFormat.of(ChatTemplate(gemma_template()))
    asking = {"role": "assistant", "content": "Well.", "tool_calls": [call("stop", {"days": 1})]}
    messages = [
        {"role": "user", "content": "When?"},
        asking,
        {"role": "tool", "tool_call_id": "x", "content": '{"t": 3}'},
        {"role": "assistant", "content": "At 3."},
    ]
    _, joined = found.normalized(messages)
    assert joined["tool_responses"] == [{"name": "stop", "response": {"t": 3}}]
    assert joined["content"] == "At 3."
    assert asking["content"] == "Well."  # those given stay as they are
    later = ChatFormat.of(ChatTemplate(gemma_template("{#- OpenAI Chat Completions: -#}")))
    assert len(later.normalized(messages)) == 4


def test_a_gemma_prompt_ends_with_the_beginning_of_an_answer():
    template = ChatTemplate("{#'<|tool_call>call:'#}{{ messages[0].content }}<turn|>\n{# #}\n")
    assert template.render([{"role": "user", "content": "a"}]).endswith("<turn|>\n<|turn>model\n")
    plain = template.render([{"role": "user", "content": "a"}], add_generation_prompt=False)
    assert plain.endswith("<turn|>\n")


def test_calls_without_marks_are_of_known_tools_only():
    template = chat(TEMPLATES["llama"])
    other = '{"name": "other", "parameters": {}}'
    assert parsed(template, other)["content"] == other
    assert parsed(template, '{"a": 1}')["content"] == '{"a": 1}'
    tagged = '<|python_tag|>{"name": "stop", "parameters": {"days": 1}}'
    assert said(parsed(template, tagged)) == ("", "", [("stop", {"days": 1})])


def test_arguments_are_given_as_the_template_wants_them():
    as_dict = ChatFormat.of(ChatTemplate(chat(TEMPLATES["hermes"])))
    message = {"role": "assistant", "content": None, "tool_calls": [call("stop", {"days": 1})]}
    function = as_dict.normalized([message])[0]["tool_calls"][0]["function"]
    assert function["arguments"] == {"days": 1}
    assert message["tool_calls"][0]["function"]["arguments"] == '{"days": 1}'
    text = calls('<tool_call>{{ \'{"name": "\' + f.name + \'", "arguments": \' + a }}}</tool_call>')
    as_text = ChatFormat.of(ChatTemplate(chat(TEXT + text)))
    assert as_text.arguments_as_text
    function = as_text.normalized([as_dict.normalized([message])[0]])[0]["tool_calls"][0][
        "function"
    ]
    assert function["arguments"] == '{"days": 1}'


@pytest.mark.parametrize("name", ["hermes", "glm", "qwen coder", "deepseek", "llama"])
def test_long_answers_take_time_in_proportion(name):
    long = {"content": "", "tool_calls": [call("stop", {"city": 'a"\n<' * 10_000})]}
    p, text = parser(chat(TEMPLATES[name])), answer(chat(TEMPLATES[name]), long)
    with within(4):
        deltas = [d for i in range(0, len(text), 4) for d in p.push(text[i : i + 4])]
        message = message_of([*deltas, *p.finish()])
    assert said(message) == said(long)


HOSTILE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from("}]\"'<{\\"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab-", max_size=3), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_hostile_arguments_come_back(name, data):
    """Marks within values, every type of JSON, any character."""
    template = chat(TEMPLATES[name])
    marks = sorted(ChatFormat.of(ChatTemplate(template)).marks())
    words = [*marks, *"{}[]'\"\\<>", "a b", "é🙂", "\n", " ", "null", "True", "42"]
    # Spaces at its ends stay; what would go on with the call ends a text that nothing could tell.
    parts = data.draw(st.lists(st.sampled_from(words), max_size=6))
    arguments = {
        "city": " see ".join(["x", *parts, "y"]),
        "days": data.draw(st.integers()),
        "options": {"a": data.draw(HOSTILE), "b": parts},
    }
    text = answer(template, {"content": "", "tool_calls": [call("get_weather", arguments)]})
    for step in (1, 7, len(text)):
        p = parser(template)
        deltas = [d for i in range(0, len(text), step) for d in p.push(text[i : i + step])]
        assert said(message_of([*deltas, *p.finish()]))[2] == [("get_weather", arguments)]


CODER_CALL = (
    "<tool_call>\n<function=stop>\n<parameter=city>\n{}\n</parameter>\n</function>\n</tool_call>"
)
NOTES = {
    "one": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "two": {"$ref": "#/$defs/text"},
    "three": {"type": ["string", "null"]},
    "four": {"enum": ["5", "six"]},
    "five": {"type": "boolean"},
    "six": {"type": "array"},
}


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("one", "42", "42"),
        ("one", "true", "true"),
        ("one", "null", None),
        ("two", "007", "007"),
        ("three", '{"a": 1}', '{"a": 1}'),
        ("four", "5", "5"),
        ("five", "True", True),
        ("six", "['a', None]", ["a", None]),
        ("strange", '{"a": [1]}', {"a": [1]}),
        ("strange", "free text", "free text"),
    ],
)
def test_arguments_have_the_types_of_their_schema(key, written, value):
    parameters = {"properties": NOTES, "$defs": {"text": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "stop", "parameters": parameters}}]
    text = CODER_CALL.replace("city", key).format(written)
    found = said(parsed(chat(TEMPLATES["qwen coder"]), text, tools=tools))
    assert found == ("", "", [("stop", {key: value})])
    assert repr(found[2][0][1][key]) == repr(value)  # True is not 1


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "stop", "arguments": null}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "stop"}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "stop", "arguments": "{\\"days\\": 1}"}', {"days": 1}),
        ("hermes", CODER_CALL.format("a"), {"city": "a"}),
        ("qwen coder", '<tool_call>{"name": "stop", "arguments": {"days": 1}}', {"days": 1}),
        ("qwen coder", CODER_CALL.replace("\n</parameter>", "").format("a"), {"city": "a"}),
        ("kimi", '<|tool_call_section_begin|><|tool_call_begin|>stop:0{"days": 1}', {"days": 1}),
        ("kimi", "<|tool_call_begin|>functions.stop:7<|tool_call_argument_begin|>{}", {}),
        ("mistral", '[TOOL_CALLS][{"name": "stop", "arguments": {"days": 1}}]', {"days": 1}),
        ("mistral list", '[TOOL_CALLS]stop[ARGS]{"days": 1}', {"days": 1}),
        ("glm", "<tool_call>stop</tool_call>", {}),
        (
            "glm",
            "<tool_call>stop<arg_key>city</arg_key>x y</arg_value></tool_call>",
            {"city": "x y"},
        ),
        (
            "glm",
            "<tool_call>stop<arg_key>city</arg_key><arg_value>a</arg_value><arg_key>days</arg_key>"
            "<arg_value>3</arg_value></tool_call>",
            {"city": "a", "days": 3},
        ),
        (
            "qwen coder",
            "<function=stop>\n<parameter=city>\na\n</parameter>\n</function>",
            {"city": "a"},
        ),
        (
            "hermes",
            '<tool_call>{"name": "stop", "arguments": {"city": "{a,{b"}}</tool_call>',
            {"city": "{a,{b"},
        ),
        ("deepseek", '<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{"days": 1}', {"days": 1}),
        (  # white space that JSON has not: at each place where it may be
            "hermes",
            '<tool_call>{"name": "stop", "arguments": {\v"city"\u2003:\x1c"a"\f,\xa0"days": '
            "[\u3000]\x85}}</tool_call>",
            {"city": "a", "days": []},
        ),
    ],
)
def test_what_models_write_besides_their_templates_is_read(name, text, expected):
    assert said(parsed(chat(TEMPLATES[name]), text)) == ("", "", [("stop", expected)])


ONE = '{"name": "stop", "arguments": {"city": "x", "days": 1}}'


@pytest.mark.parametrize("step", [1, 3, 10**6])
@pytest.mark.parametrize(
    ("template", "text"),
    [
        (  # the publisher's own template of Kimi K2 writes an id of which the name is a part
            TEMPLATES["kimi"].replace("functions.{{ f.name }}:{{ loop.index0 }}", "{{ c.id }}"),
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.stop:0"
            '<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
        ),
        (  # LFM2.5's lists tools and renders no calls
            "{% set s = 'List of tools: [' + (tools | tojson) + ']' %}{{ s }}" + TEXT,
            "<|tool_call_start|>[stop(city='Oslo')]<|tool_call_end|>",
        ),
        (  # which writes JSON where its prompt asks for it
            "{% set s = 'List of tools: [' + (tools | tojson) + ']' %}{{ s }}" + TEXT,
            '<|tool_call_start|>[{"name": "stop", "arguments": {"city": "Oslo"}}]<|tool_call_end|>',
        ),
    ],
)
def test_calls_that_a_template_half_shows_are_read(template, text, step):
    p = parser(chat(template))
    deltas = [d for i in range(0, len(text), step) for d in p.push(text[i : i + step])]
    found = said(message_of([*deltas, *p.finish()]))
    assert found == ("", "", [("stop", {"city": "Oslo"})])


@pytest.mark.parametrize("name", ["hermes", "qwen coder", "glm", "llama", "mistral"])
@pytest.mark.parametrize(
    ("text", "n"),
    [
        (ONE, 1),
        (f"```json\n{ONE}\n```", 1),
        (f"```\n{ONE}\n```\n", 1),
        (f"[{ONE}, {ONE}]", 2),
        (f"```json\n[{ONE}]", 1),
        (f"```json\n{ONE}\n```\n\n```json\n{ONE}\n```", 2),
        (f"<tools>\n{ONE}\n</tools>", 1),  # Qwen2.5's prompt has its tools between these
        (f"<function_call> [{ONE}, {ONE}] </function_call>\n", 2),
        (f"```json\n{ONE}\n```\nThen:\n```json\n{ONE}\n```", 0),
        (f"<tools>{ONE}</tools> ends", 0),
        (f"Use this: {ONE}", 0),
        (f"{ONE}\nis what I would call.", 0),
        (f"```json\n{ONE}\n```\nDone.", 0),
        (ONE.replace("stop", "other"), 0),
        ('{"city": "x", "days": 1}', 0),
        (f"[{ONE}", 0),
    ],
)
def test_an_answer_that_is_a_call_is_one_without_marks(name, text, n):
    message = parsed(chat(TEMPLATES[name]), text)
    assert said(message)[2] == [("stop", {"city": "x", "days": 1})] * n
    assert (message["content"] or "") == ("" if n else text)


def pieces_of(template: str, text: str, n: int) -> dict:
    p, deltas = parser(template), []
    for i in range(0, len(text), n):
        deltas += p.push(text[i : i + n])
    return message_of([*deltas, *p.finish()])


TEXTUAL = ONE.replace('{"city": "x", "days": 1}', json.dumps('{"city": "x", "days": 1}'))
FUNCTION = '{"type": "function", "function": ' + ONE + "}"
WAYS = {  # of writing calls within marks: the number of calls, 0 where it stays text
    f"<tool_call>\n```json\n{ONE}\n```\n</tool_call>": 1,
    f"<tool_call>```\n{ONE}```</tool_call>": 1,
    f"<tool_call>\n```json\n{ONE}\n```": 1,
    f"<tool_call>\n```json\n{ONE}\n</tool_call>": 1,
    f"<tool_call>\n```json\n{ONE}\n{ONE}\n```\n</tool_call>": 2,
    f"<tool_call>\n```tool_call\n[{ONE}, {ONE}]\n```\n</tool_call>\n<tool_call>{ONE}": 3,
    f"```json\n<tool_call>\n{ONE}\n</tool_call>\n```": 1,
    f"```tool_call\n{ONE}\n```": 1,
    f"<tool_calls>\n[{ONE}]\n</tool_calls>": 1,
    f"<tool_call>\n{ONE}": 1,
    f"<tool_call>\n{ONE},\n{ONE}\n</tool_call>": 2,
    f"<tool_call>\n{ONE}\n{ONE}\n</tool_call>": 2,
    f"<tool_call>{TEXTUAL}</tool_call>": 1,
    f"<tool_call>\n```json\n{TEXTUAL}\n```\n</tool_call>": 1,
    "<tool_call>" + ONE.replace("arguments", "parameters") + "</tool_call>": 1,
    f"<tool_call>{FUNCTION}</tool_call>": 1,
    f"```json\n{FUNCTION}\n```": 1,
    # no known tool, no fitting arguments, no JSON, something else beside it
    "<tool_call>\n```json\n" + ONE.replace("stop", "other") + "\n```\n</tool_call>": 0,
    "<tool_call>\n```json\n" + ONE.replace("1}", '"soon"}') + "\n```\n</tool_call>": 0,
    "<tool_call>\n```json\n" + ONE.replace('"', "'") + "\n```\n</tool_call>": 0,
    "<tool_call>\n" + ONE.replace('"', "'") + "\n</tool_call>": 0,
    "<tool_call>\n" + ONE.replace("1}", "1,}") + "\n</tool_call>": 0,
    f"<tool_call>\n```json\n{ONE},\n```\n</tool_call>": 0,
    f"<tool_call>\n```json\n{ONE}\n```\nis it.\n</tool_call>": 0,
    f"<tool_call>\nThis: {ONE}\n</tool_call>": 0,
    f"<tool_call>\n```python\n{ONE}\n```\n</tool_call>": 0,
    f"See:\n```tool_call\n{ONE}\n```": 0,
    # arguments under another name are not left out
    "<tool_call>" + ONE.replace("arguments", "args") + "</tool_call>": 0,
    "<tool_call>" + FUNCTION.replace("arguments", "input") + "</tool_call>": 0,
}


@pytest.mark.parametrize("n", [1, 3, 7, 9999])
@pytest.mark.parametrize("text", WAYS)
def test_what_small_models_write_within_marks_is_a_call_or_stays_text_whole(text, n):
    message = pieces_of(chat(TEMPLATES["hermes"]), text, n)
    assert said(message)[2] == [("stop", {"city": "x", "days": 1})] * WAYS[text]
    assert (message["content"] or "") == ("" if WAYS[text] else text)


@pytest.mark.parametrize("n", [1, 3, 7, 9999])
@pytest.mark.parametrize("name", ["llama", "minimax", "mistral", "qwen coder", "glm"])
def test_models_write_marks_of_other_models(name, n):
    """Fenced or not, and as a list: as a whole answer in every format that has none of its own."""
    for text in (f"```json\n{ONE}\n```", f"[{ONE}]"):
        message = pieces_of(chat(TEMPLATES[name]), f"<tool_call>\n{text}\n</tool_call>", n)
        assert said(message) == ("", "", [("stop", {"city": "x", "days": 1})])


@pytest.mark.parametrize(("end", "n"), [("", 0), ("\n```", 1), ("\n```\n</tool_call>", 1)])
def test_a_fenced_call_that_a_limit_cuts_off_is_one_once_its_fence_is_closed(end, n):
    p = parser(chat(TEMPLATES["hermes"]))
    text = f"<tool_call>\n```json\n{ONE}{end}"
    message = message_of([*p.push(text), *p.finish(cut=True)])
    assert len(said(message)[2]) == n
    assert (message["content"] or "") == ("" if n else text)


def test_untagged_arguments_fit_the_schema_of_their_tool():
    wrong = ONE.replace('"days": 1', '"days": "soon"')
    assert parsed(chat(TEMPLATES["hermes"]), wrong)["content"] == wrong


@pytest.mark.parametrize("begun", ['{"na', '{"name": "st', '```json\n{"name": "stop"', " \n"])
def test_no_more_is_held_back_than_it_takes_to_decide(begun):
    p = parser(chat(TEMPLATES["hermes"]))
    assert p.push(begun) == []
    for other in ('{"a":', '{"name": "x"', "Hello", "```python", "[1"):
        p = parser(chat(TEMPLATES["hermes"]))
        assert message_of(p.push(other + "\n."))["content"], other


def test_names_have_256_characters_at_the_most():
    for n, is_call in ((256, True), (257, False)):
        text = "<tool_call>\n<function=" + "f" * n + ">\n</function>\n</tool_call>"
        assert bool(said(parsed(chat(TEMPLATES["qwen coder"]), text))[2]) is is_call
        text = CODER_CALL.replace("city", "k" * n).format("a")
        assert bool(said(parsed(chat(TEMPLATES["qwen coder"]), text))[2]) is is_call


def test_text_up_to_a_mark_is_given_as_soon_as_it_is_sure():
    tape, given = Tape(), []
    steps = tape.upto(("</a>", "</a>b"), given.append)
    for piece, expected in (("x<", "x"), ("/", "x"), ("b</a", "x</b"), (">", "x</b")):
        tape.push(piece)
        assert next(steps, "done") is None
        assert "".join(given) == expected
    tape.push("c")
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert (end.value.value, "".join(given)) == ("</a>", "x</b")


FILL = (" ", "\n", "a", "{", "[", '"', "\\", "<", "a:", "<tool_call>", "</parameter>\n ")


@pytest.mark.parametrize("step", [1, 3, 7])
@pytest.mark.parametrize("name", TEMPLATES)
def test_dictated_answers_take_time_in_proportion(name, step):
    """A client can dictate an answer, by a grammar: any prefix of a call and any filling."""
    template = chat(TEMPLATES[name])
    text = answer(template, MESSAGES["text and call" if name not in SINGLE else "call"])
    at = text.index("get_weather")
    places = (at, at + 11, text.index("city") + 4, text.index("San") + 3)
    format = ChatFormat.of(ChatTemplate(template))
    with within(6):
        for place, fill in itertools.product(places, FILL):
            p = OutputParser(format, tools=TOOLS)
            dictated = text[:place] + fill * (600 * step // len(fill))
            for i in range(0, len(dictated), step):
                p.push(dictated[i : i + step])
            p.finish()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("harmony", "{{ f.arguments | tojson }}"), ("none", "")],
)
def test_none_is_no_text_where_a_template_cannot_do_with_it(name, arguments):
    """gpt-oss looks into the text; other templates would write None."""
    call = "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{{ f.name }}{% endif %}"
    marks = "<|channel|>final<|message|>" if name == "harmony" else ""
    look = "{% if 'x' in m.content %}{% endif %}" if name == "harmony" else ""
    template = chat(marks + look + "{{ m.content }}" + (call + arguments if arguments else ""))
    message = {"role": "assistant", **MESSAGES["call"], "content": None}
    assert ChatFormat.of(ChatTemplate(template)).normalized([message])[0]["content"] == ""


def test_long_keys_of_gemma_objects_take_time_in_proportion():
    with within(1):
        for text in ("{" + " " * 100_000 + "}", "{a" + " " * 100_000 + "}", "{a:1," * 20_000):
            assert gemma_arguments(text, '<|"|>') is None or text == "{" + " " * 100_000 + "}"


def test_a_budget_of_thoughts_ends_them():
    budget = ThinkingBudget(3, start=[1, 2], end=[8, 9], message=[7])
    assert [budget.accept(t) for t in (5, 1, 2, 5, 5)] == [[]] * 5
    assert budget.is_open
    assert budget.accept(5) == [7, 8, 9]
    assert [budget.accept(t) for t in (7, 8, 9, 5)] == [[]] * 4
    assert not budget.is_open


def test_a_model_that_stops_thinking_in_time_is_left_alone():
    budget = ThinkingBudget(3, start=[1], end=[9], is_open=True)
    assert [budget.accept(t) for t in (5, 9, 5, 5, 5, 5)] == [[]] * 6
    assert ThinkingBudget(0, start=[1], end=[9], is_open=True).begin() == [9]
    with pytest.raises(ValueError, match="budget"):
        ThinkingBudget(-1, start=[1], end=[9])
