"""What is read off a template, whole: each mark, and where it stands. Templates are abridged."""

import pytest

from tamis.text.calls.format import FLAT, Argument, ToolFormat
from tamis.text.chat_format import (
    ChatFormat,
    _common_end,
    _common_start,
    _tag_of,
    _triggers,
    _whole_marks,
    _with_singular,
)
from tamis.text.chat_template import ChatTemplate
from tamis.text.tool_calls import OutputParser, message_of

ASSISTANT = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "BODY<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
TEXT = "{{ m.content or '' }}"
EACH = "{% for k, v in a.items() %}"
VALUE = "{{ v if v is string else v | tojson }}"
JSON = '{"name": "{{ f.name }}", "arguments": {{ a | tojson }}'
THINK = ("<think>", "</think>")


def chat(body):
    return ASSISTANT.replace("BODY", body)


def calls(one, before="", between="", after=""):
    return (
        TEXT + "{% if m.tool_calls %}" + before + "{% for c in m.tool_calls %}"
        "{% set f = c.function %}{% set a = f.arguments %}" + one + "{% if not loop.last %}"
        + between + "{% endif %}{% endfor %}" + after + "{% endif %}"
    )  # fmt: skip


def marked(style, openers, closers, triggers=None, **more):
    names = openers.split()
    found = names if triggers is None else triggers.split()
    return ToolFormat(style, tuple(names), tuple(closers.split()), tuple(found), **more)


FORMS = {
    "json": (
        calls("<tool_call>\n" + JSON + "}\n</tool_call>", between="\n"),
        marked("json", "<tool_call>", "</tool_call>", fields=FLAT),
    ),
    "json alone": (
        calls('{"name": "{{ f.name }}", "parameters": {{ a | tojson }}}'),
        ToolFormat("json", fields={"name": ("name",), "arguments": ("parameters",)}),
    ),
    "json with ids": (
        calls(JSON + ', "id": "{{ c.id }}"}', "[TOOL_CALLS][", ", ", "]"),
        marked("json", "[TOOL_CALLS]", "", fields=FLAT | {"id": ("id",)}),
    ),
    "json of other keys": (
        calls(
            '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", '
            '"parameters": {{ a | tojson }}}',
            "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>",
        ),
        marked(
            "json", "<|START_ACTION|>", "<|END_ACTION|>",
            fields={"id": ("tool_call_id",), "name": ("tool_name",), "arguments": ("parameters",)},
        ),
    ),
    "json within json": (
        calls('<call>{"type": "function", "function": ' + JSON + "}}</call>"),
        marked(
            "json", "<call>", "</call>",
            fields={"name": ("function", "name"), "arguments": ("function", "arguments")},
        ),
    ),
    "json of the name as key": (
        calls('{"{{ f.name }}": {{ a | tojson }}}', "<|prefix|>[", ", ", "]<|suffix|>"),
        marked("json", "<|prefix|>", "<|suffix|>", fields={"name": ("*",), "arguments": ("*",)}),
    ),
    "json after a word": (
        calls(
            '{"tool_name": "{{ f.name }}", "parameters": {{ a | tojson }}}',
            "Action:\n```json\n[", ",\n", "]\n```",
        ),
        marked(
            "json", "Action: ```json", "```", "Action:",
            fields={"name": ("tool_name",), "arguments": ("parameters",)},
        ),
    ),
    "name and object": (
        calls("<function={{ f.name }}>{{ a | tojson }}</function>"),
        marked("tag", "<function=", "</function>", middle=(">",)),
    ),
    "name and object with marks between": (
        calls("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ a | tojson }}"),
        marked("tag", "[TOOL_CALLS]", "", middle=("[CALL_ID]", "[ARGS]")),
    ),
    "an id before the name": (
        calls("<call>{{ c.id }}<fn>{{ f.name }}<args>{{ a | tojson }}</call>"),
        marked(
            "tag", "<call> <fn>", "</call>", middle=("<args>",), fields={"id": ("before",)}
        ),
    ),
    "a word before the name": (
        calls(
            "<｜call▁begin｜>function<｜sep｜>{{ f.name }}\n```json\n{{ a | tojson }}\n```"
            "<｜call▁end｜>",
            "<｜calls▁begin｜>", "\n", "<｜calls▁end｜>",
        ),
        marked(
            "tag", "<｜calls▁begin｜> <｜call▁begin｜> function <｜sep｜>",
            "``` <｜call▁end｜> <｜calls▁end｜>", "<｜calls▁begin｜> <｜call▁begin｜> <｜sep｜>",
            middle=("```json",),
        ),
    ),
    "numbered names in a section": (
        calls(
            "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|args|>"
            "{{ a | tojson }}<|tool_call_end|>",
            "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>",
        ),
        marked(
            "tag",
            "<|tool_calls_section_begin|> <|tool_call_section_begin|> <|tool_call_begin|> "
            "functions.",
            "<|tool_call_section_end|> <|tool_call_end|> <|tool_calls_section_end|>",
            "<|tool_calls_section_begin|> <|tool_call_section_begin|> <|tool_call_begin|>",
            middle=("<|args|>",),
        ),
    ),
    "arguments between marks": (
        calls(
            "<tool_call>\n<function={{ f.name }}>\n" + EACH + "<parameter={{ k }}>\n" + VALUE
            + "\n</parameter>\n{% endfor %}</function>\n</tool_call>"
        ),
        marked(
            "tagged", "<tool_call> <function=", "</function> </tool_call>", middle=(">",),
            argument=Argument("<parameter=", (">",), "</parameter>", "\n", "\n"),
        ),
    ),
    "each key and each value between marks": (
        calls(
            "\n<tool_call>{{ f.name }}\n" + EACH + "<arg_key>{{ k }}</arg_key>\n<arg_value>"
            + VALUE + "</arg_value>\n{% endfor %}</tool_call>"
        ),
        marked(
            "tagged", "<tool_call>", "</tool_call>",
            argument=Argument("<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>"),
        ),
    ),
    "arguments of Python's words": (
        calls(
            '<calls>\n<invoke name="{{ f.name }}">\n' + EACH + '<parameter name="{{ k }}">'
            "{{ v }}</parameter>\n{% endfor %}</invoke>\n</calls>"
        ),
        ToolFormat(
            "tagged", *[("<calls>", '<invoke name="'), ("</invoke>", "</calls>"),
                        ("<calls>", '<invoke name="')],
            middle=('">',), python_words=True,
            argument=Argument('<parameter name="', ('">',), "</parameter>"),
        ),
    ),
    "arguments that name their kind": (
        calls(
            '<｜DSML｜invoke name="{{ f.name }}">\n' + EACH + '<｜DSML｜parameter name="{{ k }}" '
            "string=\"{{ 'true' if v is string else 'false' }}\">" + VALUE
            + "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n",
            "<｜DSML｜calls>\n", "", "</｜DSML｜calls>",
        ),
        ToolFormat(
            "tagged", *[("<｜DSML｜calls>", '<｜DSML｜invoke name="'),
                        ("</｜DSML｜invoke>", "</｜DSML｜calls>"),
                        ("<｜DSML｜calls>", '<｜DSML｜invoke name="')],
            middle=('">',),
            argument=Argument(
                '<｜DSML｜parameter name="', ('" string="',), "</｜DSML｜parameter>",
                kind_end='">',
            ),
        ),
    ),
    "calls of Python": (
        calls(
            "{{ f.name }}(" + EACH + "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}"
            "{% endfor %})",
            "<|call_start|>[", ", ", "]<|call_end|>",
        ),
        marked("python", "<|call_start|>", "<|call_end|>"),
    ),
    "objects without quotes": (
        calls(
            "<|tool_call>call:{{ f.name ~ '{' }}" + EACH + "{{ k }}:{{ v }}"
            "{{ ',' if not loop.last }}{% endfor %}{{ '}' }}<tool_call|>"
        ),
        marked("gemma", "<|tool_call> call:", "<tool_call|>", "<|tool_call>"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_read_off_a_template_with_all_their_marks(name):
    body, expected = FORMS[name]
    assert ChatFormat.of(ChatTemplate(chat(body))) == ChatFormat(tools=expected)
    thinking = ChatFormat.of(ChatTemplate(chat(THOUGHT + body)))
    assert thinking == ChatFormat(THINK, tools=expected, thought_key="reasoning_content")


def test_calls_of_nested_objects_are_read_one_after_another():
    """The second one begins with its outer brace: what stands before it is between the two."""
    body, _ = FORMS["json within json"]
    one, two = (
        f'{{"type": "function", "function": {{"name": "{name}", "arguments": {{"a": [1]}}}}}}'
        for name in ("f", "g")
    )
    parser = OutputParser.for_template(
        ChatTemplate(chat(body)), tools=[{"name": "f"}, {"name": "g"}], new_id=lambda: "id"
    )
    deltas = [*parser.push(f"<call>{one}\n{two}</call>"), *parser.finish()]
    found = message_of(deltas)
    assert [call["function"]["name"] for call in found["tool_calls"]] == ["f", "g"]
    assert found["content"] is None


@pytest.mark.parametrize(
    ("source", "style", "mark"),
    [
        ("<|tool_list_start|>", "python", "<|tool_call_start|>"),
        ("List of tools: [", "python", "<|tool_call_start|>"),
        ("<tool_call>", "json", "<tool_call>"),
        ("<|tool_call|>", "json", "<|tool_call|>"),
        ("", None, None),
    ],
)
def test_calls_that_a_template_asks_for_and_does_not_show(source, style, mark):
    told = "{{ 'TOLD' if tools }}".replace("TOLD", source)
    found = ChatFormat.of(ChatTemplate(chat(TEXT) + told)).tools
    assert (found and found.style) == style
    if found is not None:
        assert (found.openers, found.triggers) == ((mark,), (mark,))
        assert found.closers == (
            mark.replace("start", "end") if "start" in mark else mark.replace("tool", "/tool"),
        )
        assert found.fields == (FLAT if style == "json" else {})


def test_arguments_in_another_order_than_theirs_have_no_marks_to_read():
    """The names stand after their values, or the second before the first."""
    after = calls("<f={{ f.name }}>" + EACH + "<v>" + VALUE + "</v><k>{{ k }}</k>{% endfor %}</f>")
    back = calls(
        "<f={{ f.name }}>{% for k, v in (a.items() | list | reverse) %}<k={{ k }}>" + VALUE
        + "</k>{% endfor %}</f>"
    )  # fmt: skip
    for body in (after, back):
        found = ChatFormat.of(ChatTemplate(chat(body))).tools
        assert found is None or found.style != "tagged"


@pytest.mark.parametrize(
    ("body", "wrappers"),
    [
        ("<|START_TEXT|>{{ m.content }}<|END_TEXT|>", ("<|START_TEXT|>", "<|END_TEXT|>")),
        ("<text_start>{{ m.content }}<other_end>", ("<text_start>",)),
        ("<answer>{{ m.content }} ", ("<answer>",)),
        ("</answer>{{ m.content }}</answer>", ()),
        ("<think></think>{{ m.content }}", ()),
        ("x <b> y {{ m.content }}", ()),
        ("{{ '<response>x</response>' if tools }}{{ m.content }}", ("<response>", "</response>")),
        ("{{ m.content }}", ()),
    ],
)
def test_marks_around_an_answers_text(body, wrappers):
    assert ChatFormat.of(ChatTemplate(chat(body))).wrappers == wrappers


@pytest.mark.parametrize(
    ("body", "key", "think"),
    [
        ("{{ m.reasoning }}</think>{{ m.content }}", "reasoning", THINK),
        ("{{ m.thinking or '' }}</think>{{ m.content }}", "thinking", THINK),
        ("<t>{{ m.reasoning_content }}{{ m.content }}", "reasoning_content", None),
        ("{{ '[THINK]x[/THINK]' if tools }}{{ m.content }}", None, ("[THINK]", "[/THINK]")),
        ("{{ '</seed:think>' }}{{ m.content }}", None, ("<seed:think>", "</seed:think>")),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
            "{% if b.type == 'thinking' %}<think>{{ b.thinking }}</think>{% else %}{{ b.text }}"
            "{% endif %}{% endfor %}{% endif %}",
            "[]",
            THINK,
        ),
        ("{{ m.content }}", None, None),
    ],
)
def test_where_a_template_has_thoughts(body, key, think):
    found = ChatFormat.of(ChatTemplate(chat(body)))
    assert (found.thought_key, found.think) == (key, think)


def test_a_message_gets_the_form_that_a_template_reads():
    asked = {"role": "assistant", "content": None, "reasoning": "hm"}
    assert ChatFormat().normalized([asked]) == [asked]
    assert ChatFormat(null_content=False).normalized([asked]) == [asked | {"content": ""}]
    assert ChatFormat(thought_key="thinking").normalized([asked]) == [asked | {"thinking": "hm"}]
    both = asked | {"reasoning_content": "first", "thinking": "own"}
    assert ChatFormat(thought_key="thinking").normalized([both]) == [both]
    assert ChatFormat(thought_key="x").normalized([both])[0]["x"] == "first"
    first = {"type": "thinking", "thinking": "hm"}
    blocks = ChatFormat(thought_key="[]")
    text = {"type": "text", "text": "yes"}
    assert blocks.normalized([asked])[0]["content"] == [first]
    assert blocks.normalized([asked | {"content": "yes"}])[0]["content"] == [first, text]
    assert blocks.normalized([asked | {"content": [text]}])[0]["content"] == [first, text]
    assert "reasoning_content" not in blocks.normalized([both])[0]
    assert blocks.normalized([{"role": "user", "content": "x"}])[0]["content"] == "x"


@pytest.mark.parametrize(
    ("as_text", "given", "expected"),
    [
        (False, '{"a": 1}', {"a": 1}),
        (False, "", {}),
        (False, "[1]", "[1]"),
        (False, "no", "no"),
        (False, "[" * 100_000, "[" * 100_000),
        (False, {"a": 1}, {"a": 1}),
        (True, {"a": "\u00e9"}, '{"a": "\u00e9"}'),
        (True, '{"a": 1}', '{"a": 1}'),
    ],
)
def test_arguments_are_an_object_or_its_text(as_text, given, expected):
    call = {"id": "x", "function": {"name": "f", "arguments": given}}
    message = {"role": "assistant", "content": "", "tool_calls": [call, {"id": "y"}]}
    (found,) = ChatFormat(arguments_as_text=as_text).normalized([message])
    assert found["tool_calls"][0]["function"]["arguments"] == expected
    assert found["tool_calls"][1] == {"id": "y"}
    assert call["function"]["arguments"] is given, "the client's own message is as it was"


def test_a_template_that_wants_text_is_given_text():
    body = calls("<call>" + JSON.replace("a | tojson", "a + ''") + "}</call>")
    assert ChatFormat.of(ChatTemplate(chat(body))).arguments_as_text


def test_what_a_parser_must_see_of_control_tokens():
    whole = ChatFormat(
        ("<think>", "</think>"), ("<a>", "</answer>"),
        ToolFormat("tagged", ("<tool_call>", "fun"), ("</tool_call>",), middle=("<sep>x<end>",),
                   argument=Argument("<arg>", ("<k>", "=\">"), "</arg>", kind_end="<kind>")),
    )  # fmt: skip
    assert whole.marks() == {
        "<think>", "</think>", "</answer>", "<tool_call>", "</tool_call>", "<sep>", "<end>",
        "<arg>", "</arg>", "<kind>",
    }  # fmt: skip
    assert "<|message|>" in ChatFormat(tools=ToolFormat("harmony")).marks()
    assert '<|"|>' in ChatFormat(tools=ToolFormat("gemma")).marks()
    prefix = ToolFormat("elements", argument=Argument("]<]m[>["))
    assert "]<]m[>[" in ChatFormat(tools=prefix).marks()
    assert "]<]m[>[" not in ChatFormat(tools=ToolFormat("tagged")).marks()
    assert ChatFormat().marks() == frozenset()


def test_parts_of_two_texts_and_of_marks():
    assert [_common_start(a, "abcd") for a in ("abx", "abcdef", "ab", "", "x")] == [
        "ab", "abcd", "ab", "", ""
    ]  # fmt: skip
    assert [_common_end(a, "abcd") for a in ("xcd", "0abcd", "cd", "", "x")] == [
        "cd", "abcd", "cd", "", ""
    ]  # fmt: skip
    assert [_tag_of(m) for m in ("<|START_TEXT|>", "</text_end>", "<a1>")] == ["TEXT", "text", "a1"]
    assert [_whole_marks(t) for t in ("a<b", "a<b>c", "a[b", "a]b[c", "<[", "")] == [
        "a", "a<b>c", "a", "a]b", "", ""
    ]  # fmt: skip
    assert _triggers(("<call>", "word", "[CALL]", "<fun=")) == ("<call>", "[CALL]", "<fun=")
    assert [_triggers(t) for t in (("word", "more"), ("abc",), ())] == [("word",), (), ()]
    plural = "<tool_calls_section_begin>"
    one = "<tool_call_section_begin>"
    assert _with_singular((plural, "<x>")) == (plural, one, "<x>")
    assert _with_singular(("<x>", plural)) == (one, "<x>", plural)
    assert _with_singular((plural,)) == (plural, one)
    assert _with_singular(("<x>",)) == ("<x>",)
