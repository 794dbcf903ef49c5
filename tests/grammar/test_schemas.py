"""JSON schemas as grammars: what each keyword allows, alone and together with others."""

import json
import time

import pytest
from grammars import fits, matcher, written

pytest.importorskip("llguidance")

from tamis.grammar.schema.compiled import compiled_schema
from tamis.sampling.base import SamplerError
from tamis.sampling.grammar import compile_schema

INT, TEXT = {"type": "integer"}, {"type": "string"}


def obj(*required, **properties):
    return {"type": "object", "properties": properties, "required": list(required or properties)}


TAGGED = [obj(kind={"const": name}, **{name: INT}) for name in "ab"]
ACCEPTED = [  # schema, texts that it allows, texts that it does not
    ({"allOf": [obj(a=INT), obj(b=INT)]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"b":2,"a":1}']),
    (
        {**obj(c=INT), "allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": obj(a=INT)}},
        ['{"c":1,"a":1}'],
        ['{"c":1}', '{"c":1,"a":1,"d":1}'],
    ),
    (
        {**obj(a=INT), "anyOf": [obj(b=INT), obj(c=TEXT)]},
        ['{"a":1,"b":1}', '{"a":1,"c":""}'],
        ['{"a":1}', '{"a":1,"b":""}'],
    ),
    (
        {"$ref": "#/$defs/A", "required": ["b"], "$defs": {"A": {"properties": {"a": INT}}}},
        ['{"a":1,"b":[]}', '{"b":0}'],
        ['{"a":1}', "1"],
    ),
    ({**obj(a=INT), "required": ["a", "x"]}, ['{"a":1,"x":null}'], ['{"a":1}']),
    (
        {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": INT},
        ['{"xa":1}', "{}"],
        ['{"a":1}', '{"xa":""}'],
    ),
    (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
        ['{"a":1}', '{"a":1,"b":2}', "{}"],
        ['{"c":1}', '{"a":1,"a":1}'],
    ),
    (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "minItems": 1},
        ['["b","a"]', '["a"]'],
        ['["a","a"]', "[]"],
    ),
    ({"type": "array", "items": INT, "contains": {"const": 7}}, ["[7]", "[1,7,2]"], ["[]", "[1]"]),
    (
        {
            "type": "array",
            "items": INT,
            "contains": {"const": 7},
            "minContains": 0,
            "maxContains": 1,
        },
        ["[]", "[1,7]"],
        ["[7,1,7]"],
    ),
    ({"not": {"type": ["string", "null"]}}, ["1", "[]", "true"], ['""', "null"]),
    ({"type": "string", "not": {"enum": ["a", "b"]}}, ['"c"', '"ab"'], ['"a"']),
    ({"type": "integer", "not": {"minimum": 3, "maximum": 5}}, ["2", "6", "-9"], ["3", "4", "5"]),
    (
        {**obj(a=INT), "not": {"required": ["b"]}, "additionalProperties": INT},
        ['{"a":1,"c":1}'],
        ['{"a":1,"b":1}'],
    ),
    (
        {"oneOf": [{"type": "number", "multipleOf": 1}, {"type": "number", "minimum": 2}]},
        ["1", "2.5"],
        [],
    ),
    (
        {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]},
        ["2", "6"],
        ["3", "4", "5"],
    ),
    ({"oneOf": TAGGED}, ['{"kind":"a","a":1}', '{"kind":"b","b":1}'], ['{"kind":"a","b":1}']),
    (
        {
            **obj("k", k={"enum": [1, 2]}, v=TEXT),
            "if": {"properties": {"k": {"const": 1}}},
            "then": {"required": ["v"]},
            "else": {"properties": {"v": False}},
        },
        ['{"k":1,"v":""}', '{"k":2}'],
        ['{"k":1}', '{"k":2,"v":""}'],
    ),
    (
        {**obj("a", a=INT, b=INT, c=INT), "dependentRequired": {"b": ["c"]}},
        ['{"a":1}', '{"a":1,"b":1,"c":1}', '{"a":1,"c":1}'],
        ['{"a":1,"b":1}'],
    ),
    (
        {
            **obj("a", a=INT),
            "dependentSchemas": {"a": {"properties": {"b": TEXT}, "required": ["b"]}},
        },
        ['{"a":1,"b":""}'],
        ['{"a":1}', '{"a":1,"b":1}'],
    ),
    (
        {
            "allOf": [{"properties": {"a": INT}}],
            "properties": {"b": INT},
            "type": "object",
            "unevaluatedProperties": False,
        },
        ['{"b":1}', '{"a":1,"b":1}'],
        ['{"b":1,"c":1}'],
    ),
    ({"prefixItems": [INT], "unevaluatedItems": TEXT}, ['[1,""]', "[]"], ["[1,1]"]),
    ({"prefixItems": [INT, TEXT], "items": False, "minItems": 2}, ['[1,""]'], ["[1]", '[1,"",1]']),
    (True, ["1", "{}"], ["{"]),
    (
        {**obj(), "minProperties": 1, "properties": {"a": INT, "b": INT}, "required": []},
        ['{"a":1}', '{"b":1}', '{"a":1,"b":1}'],
        ["{}"],
    ),
    (
        {**obj(), "maxProperties": 1, "properties": {"a": INT, "b": INT}, "required": []},
        ['{"a":1}', "{}"],
        ['{"a":1,"b":1}'],
    ),
    (
        {
            "type": "object",
            "patternProperties": {"^a": INT, "z$": TEXT},
            "additionalProperties": False,
        },
        ['{"ab":1,"bz":""}'],
        ['{"az":1}', '{"az":""}', '{"c":1}'],
    ),
    (
        {"type": "integer", "minimum": -(10**30), "maximum": 10**25},
        [str(10**25)],
        [str(10**25 + 1)],
    ),
    ({"type": "number", "exclusiveMinimum": 1.1}, ["1.2"], ["1.1", "1"]),
    ({"type": "integer", "multipleOf": 7, "minimum": 8}, ["14", "21"], ["7", "15"]),
    ({"const": {"a": [1, "x"]}}, ['{"a":[1,"x"]}'], ['{"a":[1]}', "{}"]),
    ({"enum": [1, "1", None, [1]]}, ["1", '"1"', "null", "[1]"], ["2", "[2]"]),
    (
        {
            "$ref": "#tree",
            "$defs": {"T": {"$anchor": "tree", "properties": {"up": {"$ref": "#tree"}}}},
        },
        ['{"up":{"up":{}}}', "{}"],
        ['{"up":1}'],
    ),
    (
        {"$id": "http://x.y/r", "$ref": "part", "$defs": {"p": {"$id": "part", **INT}}},
        ["1"],
        ['""'],
    ),
    (
        {"type": "object", "properties": {"a": INT}, "additionalProperties": TEXT},
        ['{"a":1,"b":""}'],
        ['{"a":""}', '{"\\u0061":""}'],
    ),
    ({"items": [INT, TEXT], "additionalItems": False}, ['[1,""]'], ['["",1]', '[1,"",1]']),
    (
        {"type": "string", "pattern": "^(?=.*[A-Z])(?!.*x).{3,}$"},
        ['"abC"'],
        ['"abc"', '"xAb"', '"A"'],
    ),
    ({"type": "string", "pattern": r"^a\/\d{2,}[\w\-]$"}, ['"a/12b"', '"a/12-"'], ['"a/1b"']),
    ({"type": "string", "pattern": '^"\\\\$'}, ['"\\"\\\\"'], ['"x"']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"é😀\\n"'], ['"a"', '"abcd"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"0000-01-01"']),
    ({"type": "string", "format": "uuid4"}, ['"x"'], ["1"]),
    # Go writes the lists and maps that it does not have as null.
    (
        {"type": "object", "properties": {"a": INT | {"enum": None}}, "required": None},
        ['{"a":1}', "{}"],
        ['{"a":""}'],
    ),
    ({"type": "object", "properties": None, "required": None, "$defs": None}, ["{}"], ["1"]),
    ({"type": "array", "items": None, "anyOf": None, "minItems": 1}, ["[1]"], ["[]"]),
    ({"$ref": "#/x/T", "x": {"T": {"type": None, "allOf": None, "const": None}}}, ["null"], ["1"]),
]


@pytest.mark.parametrize(("schema", "yes", "no"), ACCEPTED, ids=lambda v: json.dumps(v)[:60])
def test_a_schema_allows_what_it_says_and_nothing_else(schema, yes, no):
    found = matcher(compile_schema(schema).text)
    assert [text for text in yes if not fits(found, text)] == []
    assert [text for text in no if fits(found, text)] == []


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (obj(a={"type": "string", "minLength": 3, "maxLength": 2}), "#/properties/a"),
        ({"allOf": [obj(a=INT), obj(a=TEXT)]}, "#/allOf/0/properties/a"),
        (obj(t={"$ref": "#"}), "#/properties/t"),
        (obj(a={"type": "string", "pattern": "^a$", "minLength": 2}), "#/properties/a"),
        (obj(a={"$ref": "#/$defs/B"}), "#/properties/a"),
        (obj(a={"type": "strange"}), "#/properties/a"),
        (obj(a={"type": "string", "pattern": "("}), "#/properties/a"),
        (obj(a={"items": 3}), "#/properties/a/items"),
        ({"allOf": [{"$ref": "#/allOf/1"}, {"$ref": "#/allOf/0"}]}, "#/allOf"),
        (obj(a={"minimum": "1"}), "#/properties/a"),
        (obj(a=None), "#/properties/a"),  # null is no schema
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_place(schema, place):
    with pytest.raises(SamplerError, match="JSON schema") as error:
        compile_schema(schema)
    assert place in str(error.value)


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"type": "array", "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
        ({"type": "array", "items": INT, "minItems": 1, "maxItems": 1}, ["[1]"], ["[]", "[1,2]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "array", "prefixItems": [INT], "maxItems": 1}, ["[]", "[1]"], ["[1,2]"]),
        ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":1}']),
        (
            {"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 1},
            ['{"a":1}'],
            ["{}", '{"a":1,"b":1}'],
        ),
        ({"type": "array", "items": INT, "uniqueItems": True, "maxItems": 1}, ["[1]"], ["[1,1]"]),
        ({"type": "string", "maxLength": 1}, ['""', '"a"'], ['"ab"']),
    ],
)
def test_one_at_the_most_is_a_limit_like_others(schema, yes, no):
    found = matcher(compile_schema(schema).text)
    assert [text for text in yes if not fits(found, text)] == []
    assert [text for text in no if fits(found, text)] == []


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (  # of JSON Schema's suite: what oneOf and contains exclude makes terminals meet
            {
                "prefixItems": [{"const": "foo"}],
                "oneOf": [
                    {"prefixItems": [True, {"const": "bar"}]},
                    {"prefixItems": [True, {"const": "baz"}]},
                ],
                "unevaluatedItems": False,
            },
            ['["foo","bar"]'],
            ['["foo","bar",42]'],
        ),
        (
            {
                "if": {"contains": {"const": "a"}},
                "then": {
                    "if": {"contains": {"const": "b"}},
                    "then": {"if": {"contains": {"const": "c"}}},
                },
                "unevaluatedItems": False,
            },
            ["[]", '["a","a"]', '["a","b","a"]', '["c","a","b"]'],
            ['["b"]', '["c","c"]', '["a","c"]'],
        ),
    ],
)
def test_terminals_that_meet_are_named(schema, yes, no):
    found = matcher(compiled_schema(schema, " ?", close=False).text)
    assert [text for text in yes if not fits(found, text)] == []
    assert [text for text in no if fits(found, text)] == []


@pytest.mark.parametrize(
    ("schema", "left_out", "text"),
    [
        ({"type": "array", "items": TEXT, "uniqueItems": True}, "#/uniqueItems", '["a"]'),
        (obj(a={"type": "string", "pattern": r"(a)\1"}), "#/properties/a/pattern", '{"a":"x"}'),
        ({"type": "string", "pattern": r"^\bab\b$"}, "#/pattern", '"x"'),
        # 52 bytes that took 5 s of processor time and 600 MB
        ({"type": "string", "pattern": "^(a{1000}){1000}$"}, "#/pattern", '"x"'),
        ({"type": "string", "pattern": "(?=a)" * 100_000}, "#/pattern", '"x"'),
        ({"type": "string", "pattern": "^(b|(a{1000}c){1000})$"}, "#/pattern", '"x"'),
        ({"not": {"type": "integer", "multipleOf": 2}}, "#/not", "1"),
        ({"type": "string", "format": "iri"}, "#/format", '"x"'),
    ],
)
def test_what_is_not_enforced_is_named(schema, left_out, text):
    found = compile_schema(schema)
    assert found.left_out == (left_out,)
    assert fits(matcher(found.text), text)


FLOAT32 = 3.4028234663852886e38
LONG = f"34028234663852886{'0' * 22}"  # as its text says


@pytest.mark.parametrize(
    ("limits", "yes", "no"),
    [
        (
            {"minimum": -FLOAT32, "maximum": FLOAT32},
            ["0", "-1.5", "1000000000000000.25", "-98765432109876543210.5", LONG, f"-{LONG}"],
            [f"{int(LONG) + 1}", f"-{LONG}.5", "1e39", f"{LONG}0"],
        ),
        (
            {"exclusiveMinimum": 1e-45, "maximum": 1e300},
            ["0.1", "5", "9" * 300],
            ["0", "-1", "9" * 301],
        ),
        (
            {"exclusiveMinimum": 1e25},
            [f"1{'0' * 24}1", f"2{'0' * 25}.5"],
            [f"1{'0' * 25}", "5", "-1"],
        ),
        ({"maximum": -1e25}, [f"-1{'0' * 25}", f"-2{'0' * 25}.5"], ["0", "-5", f"-{'9' * 25}"]),
    ],
)
def test_ranges_of_numbers_as_wide_as_a_type_of_theirs_are_enforced(limits, yes, no):
    """Programs write the ends of float32 and float64 for numbers without limits."""
    found = compile_schema({"type": "number"} | limits)
    assert found.left_out == ()
    grammar = matcher(found.text)
    assert [text for text in yes if not fits(grammar, text)] == []
    assert [text for text in no if fits(grammar, text)] == []


@pytest.mark.parametrize("schema", [{}, {"type": "number"}, {"type": ["integer", "null"]}])
def test_a_number_has_an_end(schema):
    """vllm-project/vllm#52011: models wrote digits until the limit of tokens."""
    grammar = matcher(compile_schema(schema).text)
    assert fits(grammar, "9" * 40)
    assert not fits(grammar, "9" * 41)
    if schema.get("type") in (None, "number"):
        assert fits(grammar, f"0.{'0' * 39}1e-99")
        assert not fits(grammar, f"1.{'0' * 41}")


def test_every_limit_that_is_left_out_is_named():
    found = compile_schema({"type": "number", "minimum": 5e-324, "maximum": 1})
    assert found.left_out == ("#/minimum", "#/maximum")


def wide(n):
    return {"allOf": [{"anyOf": [obj(**{f"a{i}": INT}), obj(**{f"b{i}": INT})]} for i in range(n)]}


def cycle(n):
    links = {f"d{i}": {"$ref": f"#/$defs/d{(i + 1) % n}"} for i in range(n)}
    return {"$ref": "#/$defs/d0", "$defs": links}


def nested(n, key):
    found: dict = {"type": "integer"}
    for _ in range(n):
        found = {key: [found, found]} if key == "allOf" else {key: found}
    return found


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (wide(24), "alternatives"),
        (cycle(5000), "refers to itself"),
        (nested(150, "not"), "combined"),
        (nested(900, "items"), "nested too deeply"),
        ({"allOf": [{"$ref": "#"}]}, "refers to itself"),
        ({"prefixItems": [INT] * 5000}, "prefixItems"),
    ],
    ids=["product", "cycle", "not", "items", "itself", "prefix"],
)
def test_hostile_schemas_are_refused_soon_with_the_reason(schema, why):
    start = time.process_time()
    with pytest.raises(SamplerError, match=why):
        compile_schema(schema)
    assert time.process_time() - start < 20  # a second, where others do not run beside it


def test_random_texts_of_a_schema_are_its_instances():
    for schema in ({"oneOf": TAGGED}, {**obj(a=TEXT, b={"type": "array", "items": INT})}):
        found = matcher(compile_schema(schema).text)
        texts = [written(found, seed) for seed in range(10)]
        values = [json.loads(text) for text in texts if text is not None]
        assert values
        assert all(isinstance(value, dict) and len(value) == 2 for value in values)


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        (
            TEXT | {"pattern": r"^https:\/\/(m\.)?shop\.org\/\w+$"},
            ['"https://shop.org/ab1"', '"https://m.shop.org/x"'],
            ['"http://shop.org/a"'],
        ),
        (TEXT | {"pattern": r"^[a-z\/]+$"}, ['"a/b"'], ['"A"']),
        (TEXT | {"pattern": r"^(tmp-)?\d{4,}$"}, ['"1234"', '"tmp-99999"'], ['"123"', '"tmp-"']),
        (TEXT | {"pattern": r"^[\w-]+(\s\w+)?$"}, ['"a-b c"'], ['"a!"']),
        (
            TEXT | {"pattern": r"^\p{Lu}\p{Ll}+\p{Nd}$"},
            ['"Zürich7"', '"Éa٣"'],
            ['"zürich7"', '"Z7"'],
        ),
        (TEXT | {"pattern": r"^\P{L}$"}, ['"7"', '"🙂"'], ['"é"', '"東"']),
        (
            obj(t={"anyOf": [TEXT, obj(left={"$ref": "#/properties/t/anyOf/0"})]}),
            ['{"t":{"left":"x"}}', '{"t":"a"}'],
            ['{"t":{"left":1}}'],
        ),
    ],
)
def test_patterns_and_references_that_others_stumbled_over(schema, yes, no):
    found = matcher(compile_schema(schema).text)
    assert [text for text in yes if not fits(found, text)] == []
    assert [text for text in no if fits(found, text)] == []
