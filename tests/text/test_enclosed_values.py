"""Values between marks that hold such marks: whole calls are part of them, else text is left."""

import json
from time import process_time

import pytest

from tamis.text.calls.enclosed import hidden
from tamis.text.calls.format import GEMMA_QUOTE, Argument, ToolFormat
from tamis.text.calls.readers import CODER
from tamis.text.chat_format import ChatFormat
from tamis.text.tool_calls import OutputParser, message_of

ARROWS = ToolFormat(
    "tagged", ("<tool_call>",), ("</tool_call>",), ("<tool_call>",),
    argument=Argument("<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>"),
)  # fmt: skip
TAGS = ToolFormat(
    "xtml", ("<|o|>tools<|s|>", "<|o|>call"), ("<|c|>call<|s|>", "<|c|>tools<|s|>"),
    ("<|o|>tools<|s|>", "<|o|>call"),
    argument=Argument("<|o|>arg", closing="<|c|>arg<|s|>", kind_end="<|s|>"),
)  # fmt: skip
ELEMENTS = ToolFormat(
    "elements", ("@<tool_call>", '@<invoke name="'), ("@</invoke>", "@</tool_call>"),
    ("@<tool_call>", '@<invoke name="'), middle=('">',), argument=Argument("@"),
)  # fmt: skip
PYTHON = ToolFormat("python", ("<|start|>",), ("<|end|>",), ("<|start|>",))
GEMMA = ToolFormat("gemma", ("<|call>", "call:"), ("<call|>",), ("<|call>",))
FORMATS = {
    "coder": CODER, "arrows": ARROWS, "tags": TAGS, "elements": ELEMENTS, "python": PYTHON,
    "gemma": GEMMA,
}  # fmt: skip
KEYS = {key: {"type": "string"} for key in ("a", "b", "c")}
TOOLS = [
    {"name": "stop", "parameters": {"properties": KEYS, "type": "object"}},
    {"name": "free", "parameters": {"properties": KEYS, "additionalProperties": True}},
    {"name": "data", "parameters": {"properties": {"a": {"type": "object"}, "b": {}}}},
]


def written(kind, arguments, name="stop"):
    """A call as a model writes it, without escapes."""
    if kind == "python":
        inner = ", ".join(f"{k}='{v}'" for k, v in arguments.items())
        return f"<|start|>[{name}({inner})]<|end|>"
    if kind == "gemma":
        inner = ",".join(f"{k}:{GEMMA_QUOTE}{v}{GEMMA_QUOTE}" for k, v in arguments.items())
        return f"<|call>call:{name}{{{inner}}}<call|>"
    call, argument = {
        "coder": (
            "<tool_call>\n<function={}>\n{}</function>\n</tool_call>",
            "<parameter={}>\n{}\n</parameter>\n",
        ),
        "arrows": (
            "<tool_call>{}\n{}</tool_call>",
            "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
        ),
        "tags": (
            '<|o|>tools<|s|><|o|>call tool="{}"<|s|>{}<|c|>call<|s|><|c|>tools<|s|>',
            '<|o|>arg key="{}" type="string"<|s|>{}<|c|>arg<|s|>',
        ),
        "elements": (
            '@<tool_call>\n@<invoke name="{}">{}@</invoke>\n@</tool_call>',
            "@<{0}>{1}@</{0}>",
        ),
    }[kind]
    return call.format(name, "".join(argument.format(*item) for item in arguments.items()))


def read(kind, text, *, cut=False):
    """Text and calls, which do not depend on the pieces."""
    found = []
    for step in (1, 3, 7, len(text)):
        parser = OutputParser(ChatFormat(tools=FORMATS[kind]), tools=TOOLS, new_id=lambda: "")
        deltas = [d for i in range(0, len(text), step) for d in parser.push(text[i : i + step])]
        message = message_of([*deltas, *parser.finish(cut=cut)])
        calls = [
            (c["function"]["name"], json.loads(c["function"]["arguments"]))
            for c in message.get("tool_calls") or ()
        ]
        found.append((message["content"] or "", calls))
    assert all(each == found[0] for each in found)
    return found[0]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "{call}",
        "See:\n{call}\nand {call} again.",
        "{none}",
        "{other}{call}",
        "{deep}",
        "in {deep} and {other}.",
    ],
)
def test_a_value_may_hold_whole_calls_of_its_own_notation(kind, text):
    call = written(kind, {"a": "x", "b": "y"})
    parts = {
        "call": call,
        "none": written(kind, {}),
        "other": written(kind, {"b": "1", "z": "2"}, "other"),
        "deep": written(kind, {"b": f"<{call}>", "c": call}),
    }
    value = text.format(**parts)
    for arguments in ({"a": value}, {"a": value, "b": "last"}, {"b": "first", "a": value}):
        assert read(kind, written(kind, arguments)) == ("", [("stop", arguments)])
    two = written(kind, {"a": value}) + "\n" + written(kind, {"c": "z"})
    assert read(kind, two) == ("", [("stop", {"a": value}), ("stop", {"c": "z"})])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_part_of_a_call_within_a_value_leaves_it_right_or_all_of_it_text(kind):
    """A call's beginning, end or middle, which other marks around it complete."""
    call = written(kind, {"a": "AV", "b": "BV"})
    a, b = call.index("AV"), call.index("BV")
    parts = [call[: a + 2], call[: b + 2], call[a:], call[b:], call[a : b + 2] + "x"]
    for part in parts:
        for arguments in ({"a": part, "b": "last"}, {"c": "first", "a": part}):
            text = written(kind, arguments)
            content, calls = read(kind, text)
            same = [("stop", arguments)]
            # the same text may be that of other arguments
            if calls and calls != same:
                assert "".join(written(kind, given) for _, given in calls) == text
            else:
                assert (content, calls) in ((text, []), ("", same))


@pytest.mark.parametrize("name", ["stop", "free"])
def test_an_argument_begins_with_a_key_that_the_tool_takes_and_that_is_new(name):
    value = "x\n</parameter>\n<parameter=other>\ny"
    text = written("coder", {"a": value}, name)
    expected = ("", [("free", {"a": "x", "other": "y"})]) if name == "free" else (text, [])
    assert read("coder", text) == expected
    twice = written("coder", {"a": "x\n</parameter>\n<parameter=b>\ny", "b": "z"}, name)
    assert read("coder", twice) == (twice, [])


def test_an_object_ends_where_it_is_complete():
    value = {"x": written("arrows", {"a": "1"}), "y": ["</arg_value></tool_call>"]}
    text = written("arrows", {"a": json.dumps(value), "b": "2"}, "data")
    assert read("arrows", text) == ("", [("data", {"a": value, "b": 2})])


@pytest.mark.parametrize(
    "value",
    ["see <parameter=x> here", "see <function=x> here", "<tool_call>", "<function=x>\n</function>",
     "</function></tool_call>", "<parameter=", "<parameter=<parameter=b>", "<parameter=a\nb>"],
)  # fmt: skip
def test_marks_alone_in_a_value_are_text(value):
    arguments = {"a": value, "b": f"{value} {value}", "c": "z"}
    assert read("coder", written("coder", arguments)) == ("", [("stop", arguments)])


def test_a_call_that_is_cut_off_within_a_value_is_not_taken_for_one():
    text = written("coder", {"a": written("coder", {"b": "x"})})
    begun = text[: text.rindex("\n</parameter>")]
    assert read("coder", begun, cut=True) == (begun, [])


def test_text_after_a_call_is_text_unless_an_argument_ends_in_it():
    call = written("coder", {"a": "x"})
    after = "\n\nThe mark </parameter> ends a value."
    assert read("coder", call + after) == (after.strip(), [("stop", {"a": "x"})])
    torn = f"{call} y\n</parameter>\n</function>"
    assert read("coder", torn) == (torn, [])


@pytest.mark.parametrize(
    "part",
    ["<parameter=b>", "<tool_call>\n<function=a>\n<parameter=b>\n", "</parameter>\n</function> ",
     "</parameter>\n", "<parameter=" + "k" * 250],
)  # fmt: skip
def test_reading_takes_time_in_proportion_to_the_text(part):
    def seconds(n):
        text = written("coder", {"a": part * n, "b": part * n})
        start = process_time()
        OutputParser(ChatFormat(tools=CODER), tools=TOOLS).push(text)
        return process_time() - start

    assert min(seconds(400) for _ in range(3)) < 14 * min(seconds(50) for _ in range(3)) + 0.01


def test_sections_of_cdata_are_paired():
    format = ToolFormat(
        "tagged", ("<f ",), ("</f>",), ("<f ",), middle=(">",),
        argument=Argument('<p n="', ('">',), "</p>", has_cdata=True),
    )  # fmt: skip
    FORMATS["cdata"] = format
    call = '<f stop><p n="a"><![CDATA[{}]]></p></f>'
    for value in (call.format("x"), call.format(call.format("x")), 'see "><![CDATA[ here'):
        assert read("cdata", call.format(value)) == ("", [("stop", {"a": value})])
    del FORMATS["cdata"]


def test_escapes_of_a_call_within_a_text_are_read_as_those_around_it():
    call = written("python", {"a": "x"})
    text = f'<|start|>[data(a={{"k": "{call}\\n\\u00e9"}}, b="\\t{call}\\\\")]<|end|>'
    assert read("python", text) == (
        "",
        [("data", {"a": {"k": f"{call}\né"}, "b": f"\t{call}\\"})],
    )
    inner = call.replace("x", "\\n")
    assert read("python", written("python", {"a": inner}))[1] == [
        ("stop", {"a": call.replace("x", "\n")})
    ]


def test_calls_within_a_text_are_hidden_and_put_back_into_json():
    text, shown = hidden('a<o>"<i>\n</i></o> b</i> <o> c', ("<o>", "<i>"), ("</i>", "</o>"))
    assert text == "a\ue0000\ue000 b</i> <o> c"
    assert (
        json.loads(shown(json.dumps(text, ensure_ascii=False))) == 'a<o>"<i>\n</i></o> b</i> <o> c'
    )
    assert hidden("\ue000<o></o>", ("<o>",), ("</o>",))[0] == "\ue000\ue0010\ue001"
    assert hidden("plain", ("<o>",), ("</o>",))[0] == "plain"
