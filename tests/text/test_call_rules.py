"""Parts of the text package alone: readers of calls, schemas, users' texts, words and caches."""

import json

import pytest

from tamis.text import bpe, wordpiece
from tamis.text.calls import syntax, values
from tamis.text.calls.elements import attributes, element_arguments
from tamis.text.calls.format import Argument, ToolFormat
from tamis.text.calls.json_stream import MAX_DEPTH, ObjectReader
from tamis.text.calls.readers import trimmed
from tamis.text.calls.values import Place, Tools, object_text
from tamis.text.charsmap import CharacterMap
from tamis.text.chat_format import ChatFormat, _joined
from tamis.text.chat_template import ChatTemplate, TemplateError, _strftime_now
from tamis.text.longest_match import unescaped
from tamis.text.tagged_text import UserText, unveil, veil
from tamis.text.tool_calls import OutputParser, message_of
from tamis.tools.fuzz_targets import CALL_FORMATS, CALL_TOOLS

TOOLS = [
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}},
]


def told(format, text, prompt="", step=None, cut=False, tools=TOOLS):
    """(text, thoughts, calls) of an answer, however it comes."""
    parser = OutputParser(format, tools=tools, prompt=prompt, new_id=lambda: "new")
    step = step or len(text) or 1
    deltas = [d for i in range(0, len(text), step) for d in parser.push(text[i : i + step])]
    found = message_of([*deltas, *parser.finish(cut=cut)])
    calls = [
        (c["function"]["name"], json.loads(c["function"]["arguments"]))
        for c in found.get("tool_calls") or ()
    ]
    return found["content"] or "", found.get("reasoning_content", ""), calls


# --- JSON, read as it comes -----------------------------------------------------------------------


def read(text, watched=lambda path: True):
    """What a reader makes of a text in one piece, which it makes as well of its characters."""
    found = []
    for step in (len(text), 1):
        reader = ObjectReader(watched, whole=True)
        at = 0
        for i in range(0, len(text), step):
            piece = text[i : i + step]
            at = i + reader.feed(piece, 0)
            if reader.done or reader.failed:
                break
        found.append((reader.done, reader.failed, at, dict(reader.values), list(reader.keys)))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("{}", "{}"),
        ('{ "a" : 1 }', '{ "a" : 1 }'),
        ('{"a":[]}', '{"a":[]}'),
        ('{"a":[1,[2],{}]}', '{"a":[1,[2],{}]}'),
        ('{"a":True,"b":False,"c":None}', '{"a":true,"b":false,"c":null}'),
        ('{"a":true,"b":false,"c":null}', '{"a":true,"b":false,"c":null}'),
        ('{"a":-1.5e+3}', '{"a":-1.5e+3}'),
        ('{"a":"x\ny\tz"}', '{"a":"x\\ny\\tz"}'),
        ('{"a":"it\\\'s"}', '{"a":"it\'s"}'),
        ('{"a":"\\d"}', '{"a":"\\\\d"}'),
        ('{"a":"\\u00e9"}', '{"a":"\\u00e9"}'),
        ('{"a":"\\u00"}', '{"a":"\\\\u00"}'),
        ('{"a":\v1}', '{"a": 1}'),
        ('{"a":\u00a01,\u2028"b":2}', '{"a": 1, "b":2}'),
    ],
)
def test_an_object_is_read_and_mended(text, whole):
    done, failed, at, found, _ = read(text + "rest")
    assert (done, failed, at) == (True, False, len(text))
    assert found[()] == whole
    json.loads(whole)


@pytest.mark.parametrize(
    ("text", "n_read"),
    [
        ('{"a":nope}', 9),
        ('{"a":01}', 7),
        ('{"a":1.}', 7),
        ("{'a':1}", 1),
        ('{"a" 1}', 5),
        ('{"a":}', 5),
        ('{"a":]}', 5),
        ('{"a":1,}', 7),
        ('{"a":[1,]}', 8),
        ('{"a":[}', 6),
        ('{"a":[1}', 7),
        ('{"a":1]', 6),
        ('{"a":1 "b"', 7),
        ("[1]", 0),
        ('{"a":.5}', 5),
        ("{,}", 1),
    ],
)
def test_what_is_no_object_fails_at_once_and_the_wrong_character_is_not_read(text, n_read):
    assert read(text)[:3] == (False, True, n_read)


def test_depth_has_a_limit():
    assert MAX_DEPTH == 200
    for n, fails in ((MAX_DEPTH - 1, False), (MAX_DEPTH, True)):
        text = '{"a":' + "[" * n + "]" * n + "}"
        assert read(text)[:2] == (not fails, fails)


def test_values_are_those_of_watched_paths_and_keys_the_outer_ones():
    text = '{"a":{"b":[1],"c":2},"d":"x"}'
    wanted = {("a", "b"), ("d",)}
    reader = ObjectReader(wanted.__contains__)
    assert reader.feed(text, 0) == len(text)
    assert reader.values == {("a", "b"): "[1]", ("d",): '"x"'}
    assert reader.keys == ["a", "d"]
    part = ObjectReader({("a",)}.__contains__)
    part.feed('{"z":1,"a":{"b":[', 0)
    assert part.begun == '{"b":['


# --- calls ----------------------------------------------------------------------------------------


NESTED = ToolFormat(
    "json", ("<calls>", "<call>"), ("</call>", "</calls>"), ("<calls>",), {}
)  # fmt: skip
STOP, GO = '{"name": "stop", "arguments": {"a": 1}}', '{"name": "go", "arguments": {}}'
BOTH = [("stop", {"a": 1}), ("go", {})]


@pytest.mark.parametrize("step", [1, 4, None])
def test_calls_within_marks_within_marks(step):
    format = ChatFormat(None, tools=NESTED)
    text = f"So: <calls><call>{STOP}</call>\n<call>{GO}</call></calls> after"
    assert told(format, text, step=step) == ("So:after", "", BOTH)
    text = f"<calls><call>{STOP}</call></calls><calls>{GO}</call></calls>"
    assert told(format, text, step=step) == ("", "", BOTH)


def test_lists_of_calls_after_a_mark():
    format = ChatFormat(None, tools=NESTED)
    assert told(format, f"<calls>[{STOP}, {GO}]</calls>")[2] == BOTH
    # A list ends with its bracket: a comma after it is text.
    found = told(format, f"<calls>[{STOP}]</calls>, and more")
    assert found == (", and more", "", BOTH[:1])


@pytest.mark.parametrize("step", [1, None])
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("all\nHello", ("Hello", [])),
        ('stop\n{"a": 1}', ("", BOTH[:1])),
        ('stop\n{"a": 1}>>>go\n{}', ("", BOTH)),
        ('all\nSo:>>>stop\n{"a": 1}', ("So:", BOTH[:1])),
        ("all\nx>>>all\ny", ("xy", [])),
        ('Just text>>>stop\n{"a": 1}', ("Just text", BOTH[:1])),
        ('what\n{"a": 1}', ('what\n{"a": 1}', [])),  # no tool
        ('stop {"a": 1}', ('stop {"a": 1}', [])),
        ("stop\nplain", ("stop\nplain", [])),
        ('stop\n{"a": 1} and more', ('stop\n{"a": 1} and more', [])),
        ("stop\n!", ("stop\n!", [])),
        ("all", ("all", [])),
    ],
)
def test_messages_to_all_and_to_tools(text, found, step):
    format = ChatFormat(None, tools=ToolFormat("recipient"))
    said, thoughts, calls = told(format, text, step=step)
    assert (said, calls, thoughts) == (*found, "")


WORDS = ToolFormat(
    "tag", ("<tool>", "function", "functions."), ("</tool>",), ("<tool>",), middle=("<sep>",)
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<tool>stop<sep>{}</tool>", [("stop", {})]),
        ("<tool>function<sep>stop<sep>{}</tool>", [("stop", {})]),
        ("<tool>functions.stop<sep>{}</tool>", [("stop", {})]),
        ("<tool>functions.stop:0<sep>{}</tool>", [("stop", {})]),
        ("<tool>stop{}</tool>", [("stop", {})]),
        ("<tool>other{}</tool>", [("other", {})]),
        ("<tool>stop</tool>", [("stop", {})]),
        ("<tool>stop<sep>5</tool>", []),
    ],
)
def test_words_before_a_name_are_no_marks(text, found):
    assert told(ChatFormat(None, tools=WORDS), text)[2] == found


TAGGED = ToolFormat(
    "tagged", ("<f ",), ("</f>",), ("<f ",), middle=(">",),
    argument=Argument("<p ", (">",), "</p>", margin="\n", end_margin="\n"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<f stop><p a>x</p><p b>\n1\n</p></f>", [("stop", {"a": "x", "b": 1})]),
        ("<f stop></f>", [("stop", {})]),
        ("<f stop><p a>x</p>", [("stop", {"a": "x"})]),  # the model itself ended it
        ("<f stop>", []),
        ("<f stop><p a>x </p> y</p></f>", [("stop", {"a": "x </p> y"})]),
        ("<f stop><p >x</p></f>", []),
        ('<f stop><p a"b>x</p></f>', []),
        ("<f stop><p " + "a" * 256 + ">x</p></f>", [("stop", {"a" * 256: "x"})]),
        ("<f stop><p " + "a" * 257 + ">x</p></f>", []),
        ("<f .>x</f>", []),
        ('<f stop>{"a": 1}</f>', [("stop", {"a": 1})]),
    ],
)
def test_arguments_between_marks(text, found):
    format = ChatFormat(None, tools=TAGGED)
    given = told(format, text)
    assert given[2] == found
    assert found or given[0] == text
    if not text.endswith("</f>"):
        assert told(format, text, cut=True) == (text, "", [])


def test_names_are_without_what_a_format_writes_before_them():
    assert trimmed("functions.stop", ("functions.",)) == "stop"
    assert trimmed("stop", ("functions.",)) == "stop"
    assert trimmed("tostop", ("to",)) == "tostop"
    assert [trimmed(name) for name in ("", ".", "-:/", "a" * 257)] == [""] * 4
    assert trimmed("a" * 256) == "a" * 256


HARMONY = ChatFormat(None, tools=ToolFormat("harmony"))


@pytest.mark.parametrize("step", [1, 5, None])
@pytest.mark.parametrize(
    ("text", "prompt", "found"),
    [
        # White space before the end of a message is no part of it; of the last one it is.
        ("<|channel|>final<|message|>Yes \n<|end|>", "<|start|>assistant", ("Yes", "", [])),
        ("<|channel|>final<|message|>Yes \n", "<|start|>assistant", ("Yes \n", "", [])),
        ("<|channel|>analysis<|message|>Hm \n<|end|>", "<|start|>assistant", ("", "Hm", [])),
        ("<|channel|>analysis<|message|>Hm \n", "<|start|>assistant", ("", "Hm \n", [])),
        ("Yes<|end|>", "<|start|>assistant<|channel|>final<|message|>", ("Yes", "", [])),
        ("Yes", "<|start|>user<|message|>to=stop<|end|><|start|>assistant<|message|>",
         ("Yes", "", [])),
        ("{}<|call|>", "<|start|>assistant to=functions.stop<|channel|>commentary<|message|>",
         ("{}", "", [])),
        ("<|channel|>x<|message|>{}<|call|>", "<|start|>assistant to=functions.stop",
         ("", "", [("stop", {})])),
        # A prompt without messages, or one that has gone on to its text, names nobody.
        ("<|channel|>x<|message|>{}<|call|>", "to=functions.stop", ("{}", "", [])),
        ("<|channel|>x<|message|>{}<|call|>",
         "<|start|>assistant to=functions.stop<|message|>" + "a" * 99, ("{}", "", [])),
        ("<|channel|>x to=stop<|message|>{} no<|call|>", "<|start|>assistant",
         ("<|channel|>x to=stop<|message|>{} no", "", [])),
    ],
)  # fmt: skip
def test_harmonys_messages(text, prompt, found, step):
    assert told(HARMONY, text, prompt, step) == found


# --- elements -------------------------------------------------------------------------------------


M = "@"


def elements(text, schema):
    found = element_arguments(text, M, Place(schema, schema))
    return None if found is None else json.loads(found)


def objects(**properties):
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "text", "found"),
    [
        # `item` is an item of a list, and of an object a member like any other.
        (
            objects(item={"type": "integer"}, more={"type": "string"}),
            "@<item>5@</item>@<more>6@</more>",
            {"item": 5, "more": "6"},
        ),
        (objects(item={"type": "string"}), "@<item>5@</item>", {"item": "5"}),
        (
            objects(a={"type": ["array", "object"], "items": {"type": "integer"},
                       "properties": {"b": {"type": "string"}}}),
            "@<a>@<b>5@</b>@</a>",
            {"a": {"b": "5"}},
        ),
        (
            objects(a={"type": "array", "items": {"type": "integer"}}),
            "@<a>@<item>5@</item>@<item>6@</item>@</a>",
            {"a": [5, 6]},
        ),
        (
            objects(a={"type": "array", "items": {"type": "string"}}),
            "@<a>@<item>5@</item>@</a>",
            {"a": ["5"]},
        ),
        (objects(a=objects(item={"type": "integer"})), "@<a>@<item>5@</item>@</a>",
         {"a": {"item": 5}}),
        (objects(a={"type": "string"}), "@<a>@<b>5@</b>@</a>", {"a": "@<b>5@</b>"}),
        (objects(a={"type": "array"}), "@<a> @</a>", {"a": []}),
        (objects(a={"type": "object"}), "@<a>@</a>", {"a": {}}),
        (objects(a={"type": "string"}), "@<a>@</a>", {"a": ""}),
        (objects(), "@<a>@<item>5@</item>@</a>", {"a": [5]}),
        (objects(), "@<a>@<b>x@</b>@</a>", {"a": {"b": "x"}}),
        (objects(), "", {}),
        (objects(), "x", None),
        (objects(), "@<a>x", None),
        (objects(), "@</a>", None),
        (objects(), "@<>x@</>", None),
        (objects(), "@<a>x@</a>y", None),
        (objects(), "@<" + "a" * 256 + ">x@</" + "a" * 256 + ">", {"a" * 256: "x"}),
        (objects(), "@<" + "a" * 257 + ">x@</" + "a" * 257 + ">", None),
    ],
)  # fmt: skip
def test_elements_are_what_their_schema_says(schema, text, found):
    assert elements(text, schema) == found


def test_attributes_of_a_tag():
    assert attributes('tool="f" index="1"') == {"tool": "f", "index": "1"}
    assert attributes('a="x &quot;y&quot; &amp; z"') == {"a": 'x "y" & z'}
    assert attributes("a") == {}


# --- schemas --------------------------------------------------------------------------------------


def fits(schema, value):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return Tools([tool]).fits("f", json.dumps(value))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (objects(a={"type": "integer"}), [{"a": 1}, {"a": 1.0}, {}, {"b": 1}], [{"a": 1.5}]),
        (
            objects(a={"type": "integer"}) | {"additionalProperties": False},
            [{"a": 1}, {}],
            [{"a": 1, "b": 1}],
        ),
        # Patterns of clients are not run: what they may be about is let be.
        (
            objects() | {"additionalProperties": False, "patternProperties": {"^b$": {}}},
            [{}, {"b": 1}, {"c": 1}],
            [],
        ),
        (objects() | {"additionalProperties": {"type": "string"}}, [{"b": "x"}], [{"b": 1}]),
        (objects() | {"required": ["a"]}, [{"a": 1}], [{}, {"b": 1}]),
        (objects(a={"enum": [1, "x"]}), [{"a": 1}, {"a": "x"}], [{"a": 2}, {"a": True}]),
        (objects(a={"const": 1}), [{"a": 1}], [{"a": 2}, {"a": True}]),
        (objects(a={"const": True}), [{"a": True}], [{"a": 1}]),
        (objects(a={"type": ["string", "null"]}), [{"a": "x"}, {"a": None}], [{"a": 1}]),
        (objects(a={"type": "number"}), [{"a": 1}, {"a": 1.5}], [{"a": "x"}, {"a": True}]),
        (objects(a={"type": "boolean"}), [{"a": True}], [{"a": 0}]),
        (
            objects(a={"type": "array", "items": {"type": "integer"}}),
            [{"a": []}, {"a": [1, 2]}],
            [{"a": ["x"]}, {"a": [1, "x"]}, {"a": {}}],
        ),
        (
            objects(a={"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}),
            [{"a": ["x", 1]}, {"a": ["x"]}, {"a": []}],
            [{"a": [1]}, {"a": ["x", "y"]}],
        ),
        (objects(a={"items": [{"type": "string"}]}), [{"a": [1]}], []),
        (
            objects(a={"anyOf": [{"type": "string"}, {"type": "null"}]}),
            [{"a": "x"}, {"a": None}],
            [{"a": 1}],
        ),
        (objects(a={"oneOf": [{"type": "string"}]}), [{"a": "x"}], [{"a": 1}]),
        (objects(a={"allOf": [{"type": "string"}, {"enum": ["x"]}]}), [{"a": "x"}], [{"a": "y"}]),
        (
            objects(a={"$ref": "#/$defs/n"}) | {"$defs": {"n": {"type": "null"}}},
            [{"a": None}],
            [{"a": 1}],
        ),
        (
            objects(a={"$ref": "#/$defs/n~1m/1"}) | {"$defs": {"n/m": [{}, {"type": "null"}]}},
            [{"a": None}],
            [{"a": 1}],
        ),
        (objects(a=False), [{}], [{"a": 1}]),
        (objects(a=True), [{"a": 1}], []),
        (objects(a={"$ref": "#"}), [{"a": {"a": {}}}], [{"a": 5}, {"a": {"a": 5}}]),
        (  # Go writes the lists that it does not have as null.
            objects(a={"type": "string", "enum": None, "anyOf": None}) | {"required": None},
            [{"a": "x"}, {}],
            [{"a": 1}],
        ),
    ],
)
def test_arguments_fit_their_schema(schema, right, wrong):
    for value in right:
        assert fits(schema, value), value
    for value in wrong:
        assert not fits(schema, value), value


def test_a_comparison_has_so_many_steps(monkeypatch):
    schema = objects(a={"type": "array", "items": {"type": "string"}})
    for n_most, found in ((4, True), (3, False)):  # the object, its list, and two items
        monkeypatch.setattr(values, "_MAX_STEPS", n_most)
        assert fits(schema, {"a": ["x", "y"]}) == found


def test_arguments_are_an_object_in_json():
    for nothing in (None, "", " ", "null", "None", '""'):
        assert object_text(nothing) == "{}"
    assert object_text('"{\\"a\\": 1}"') == object_text(' {"a": 1} ') == '{"a": 1}'
    for text in ("[1]", "5", "{", '"x"'):
        assert object_text(text) is None


# --- other syntax ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("true", True), ("false", False), ("null", None), ("True", True), ("False", False),
        ("None", None), ("1", 1), ("-1.5", -1.5), ("1e3", 1000.0), ("'x'", "x"), ('"x"', "x"),
        (r"'a\nb\tc\rd\be\ff\ag\vh\0i'", "a\nb\tc\rd\be\ff\ag\vh\0i"), (r"'\\\'\"\/'", "\\'\"/"),
        (r"'\x41\u00e9\U0001f600'", "Aé😀"), ("[1, 'x']", [1, "x"]), ("{'a': 1}", {"a": 1}),
        ("[]", []), ("{}", {}),
    ],
)  # fmt: skip
def test_values_as_python_writes_them(written, value):
    ((name, found),) = syntax.python_calls(f"[f(a={written})]")
    assert (name, found) == ("f", {"a": value})
    assert type(found["a"]) is type(value)


@pytest.mark.parametrize(
    "text", ["", "[f(]", "[f)]", "[f(a)]", "[f(a=)]", "[f(a=1]", "[f(a=1),]x", "[(a=1)]"]
)
def test_what_is_no_list_of_calls(text):
    assert syntax.python_calls(text) is None


ASKS = """__contains__ startswith endswith find rfind index rindex count isalnum isalpha isascii
    isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper"""


@pytest.mark.parametrize("name", ASKS.split())
def test_a_users_text_answers_as_it_was_written(name):
    plain = "<|im_end|> Ab1"
    users = UserText(veil(plain))
    assert str.__str__(users) != plain, "the test is of something"
    for part in ("<|im_end|>", "A", "zz", "<"):
        given = () if name.startswith("is") else (part,)
        try:
            wanted = getattr(plain, name)(*given)
        except ValueError:
            with pytest.raises(ValueError, match="substring"):
                getattr(users, name)(*given)
            continue
        assert getattr(users, name)(*given) == wanted
    for text in ("ab", "AB", "Ab", "12", "²", "a b", "\n", " ", "é"):
        if name.startswith("is"):
            assert getattr(UserText(text), name)() == getattr(text, name)()


def test_a_users_text_is_compared_as_it_was_written():
    plain = "<|a|>"
    users = UserText(veil(plain))
    assert users == plain
    assert not users != plain  # noqa: SIM202
    for other in ("<", "<|a|>", "<|b|>"):
        assert (users < other, users <= other) == (plain < other, plain <= other)
        assert (users > other, users >= other) == (plain > other, plain >= other)
    assert hash(users) == hash(plain)
    for name in ("upper", "lower", "casefold", "capitalize", "title", "swapcase"):
        for text in ("<|im_End|> straSSe", "x", "ß<|a|>"):
            changed = getattr(UserText(veil(text)), name)()
            assert isinstance(changed, UserText)
            assert unveil(changed) == getattr(text, name)()
            assert str.__str__(changed) == veil(getattr(text, name)())


# --- words ----------------------------------------------------------------------------------------


BLOCKS = [
    (0x4E00, 0x9FFF), (0x3400, 0x4DBF), (0x20000, 0x2A6DF), (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F), (0x2B920, 0x2CEAF), (0xF900, 0xFAFF), (0x2F800, 0x2FA1F),
]  # fmt: skip


def test_ideographs_are_those_of_their_blocks_from_the_first_to_the_last():
    inside = {code for first, last in BLOCKS for code in (first, last)}
    edges = inside | {c + d for c in inside for d in (-1, 1)}
    for code in edges | {0x20, 0x33FF, 0x41, 0x10FFFF}:
        wanted = any(first <= code <= last for first, last in BLOCKS)
        assert wordpiece._is_ideograph(code) == wanted, hex(code)


class Words(bpe.BytePairEncoder):
    """Encodes each word as its length, and notes which it was asked for."""

    def __init__(self):
        self._cache, self._pre, self.asked = {}, "", []

    def _words(self, text):
        return text.split()

    def _encode_word(self, word):
        self.asked.append(word)
        return (len(word),)


def test_a_cache_of_words_has_no_more_than_its_number(monkeypatch):
    monkeypatch.setattr(bpe, "_CACHE_WORDS", 2)
    made = Words()
    sizes = []
    for word in ("a", "bb", "a", "ccc", "a"):
        assert made.encode(word) == [len(word)]
        sizes.append(len(made._cache))
    assert sizes == [1, 2, 2, 1, 2]
    assert made.asked == ["a", "bb", "ccc", "a"]
    most = bpe._CACHE_CHARS
    made.encode("x" * most)
    assert "x" * most in made._cache
    made.encode("x" * (most + 1))
    assert "x" * (most + 1) not in made._cache


@pytest.mark.parametrize(
    ("written", "data"),
    [
        (rb"a", b"a"), (rb"\n\t\r", b"\n\t\r"), (rb"\xe4b", b"\xe4b"), (rb"\xE4", b"\xe4"),
        (rb"\\", b"\\"), (rb"\'", b"'"), (b"a\\", b"a\\"), (rb"\x4", b"x4"), (rb"\x41", b"A"),
        (rb"\x9f\xf9", b"\x9f\xf9"), (rb"\x", b"x"), (b"", b""), (rb"\\n", rb"\n"),
    ],
)  # fmt: skip
def test_escapes_of_tokens(written, data):
    assert unescaped(written) == data


# --- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "think"),
    [
        ("<think>\n", "\n</think>\n\n", ("<think>", "</think>")),
        ("<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>")),
        ("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
        ("<my_think>", "</my_think>", ("<my_think>", "</my_think>")),
        ("<my_think>\n", "\n</my_think>", ("<my_think>", "</my_think>")),
        ("<b>", "</b>", None),
    ],
)
def test_marks_of_thoughts_are_those_that_a_template_writes(before, after, think):
    """A known end has its own beginning, also where the template writes none."""
    source = (
        "{% for m in messages %}{% if m.reasoning_content %}"
        + before + "{{ m.reasoning_content }}" + after
        + "{% endif %}{{ m.content }}{% endfor %}"
    )  # fmt: skip
    assert ChatFormat.of(ChatTemplate(source)).think == think
    if think and think[1] == "</think>":
        bare = source.replace(before, "")
        assert ChatFormat.of(ChatTemplate(bare)).think == think


def test_results_of_tools_go_into_the_message_that_called_them():
    """Calls wherever they are; a result without a call keeps its own name."""

    def asked(text):
        return {"role": "user", "content": text}

    def said(text):
        return {"role": "assistant", "content": text}

    def result(content, name=""):
        return {"role": "tool", "content": content, "tool_call_id": name}

    one, two = ([{"function": {"name": name}}] for name in ("f", "g"))
    calling = {"role": "assistant", "content": "wait"}
    given = [
        asked("1"), said("yes"), asked("2"),
        calling | {"tool_calls": one}, result('{"a": 1}'), result("plain", "id"), said("it is 1"),
        asked("3"), calling | {"tool_calls": two}, asked("4"),
        calling | {"tool_calls": two}, result("5"), calling | {"tool_calls": one}, said("last"),
    ]  # fmt: skip
    results = [{"name": "f", "response": {"a": 1}}, {"name": "id", "response": "plain"}]
    assert _joined([dict(message) for message in given]) == [
        asked("1"), said("yes"), asked("2"),
        {"role": "assistant", "tool_calls": one, "tool_responses": results, "content": "it is 1"},
        asked("3"), {"role": "assistant", "tool_calls": two}, asked("4"),
        {"role": "assistant", "tool_calls": two,
         "tool_responses": [{"name": "g", "response": 5}]},
        {"role": "assistant", "tool_calls": one, "content": "last"},
    ]  # fmt: skip


def test_a_date_has_a_format_of_no_more_than_a_hundred_characters():
    assert _strftime_now("x" * 100) == "x" * 100
    for text in ("x" * 101, "%9999d"):
        with pytest.raises(TemplateError, match="strftime_now of"):
            _strftime_now(text)


@pytest.mark.parametrize("n", [0, 3, 4])
def test_a_map_that_is_cut_off_is_refused(n):
    with pytest.raises(ValueError, match=f"precompiled_charsmap of {n} bytes"):
        CharacterMap(b"\4\0\0\0"[:n])


CALL_OF_MARKS = CALL_FORMATS[2]


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("rest", ["</tool_call>", " and more", ""])
def test_a_mark_in_what_began_like_a_call_without_one_is_found_in_any_pieces(n, rest):
    """How much of it is read before it fails depends on the pieces."""
    source = '{"n": "<tool_call>\n{"name": "f", "arguments": {}}' + rest
    found = []
    for size in (n, len(source)):
        parser = OutputParser(
            ChatFormat(("", ""), tools=CALL_OF_MARKS), tools=CALL_TOOLS, new_id=lambda: "id"
        )
        parts = [source[i : i + size] for i in range(0, len(source), size)]
        deltas = [delta for part in parts for delta in parser.push(part)]
        found.append(message_of([*deltas, *parser.finish()]))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["$filter", "@odata.type", "a/b", "x.y-z", "größe"])
def test_an_argument_written_as_in_python_may_have_a_name_that_python_does_not_take(name):
    assert syntax.python_calls(f"[f({name}='a', n=1)]") == [("f", {name: "a", "n": 1})]
