"""Readers of calls at their edges: ids, marks in pieces, values without quotes, budgets."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.text.calls import elements, json_stream, readers, syntax, tape, values
from tamis.text.calls.format import FLAT, Argument, ToolFormat
from tamis.text.calls.gemma import gemma_arguments
from tamis.text.calls.tape import MAX_NAME, Tape
from tamis.text.calls.values import Place, Tools, object_text
from tamis.text.chat_format import ChatFormat
from tamis.text.thinking import ThinkingBudget
from tamis.text.token_lookup import TokenLookup
from tamis.text.tool_calls import Delta, OutputParser, message_of

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("stop", "go", "functions.x:0")
]


def message(format, text, step=None, cut=False, forced=False, think=None):
    parser = OutputParser(
        ChatFormat(think, tools=format), tools=TOOLS, forced=forced, new_id=lambda: "new"
    )
    step = step or len(text) or 1
    deltas = [d for i in range(0, len(text), step) for d in parser.push(text[i : i + step])]
    return message_of([*deltas, *parser.finish(cut=cut)])


def read(format, text, step=None, **how):
    """(text, [(id, name, arguments)]) of an answer."""
    found = message(format, text, step, **how)
    calls = found.get("tool_calls") or ()
    return found["content"] or "", [
        (c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls
    ]


# --- names and ids --------------------------------------------------------------------------------

JSON = ToolFormat("json", ("<call>",), ("</call>",), ("<call>",), FLAT)
WITH_ID = ToolFormat("json", ("<call>",), ("</call>",), ("<call>",), FLAT | {"id": ("no",)})
KEYED = ToolFormat(
    "json", ("<call>",), ("</call>",), ("<call>",), {"name": ("*",), "arguments": ("*",)}
)
TAG = ToolFormat(
    "tag", ("<call>", "functions."), ("</call>",), ("<call>",), middle=("<sep>",)
)  # fmt: skip
BEFORE = ToolFormat(
    "tag", ("<call>", "<fn>"), ("</call>",), ("<call>",), {"id": ("before",)}, ("<args>",)
)


@pytest.mark.parametrize("step", [1, 2, None])
@pytest.mark.parametrize(
    ("format", "text", "call"),
    [
        (JSON, '{"id": "a1", "name": "stop", "arguments": {}}', ("new", "stop", {})),
        (WITH_ID, '{"no": 7, "name": "stop", "arguments": {}}', ("7", "stop", {})),
        (WITH_ID, '{"no": null, "name": "stop", "arguments": {}}', ("new", "stop", {})),
        (WITH_ID, '{"no": "", "name": "stop", "arguments": {}}', ("new", "stop", {})),
        (JSON, '{"name": "stop", "parameters": {"a": 1}}', ("new", "stop", {"a": 1})),
        (JSON, '{"function": {"name": "stop", "arguments": {"a": 1}}}', ("new", "stop", {"a": 1})),
        (JSON, '{"function": {"name": "stop", "parameters": "{}"}}', ("new", "stop", {})),
        (WITH_ID, '{"no": "n1", "id": "x", "name": "stop"}', ("n1", "stop", {})),
        (KEYED, '{"stop": {"a": [1]}}', ("new", "stop", {"a": [1]})),
        (KEYED, '{"stop": {}, "go": {}}', None),
        (JSON, '{"name": 5, "arguments": {}}', None),
        (JSON, '{"name": "stop", "arguments": [1]}', None),
        (TAG, "stop<sep>{}", ("new", "stop", {})),
        (TAG, "functions.stop:12<sep>{}", ("functions.stop:12", "stop", {})),
        (TAG, "stop:x<sep>{}", ("new", "stop:x", {})),
        (TAG, "functions.x:0{}", ("functions.x:0", "x", {})),
        (TAG, "functions.functions.x:0{}", ("new", "functions.x:0", {})),
        (TAG, "stop[CALL_ID]abc[ARGS]{}", ("abc", "stop", {})),
        (TAG, "stop[CALL_ID]abc\n<sep>{}", ("abc", "stop", {})),
        (TAG, 'stop\n```json\n{"a": 1}', ("new", "stop", {"a": 1})),
        (TAG, "{}", None),
        (TAG, "stop<sep>[]", None),
        (TAG, "<sep>{}", None),
        (BEFORE, "i9<fn>stop<args>{}", ("i9", "stop", {})),
        (BEFORE, "i9 <fn> stop <args> {}", ("i9", "stop", {})),
    ],
)
def test_a_call_has_the_id_and_the_name_that_are_written(format, text, call, step):
    whole = f"<call>{text}</call>"
    expected = ("", [call]) if call else (whole, [])
    assert read(format, whole, step) == expected


@pytest.mark.parametrize("step", [1, None])
def test_calls_follow_each_other_with_and_without_marks(step):
    one, two = '{"name": "stop", "arguments": {}}', '{"name": "go", "arguments": {"a": 1}}'
    both = [("new", "stop", {}), ("new", "go", {"a": 1})]
    for between in ("</call><call>", "</call>\n<call>", "</call>", "\n", "", "<call>"):
        assert read(JSON, f"<call>{one}{between}{two}</call>", step) == ("", both), between
    listed = f"<call>[{one}, {two}]</call>"
    assert read(JSON, listed, step) == ("", both)
    assert read(JSON, listed + ",x", step) == (",x", both)
    assert read(JSON, f"<call>{one}, {two}", step) == ("", both)
    assert read(JSON, f"<call>{one}</call> and <call>{two}</call>", step) == ("and", both)
    assert read(JSON, f"a <call>{one}</call> b <call>no</call> c", step) == (
        "ab <call>no</call> c", both[:1]
    )  # fmt: skip


def test_an_answer_that_a_grammar_makes_a_call_is_one_though_it_is_cut_off():
    begun = '<call>{"name": "stop", "arguments": {"a": "x'
    assert message(JSON, begun, cut=True)["content"] == begun
    found = message(JSON, begun, cut=True, forced=True)
    assert found["content"] is None
    (call,) = found["tool_calls"]
    assert call["function"] == {"name": "stop", "arguments": '{"a": "x'}
    for nameless in ('<call>{"arguments": {"a": 1}', '<call>{"name": "st'):
        assert "tool_calls" not in message(JSON, nameless, cut=True, forced=True)
    wrong = '<call>{"name": "stop", nope'
    assert message(JSON, wrong, forced=True)["content"] == wrong


CODER = "<function=stop>\n<parameter=a>\n{}\n</parameter>\n</function>"


@pytest.mark.parametrize("step", [1, 5, None])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<tool_call>" + CODER.format("x") + "</tool_call>", {"a": "x"}),
        ("<tool_call>\n" + CODER.format(1) + "\n</tool_call>", {"a": 1}),
        ("<tool_call>" + CODER.format("x"), {"a": "x"}),
        ("<tool_call>" + CODER.format("y\n</parameter>\nz") + "</tool_call>",
         {"a": "y\n</parameter>\nz"}),
        ("<tool_call>" + CODER.format("y</parameter></function>z") + "</tool_call>",
         {"a": "y</parameter></function>z"}),
        ("<tool_call>stop</tool_call>", None),
        ("<tool_call><function></tool_call>", None),
    ],
)  # fmt: skip
def test_qwens_other_notation_within_its_own_mark(text, found, step):
    format = ToolFormat("json", ("<tool_call>",), ("</tool_call>",), ("<tool_call>",), FLAT)
    expected = (text, []) if found is None else ("", [("new", "stop", found)])
    assert read(format, text, step) == expected


KINDS = ToolFormat(
    "tagged", ("<f ",), ("</f>",), ("<f ",), middle=(">",),
    argument=Argument('<p n="', ('" string="',), "</p>", kind_end='">', has_cdata=True),
)  # fmt: skip


@pytest.mark.parametrize("step", [1, None])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<p n="a" string="true">1</p>', {"a": "1"}),
        ('<p n="a" string="string">1</p>', {"a": "1"}),
        ('<p n="a" string="false">1</p>', {"a": 1}),
        ('<p n="a" string="false">[1, null]</p>', {"a": [1, None]}),
        ('<p n="a" string="">1</p>', {"a": 1}),
        ('<p n="a" string="false">True</p>', {"a": "True"}),
        ('<p n="a" string="true"><![CDATA[<b> </p> ]]></p>', {"a": "<b> </p> "}),
        ('<p n="a" string="true"> <![CDATA[x]]></p>', {"a": " <![CDATA[x]]>"}),
        ('<p n="a" string="' + "k" * 255 + '">1</p>', {"a": 1}),
        ('<p n="a" string="' + "k" * 256 + '">1</p>', None),
        ('<p n=" a " string="true">1</p><p n="b" string="true">2</p>', {"a": "1", "b": "2"}),
    ],
)
def test_arguments_that_name_their_kind(text, found, step):
    whole = f"<f stop>{text}</f>"
    expected = (whole, []) if found is None else ("", [("new", "stop", found)])
    assert read(KINDS, whole, step) == expected


XTML = ToolFormat(
    "xtml", ("<tools|>", "<call"), ("</call|>", "</tools|>", "</json|>"), ("<tools|>", "<call"),
    middle=("<json",), argument=Argument("<arg", closing="</arg|>", kind_end="|>"),
)  # fmt: skip


@pytest.mark.parametrize("step", [1, 4, None])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('<call tool="stop"|></call|>', {}),
        ('<call tool="stop"|><arg key="a" type="string"|>1</arg|></call|>', {"a": "1"}),
        ('<call tool="stop"|><arg key="a" type="number"|>1</arg|></call|>', {"a": 1}),
        ('<call tool="stop"|><arg key="a"|>1</arg|> <arg key="b"|>x</arg|></call|>',
         {"a": 1, "b": "x"}),
        ('<call tool="stop"|><arg key="a" type="object"|>{"b": "</arg|></call|>"}</arg|></call|>',
         {"a": {"b": "</arg|></call|>"}}),
        ('<call tool="stop"|><json|>{"a": [2]}</json|></call|>', {"a": [2]}),
        ('<call tool=""|></call|>', None),
        ('<call index="1"|></call|>', None),
        ('<call tool="stop"|><arg key=""|>1</arg|></call|>', None),
        ('<call tool="stop"|><arg key="' + "k" * MAX_NAME + '"|>1</arg|></call|>',
         {"k" * MAX_NAME: 1}),
        ('<call tool="stop"|><arg key="' + "k" * (MAX_NAME + 1) + '"|>1</arg|></call|>', None),
        ('<call tool="stop"|><arg key="a"|>1', None),
        ('<call tool="stop"|>', None),
        ('<call tool="stop"|><json|>5</json|></call|>', None),
        ('<call tool="stop"|>words</call|>', None),
    ],
)  # fmt: skip
def test_tags_with_attributes(text, found, step):
    whole = f"<tools|>{text}</tools|>" if found is not None else f"<tools|>{text}"
    expected = (whole, []) if found is None else ("", [("new", "stop", found)])
    assert read(XTML, whole, step) == expected


GEMMA = ToolFormat("gemma", ("<call>",), ("</call>",), ("<call>",))


@pytest.mark.parametrize("step", [1, None])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("stop{a:1}", {"a": 1}), ("stop{}", {}),
        ("stop{a:<|\"|></call>}<|\"|>}", {"a": "</call>}"}),
        ("{a:1}", None), ("stop", None), ("stop a:1}", None), (".{a:1}", None), ("stop{a:1", None),
    ],
)  # fmt: skip
def test_a_name_and_an_object_without_quotes(text, found, step):
    whole = f"<call>{text}</call>"
    expected = (whole, []) if found is None else ("", [("new", "stop", found)])
    assert read(GEMMA, whole, step) == expected


PYTHON = ToolFormat("python", ("<calls>",), ("</calls>",), ("<calls>",))


@pytest.mark.parametrize("step", [1, None])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[stop(), go(a=1)]", [("stop", {}), ("go", {"a": 1})]),
        ("stop(a='</calls>')", [("stop", {"a": "</calls>"})]),
        ('[{"name": "stop", "arguments": {"a": 1}}]', [("stop", {"a": 1})]),
        ('{"name": "stop"}', [("stop", {})]),
        ('{"name": "stop", "parameters": {"b": 2}}', [("stop", {"b": 2})]),
        ('{"name": "stop", "arguments": null}', [("stop", {})]),
        ('{"name": 1}', None),
        ('{"name": "stop", "arguments": [1]}', None),
        ("[5]", None),
        ("stop", None),
        ("", None),
    ],
)
def test_lists_of_calls_in_pythons_syntax_or_in_json(text, found, step):
    whole = f"<calls>{text}</calls>"
    expected = (whole, []) if found is None else ("", [("new", *call) for call in found])
    assert read(PYTHON, whole, step) == expected


def test_a_call_is_looked_for_at_so_many_ends(monkeypatch):
    """Each end within a text is tried once, up to a number of them."""
    for n in (1, 2):
        monkeypatch.setattr(readers, "_MAX_ENDS", n + 1)
        for m in (n, n + 1):
            text = "<calls>stop(a='" + ")</calls>" * m + "')</calls>"
            assert bool(read(PYTHON, text)[1]) is (m <= n)


@pytest.mark.parametrize(
    "text",
    [
        '[stop(a="b")]',
        '[stop(a="b"), stop(a="b")]',
        '```json\n[stop(a="b")]\n```',
        " \n[ stop(a='b') ]\n",
    ],
)
def test_a_list_of_calls_may_be_the_whole_answer(text):
    found = read(JSON, text)[1]
    assert found == [("new", "stop", {"a": "b"})] * text.count("stop")
    assert read(JSON, text.replace("stop", "other")) == (text.replace("stop", "other"), [])
    assert read(JSON, text + " more") == (text + " more", [])


# --- text in pieces -------------------------------------------------------------------------------


def finished(steps):
    """What a reader of a whole tape returns."""
    with pytest.raises(StopIteration) as end:
        next(steps)
    return end.value.value


def test_names_and_white_space_end_where_they_do():
    whole = Tape(" \t\nab-c_1.x:2/é rest", last=True)
    assert finished(whole.name()) == ""
    assert finished(whole.space()) == " \t\n"
    assert finished(whole.space()) == ""
    assert finished(whole.name()) == "ab-c_1.x:2/é"
    assert finished(whole.peek()) == " "
    for c in "<>{}[]()\"'`|,=; \n":
        assert finished(Tape("a" + c + "b", last=True).name()) == "a", c
    for n in (MAX_NAME, MAX_NAME + 1, MAX_NAME + 2):
        assert len(finished(Tape("a" * n, last=True).name())) == min(n, MAX_NAME + 1)
    long = Tape("a" * 200)
    steps = long.name()
    assert next(steps) is None
    long.push("b" * 200)
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert end.value.value == "a" * 200 + "b" * (MAX_NAME + 1 - 200)
    assert not long.is_empty


def test_what_was_taken_can_be_kept_and_put_back():
    whole = Tape("abcdef", last=True)
    assert whole.take(1) == "a"
    whole.keep("x")
    assert whole.take(2) == "bc"
    assert whole.take(0) == ""
    assert whole.take(1) == "d"
    whole.put_back("d")
    assert whole.kept() == "xbc"
    assert whole.kept() == ""
    whole.begin_again("YZ")
    assert [whole.take(1) for _ in range(3)] == ["Y", "Z", "d"]
    assert not whole.is_empty
    assert whole.take(9) == "ef"
    whole.feed(lambda text, at: at)
    assert whole.kept() == ""


def upto(marks, pieces, most=0):
    """(mark, text before it) of a text that comes in these pieces."""
    given, whole = [], Tape()
    steps = whole.upto(marks, given.append, most)
    for piece in [*pieces, None]:
        if piece is None:
            whole.last = True
        else:
            whole.push(piece)
        try:
            next(steps)
        except StopIteration as end:
            return end.value, "".join(given)
    raise AssertionError("a tape without an end")


@pytest.mark.parametrize("most", [0, 4])
@pytest.mark.parametrize("marks", [("ab",), ("ab", "abc"), ("b", "aa"), ("aab", "ab", "a"), ()])
@settings(max_examples=60, deadline=None)
@given(text=st.text("abc", max_size=12), places=st.lists(st.integers(0, 12), max_size=5))
def test_the_first_mark_is_found_however_the_text_is_cut(marks, most, text, places):
    starts = [(text.find(mark), -len(mark), mark) for mark in marks if mark in text]
    at, _, mark = min(starts, default=(len(text), 0, ""))
    if most and at >= most:
        at, mark = min(most, len(text)), ""
    cuts = [0, *sorted(min(p, len(text)) for p in places), len(text)]
    pieces = [text[start:stop] for start, stop in itertools.pairwise(cuts)]
    assert upto(marks, pieces, most) == (mark, text[:at])


def test_the_longest_mark_that_comes_next():
    whole = Tape("</a>b", last=True)
    assert finished(whole.ahead(("</a>", "</a>b", "<", ""))) == "</a>b"
    assert finished(whole.mark(("</a>", "x"))) == "</a>"
    assert finished(whole.mark(("x", ""))) == ""
    assert finished(whole.ahead(())) == ""
    begun = Tape("</")
    assert next(begun.ahead(("</a>",))) is None, "it may still come"
    assert finished(begun.ahead(("/",))) == ""
    assert tape._compiled(("ab", "", "abc")).longest == 3
    assert tape._compiled(("ab", "abc")).longer == {"ab"}
    assert tape._compiled(("ab", "x")).beginnings == {"a"}


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "python", "text", "value"),
    [
        ({}, False, "1", 1), ({}, False, " 1 ", 1), ({}, False, "x y", "x y"),
        ({}, False, '"x"', "x"), ({}, False, "True", "True"), ({}, True, "True", True),
        ({}, True, "None", None), ({}, False, "{'a': 1}", {"a": 1}), ({}, False, "['a']", ["a"]),
        ({}, False, "[1,]", [1]), ({}, False, "NaN", "NaN"), ({}, False, "[x]", "[x]"),
        ({}, False, "", ""), ({}, False, "  ", "  "), ({}, False, '{"a": True}', {"a": True}),
        ("string", False, "1", "1"), ("string", False, "null", "null"),
        ("string", False, ' "x" ', ' "x" '), ("string", False, "{}", "{}"),
        (["string", "null"], False, "null", None), (["string", "null"], False, "None", "None"),
        (["string", "null"], True, "None", None), (["string", "null"], True, "null", None),
        (["string", "null"], False, " null", None), (["string", "object"], False, '{"a":1}',
                                                     {"a": 1}),
        (["string", "object"], False, "[1]", "[1]"), (["string", "array"], False, "[1]", [1]),
        (["string", "array"], False, "{}", "{}"), (["string", "array"], False, "[x", "[x"),
        (["string", "integer"], False, "[1]", "[1]"), ("boolean", False, "TRUE", True),
        ("boolean", False, "False", False), ("boolean", False, "yes", "yes"),
        (["boolean", "integer"], False, "TRUE", "TRUE"), ("integer", False, "True", True),
        ("integer", False, '"5"', '"5"'), ("integer", False, "5", 5),
        ("object", False, "{'a': None}", {"a": None}), ("array", False, "(1, 2)", "(1, 2)"),
    ],
)  # fmt: skip
def test_a_value_without_quotes_has_the_type_that_its_schema_says(schema, python, text, value):
    kind = {"type": schema} if schema else {}
    tool = {"name": "f", "parameters": {"properties": {"a": kind}}}
    found = json.loads(Tools([tool]).typed("f", "a", text, python=python))
    assert (found, type(found)) == (value, type(value))


DEFS = {"$defs": {"n": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, "string"), ({"type": ["string", "null"]}, "string null"),
        ({"type": "other"}, ""), ({"type": ["string", 5]}, "string"), ({"enum": [1, "a"]},
                                                                       "integer string"),
        ({"enum": [None, True, 1.5, [], {}]}, "null boolean number array object"),
        ({"const": 5}, "integer"), ({"const": None}, "null"), ({"properties": {}}, "object"),
        ({"items": {}}, "array"), ({}, ""), (5, ""), (None, ""), ({"type": "string", "enum": [1]},
                                                                   "string"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}, "string null"),
        ({"oneOf": [{"type": "string"}]}, "string"), ({"allOf": [{"type": "string"}]}, "string"),
        ({"$ref": "#/$defs/n"}, "null"), ({"$ref": "other"}, ""), ({"$ref": "#/$defs/x"}, ""),
        ({"$ref": "#/$defs/n/type/x"}, ""), ({"anyOf": [{"anyOf": [{"type": "null"}]}]}, "null"),
        ({"anyOf": [{}] * 63 + [{"type": "null"}]}, "null"),
        ({"anyOf": [{}] * 64 + [{"type": "null"}]}, ""),
    ],
)  # fmt: skip
def test_the_kinds_that_a_schema_allows(schema, kinds):
    assert Place(DEFS, schema).kinds == frozenset(kinds.split())


def test_schemas_within_schemas_have_a_deepest_one():
    nested, kinds = {"type": "null"}, []
    for _ in range(7):
        kinds.append(Place(None, nested).kinds)
        nested = {"anyOf": [nested]}
    assert kinds == [{"null"}] * 5 + [set()] * 2
    chain = {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(40)}}
    chain["$defs"]["40"] = {"type": "null"}
    n = values._MAX_REFERENCES
    assert [Place(chain, {"$ref": f"#/$defs/{40 - i}"}).kinds for i in (n - 2, n - 1, n)] == [
        {"null"}, set(), set()
    ]  # fmt: skip
    listed = {"$defs": [{}, {"type": "null"}]}
    for part, found in (("1", {"null"}), ("2", set()), ("-1", set()), ("x", set())):
        assert Place(listed, {"$ref": f"#/$defs/{part}"}).kinds == found


def test_members_and_items_of_a_schema():
    place = Place(DEFS, {
        "anyOf": [{"properties": {"a": 1}}, {"properties": {"b": 2}}],
        "additionalProperties": {"type": "null"},
    })  # fmt: skip
    assert [place.member(key).schema for key in "abc"] == [1, 2, {"type": "null"}]
    assert Place(DEFS, {"additionalProperties": True}).member("a") == Place(DEFS, None)
    assert Place(DEFS, {"items": {"type": "null"}}).item().kinds == {"null"}
    assert Place(DEFS, {"items": [1]}).item() == Place(DEFS, None)
    tools = Tools([{"name": "f"}, {"function": {"name": "g", "parameters": 5}}, {"name": 7}, {}])
    assert [name in tools for name in ("f", "g", 7, "h")] == [True, True, False, False]
    assert tools.fits("f", "{}")
    assert not tools.fits("h", "{}")
    for wrong in ("[]", "{", "", "[" * 100_000):
        assert not tools.fits("f", wrong)


def test_a_text_within_a_text_is_looked_into_once():
    inner = '{"a": 1}'
    once = json.dumps(inner)
    assert object_text(once) == inner
    assert object_text(json.dumps(once)) is None
    assert object_text('"a\nb"') is None
    assert object_text(inner + " \n") == inner
    assert object_text(inner + " x") is None
    assert object_text("[" * 100_000) is None


# --- syntax ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'''a'b'''", "a'b"), ('"""a\n"b"""', 'a\n"b'),
        ("''", ""), ('""', ""), ("'a', b='c'", None),
        ("'it's'", "it's"), ("'a', 'b'", "a', 'b"), ("'a')", None), ("'a\\'b'", "a'b"),
        ("(1, 2)", [1, 2]), ("()", []), ("[[1], (2)]", [[1], [2]]), ("{1: 2, True: 3}",
                                                                     {"1": 2, "true": 3}),
        ("{'a': {'b': [None]}}", {"a": {"b": [None]}}), ("+5", 5), ("-0.5", -0.5),
        ("[1, 2,]", [1, 2]), (" 'x' ", "x"), ("'\\x4'", "\\x4"), ("'\\u00g0'", "\\u00g0"),
        ("'\\U00110000'", "\\U00110000"), ("'\\U0010ffff'", "\U0010ffff"), ("'\\q'", "\\q"),
        ("'\\\n'", ""), ("'a\"b'", 'a"b'), ("\"a'b\"", "a'b"), ("['a','b']", ["a", "b"]),
        ("{'a':'b'}", {"a": "b"}),
    ],
)  # fmt: skip
def test_literals_of_python(written, value):
    if value is None:  # what stands there ends the text
        assert syntax.python_calls(f"f(a={written})") != [("f", {"a": written})]
        return
    assert syntax.python_calls(f"f(a={written})") == [("f", {"a": value})]
    assert syntax.python_calls(f"[f(a={written}), g(b = {written} , c=1)] ") == [
        ("f", {"a": value}), ("g", {"b": value, "c": 1})
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["nope", "[1", "[1 2]", "{1}", "{[1]: 2}", "{{}: 2}", "'a", "", "1 2", "NaN", "Infinity", "0x1",
     "1.", "{'a' 1}", "__import__", "[1,,2]"],
)  # fmt: skip
def test_what_is_no_literal(text):
    assert syntax.python_value(text) is None


def test_a_literal_alone():
    assert syntax.python_value(" [1, 'a', {'b': True}] ") == [1, "a", {"b": True}]
    assert syntax.python_value("'it's'") == "it's"
    assert syntax.python_value("['a]', 'b']") == ["a]", "b"]
    for n, fits in ((syntax._MAX_DEPTH - 1, True), (syntax._MAX_DEPTH, False)):
        assert (syntax.python_value("[" * n + "1" + "]" * n) is not None) is fits
        gemma = "{a:" * n + "1" + "}" * n
        assert (gemma_arguments(gemma, "<q>") is not None) is fits


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}), ("{a:1}", {"a": 1}), ("{a:1,b:[1,true,x y]}", {"a": 1, "b": [1, True, "x y"]}),
        ("{a:<q>x<q>}", {"a": "x"}), ("{a:<q>x<q>y<q>}", {"a": "x<q>y"}), ('{a:"x"}', {"a": "x"}),
        ('{a:"x"y"}', {"a": 'x"y'}), ("{<q>a:b<q>:1}", {"a:b": 1}), ('{"a":1}', {"a": 1}),
        ("{a:null,b:False,c:None}", {"a": None, "b": False, "c": None}), (" { a : 1 } ", {"a": 1}),
        ("{a:NaN}", {"a": "NaN"}), ("{a:{b:{}}}", {"a": {"b": {}}}), ("{a:<q><q>}", {"a": ""}),
        ("{a:1,}", {"a": 1}), ("{a:}", None), ("{a}", None), ("{:1}", None), ("[1]", None),
        ("{a:1", None), ("{a:1}x", None), ("{a:<q>x}", None), ("", None),
        ("{a:1 b:2}", {"a": "1 b:2"}),
        ('{a:"x",b:"y"}', {"a": "x", "b": "y"}), ("{a:[<q>x<q>]}", {"a": ["x"]}),
    ],
)  # fmt: skip
def test_objects_without_quotes(text, value):
    assert gemma_arguments(text, "<q>") == value


PLACE = Tools(
    [
        {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "note": {"type": ["string", "null"]},
                    "n": {"type": "integer"},
                    "id": {"type": ["string", "integer"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "opts": {"type": "object"},
                },
            },
        }
    ]
).arguments("f")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{tags:['a','b, c']}", {"tags": ["a", "b, c"]}),
        ("{opts:{'m': 'x'}}", {"opts": {"m": "x"}}),
        ('{tags:["a\\n"]}', {"tags": ["a\n"]}), ('{path:"\\s"}', {"path": "\\s"}),
        (r"{path:':\s*\w+'}", {"path": r":\s*\w+"}), ("{path:'it\\'s'}", {"path": "it's"}),
        ("{path:'tis}", {"path": "'tis"}), ("{path:'a' b}", {"path": "'a' b"}),
        ("{path:42,n:42,id:42}", {"path": "42", "n": 42, "id": 42}),
        ("{path:null,note:null}", {"path": None, "note": None}), ("{path:true}", {"path": "true"}),
        ("{tags:[1,x]}", {"tags": ["1", "x"]}), ("{other:1}", {"other": 1}),
    ],
)  # fmt: skip
def test_values_without_their_marks_have_the_types_of_the_schema(text, value):
    """vllm-project/vllm#47906, #51284: quotes were kept, numbers became texts."""
    assert repr(gemma_arguments(text, "<q>", PLACE)) == repr(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{path:<q>look<q>n:90}", {"path": "look", "n": 90}),
        ("{n:3,path:\n\n# A\n\nB, `c`: [d].}", {"n": 3, "path": "\n\n# A\n\nB, `c`: [d]."}),
        ("{path:<q>abc}", {"path": "abc"}), ("{path:abc<q>,n:3}", {"path": "abc", "n": 3}),
        ("{path:<q>a<q>,note:':\\s'<q>}", {"path": "a", "note": ":\\s"}),
        ("{path:a, path:b, c,n:1}", {"path": "a, path:b, c", "n": 1}),
        ("{path:<q>a, n:b<q>,n:1}", {"path": "a, n:b", "n": 1}),
        ("{n:a[,path:x}", None), ("{x[,path:y}", None), ("{path:<q>abc", None), ("{}}", None),
    ],
)  # fmt: skip
def test_a_missing_mark_is_where_the_next_known_key_begins(text, value):
    """ollama/ollama#15315, PR 15374; hybridgroup/yzma PR 243: the call was lost."""
    assert gemma_arguments(text, "<q>", PLACE, lenient=True) == value
    if value is not None and "n:b" not in text:
        assert gemma_arguments(text, "<q>", PLACE) is None


def test_without_a_schema_nothing_is_guessed():
    assert gemma_arguments("{path:<q>a<q>n:1}", "<q>", lenient=True) is None


def test_json_is_read_from_a_position_and_no_further():
    reader = json_stream.ObjectReader(lambda path: path == ("a", "b"), whole=False)
    assert reader.feed('xx{"a": {"b": "c"}}yy', 2) == 19
    assert reader.values == {("a", "b"): '"c"'}
    assert reader.keys == ["a"]
    assert reader.feed("more", 0) == 0
    listed = json_stream.ObjectReader(lambda path: True)
    listed.feed('{"a": [{"b": 1}], "c": 2}', 0)
    assert listed.values == {("a",): '[{"b": 1}]', ("c",): "2"}
    escaped = json_stream.ObjectReader(lambda path: False, whole=True)
    text = '{"a\\u0041\\n": "\\\\\\"\\/\\b\\f\\r\\t\\u12zz"}'
    assert escaped.feed(text, 0) == len(text)
    assert escaped.text == '{"a\\u0041\\n": "\\\\\\"\\/\\b\\f\\r\\t\\\\u12zz"}'
    assert json_stream._CONTROL["\x1f"] == "\\u001f"
    assert len(json_stream._CONTROL) == 32


def test_elements_are_nested_so_deep():
    schema = {}
    n = elements._MAX_DEPTH
    for depth in (n, n + 1):
        text = "@<a>" * depth + "x" + "@</a>" * depth
        found = elements.element_arguments(text, "@", Place(schema, schema))
        assert found is not None
        value, levels = json.loads(found), 0
        while isinstance(value, dict):
            value, levels = value["a"], levels + 1
        assert levels == min(depth, n + 1)


# --- deltas ---------------------------------------------------------------------------------------


def test_deltas_add_up_to_a_message():
    deltas = [
        Delta(reasoning="h"), Delta(reasoning="m"), Delta(content="a"),
        Delta(index=0, id="i", name="f"), Delta(index=0, arguments="{"),
        Delta(index=1, id="j", name="g"), Delta(index=0, arguments="}"),
    ]  # fmt: skip
    assert message_of(deltas) == {
        "role": "assistant", "content": "a", "reasoning_content": "hm",
        "tool_calls": [
            {"id": "i", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            {"id": "j", "type": "function", "function": {"name": "g", "arguments": ""}},
        ],
    }  # fmt: skip
    assert message_of([]) == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("step", [1, 3, None])
@pytest.mark.parametrize(
    ("text", "content", "thought"),
    [
        ("<t> a \n</t> b ", "b ", "a"),
        ("<t>a</t>", "", "a"),
        ("x <t>a</t>", "x <t>a</t>", ""),
        (" x ", " x ", ""),
        ("</t>\n x", "x", ""),
        ("<t>a \n", "", "a \n"),
        ("<t></t>x", "x", ""),
        ("<t>a</t>b<t>c</t>", "b<t>c</t>", "a"),
        ("<", "<", ""),
    ],
)
def test_white_space_belongs_to_what_it_is_in(text, content, thought, step):
    found = message(JSON, text, step, think=("<t>", "</t>"))
    assert (found["content"], found.get("reasoning_content", "")) == (content, thought)


def test_ids_are_new_ones_of_their_own():
    parser = OutputParser(ChatFormat(None, tools=JSON), tools=TOOLS)
    one = '<call>{"name": "stop", "arguments": {}}</call>'
    found = message_of([*parser.push(one * 2), *parser.finish()])["tool_calls"]
    ids = [call["id"] for call in found]
    assert len(set(ids)) == 2
    assert all(id.startswith("call_") and len(id) == 29 for id in ids)


# --- thoughts -------------------------------------------------------------------------------------


def forced(budget, tokens):
    return [budget.accept(token) for token in tokens]


def test_a_budget_ends_a_thought_once_and_begins_anew_with_the_next():
    budget = ThinkingBudget(2, start=[1], end=[8, 9], message=[7])
    assert forced(budget, [5, 1, 5]) == [[], [], []]
    assert forced(budget, [5]) == [[7, 8, 9]]
    assert forced(budget, [7, 8, 9]) == [[], [], []]
    assert not budget.is_open
    assert forced(budget, [1, 5, 5]) == [[], [], [7, 8, 9]]
    assert budget.is_open
    assert forced(budget, [5, 5, 5]) == [[], [], []], "only once"


def test_marks_of_thoughts_are_whole_ones():
    budget = ThinkingBudget(9, start=[1, 2], end=[8, 9])
    forced(budget, [2, 1, 1, 5, 2])
    assert not budget.is_open
    forced(budget, [1, 2])
    assert budget.is_open
    forced(budget, [2, 8, 5, 9])
    assert budget.is_open
    forced(budget, [8, 9])
    assert not budget.is_open
    no_start = ThinkingBudget(1, start=[], end=[9])
    assert forced(no_start, [1, 2, 3]) == [[]] * 3
    assert not no_start.is_open
    nothing = ThinkingBudget(0, start=[1], end=[9])
    assert nothing.begin() == []
    assert nothing.accept(1) == [9]
    opened = ThinkingBudget(1, start=[1], end=[9], is_open=True)
    assert opened.begin() == []
    assert opened.accept(5) == [9]
    with pytest.raises(ValueError, match="has no tokens"):
        ThinkingBudget(1, start=[1], end=[])


# --- lookups --------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    texts=st.lists(st.text("ab", min_size=1, max_size=6), max_size=8),
    text=st.text("abc", max_size=9),
)
def test_tokens_at_a_place_are_all_that_begin_there(texts, text):
    """Shorter than the first letters that are looked up, and longer."""
    lookup = TokenLookup((each, i) for i, each in enumerate(texts))
    ids = {each: i for i, each in enumerate(texts)}
    for start in range(len(text) + 1):
        expected = sorted(
            (start + len(each), i) for each, i in ids.items() if text.startswith(each, start)
        )
        assert lookup.at(text, start) == expected
    data = TokenLookup((each.encode(), i) for i, each in enumerate(texts))
    assert data.at(text.encode(), 0) == lookup.at(text, 0)


CODED = ToolFormat(
    "tagged", ("<tool_call>", "<function="), ("</function>", "</tool_call>"),
    ("<tool_call>", "<function="), middle=(">",),
    argument=Argument("<parameter=", (">",), "</parameter>", margin="\n", end_margin="\n"),
)  # fmt: skip


@pytest.mark.parametrize("step", [1, None])
def test_a_value_has_the_marks_of_its_own_end_where_the_outer_ones_come_later(step):
    """Without outer marks several readings are left, so that the call stays text as a whole."""
    within = "x\n</parameter>\n</function> y"
    call = CODER.format(within)
    text, ((_, name, arguments),) = read(CODED, f"<tool_call>\n{call}\n</tool_call>", step)
    assert (text, name, arguments) == ("", "stop", {"a": within})
    assert read(CODED, call, step) == (call, [])


@pytest.mark.parametrize("space", ["", " ", "\n\t "])
def test_white_space_stands_between_any_two_parts_of_a_call(space):
    python = "[ f( a = 1 , b = [ ] , c = { } , d = ( 1 , 2 , ) , e = { 'k' : 3 } ) , g( ) ] "
    assert syntax.python_calls(python.replace(" ", space)) == [
        ("f", {"a": 1, "b": [], "c": {}, "d": [1, 2], "e": {"k": 3}}),
        ("g", {}),
    ]
    gemma = "{ a : 1 , b : [ ] , c : { } , d : [ 1 , <q>x<q> , ] , <q>e<q> : <q> <q> } "
    assert gemma_arguments(gemma.replace(" ", space), "<q>") == {
        "a": 1, "b": [], "c": {}, "d": [1, "x"], "e": space
    }  # fmt: skip
