"""Texts that llama.cpp's grammars and schemas accept and reject, as its own tests have them.

The kinds of case are those of its grammar tests; texts are chosen here. Where tamis is wider than
llama.cpp (integers of more than 16 digits, left recursion) its answer stands in `WIDER`.
"""

import pytest
from grammars import fits, matcher

pytest.importorskip("llguidance")

from tamis.sampling.base import SamplerError
from tamis.sampling.grammar import compile_gbnf, compile_schema

SUM = 'root ::= sum\nsum ::= term ("+" term)*\nterm ::= digits\ndigits ::= [0-9]+'
FORMULA = r"""
root ::= formula
formula ::= term ws (("+" | "-") ws term)*
term ::= factor ws (("*" | "/") ws factor)*
factor ::= number | name | "(" formula ")" | call
number ::= [0-9]+
name ::= [a-zA-Z_] [a-zA-Z0-9_]*
call ::= name ws "(" (formula ("," ws formula)*)? ")"
ws ::= [ \t\n\r]?
"""
GRAMMARS = {
    "a sum": (SUM, ["7", "1+22+3"], ["", "+", "1+", "1+2+", "1a"]),
    "a space that may be missing, within recursion": (
        FORMULA,
        ["1", "x1+y2", "x + 10", "(a+b)*(c - d)", "f()", "f(g(x),h(y, z))", "1*2-3/4+5*(6-a)"],
        ["+", "f(,)", "f(x y)", "(a + b", "x + + y", "a * / b", "a)", "1 +"],
    ),
    "any character": ('root ::= .. "b" ..', ["aabcc", "🔵✅b❌🔵"], ["abcc", "aaabcc", "✅b✅"]),
    "none or more": ('root ::= "a"*', ["", "a", "a" * 60], ["b", "ab", "a" * 60 + "b"]),
    "one or more": ('root ::= "a"+', ["a", "a" * 60], ["", "b", "ab"]),
    "none or one": ('root ::= "a"?', ["", "a"], ["aa", "b"]),
    "counts within each other": (
        'root ::= ("#" [A-F0-9]{2} " "?){2,3}',
        ["#FF#00", "#FF #12 #AB ", "#0A#0B #0C"],
        ["", "#FF", "#FF #1", "#FF #12 #AB #00"],
    ),
    "at least": ("root ::= [ab]{3,}", ["aba", "abab"], ["", "ab", "abc"]),
    "at most": ("root ::= [ab]{0,2}", ["", "a", "bb"], ["aba"]),
    "none of a rule": ("root ::= a{0,0} b\na ::= a? b\nb ::= [b]", ["b"], ["bb", ""]),
    "one of a rule at most": ("root ::= a{0,1}\na ::= [(] a? [)]", ["", "(())"], ["()()"]),
    "repeated nothing": ("root ::= ( [x]* )*", ["", "x", "xx"], ["y", "xy"]),
    "sets": ('root ::= "a" | [bdx-z] | [^1-3]', ["a", "b", "y", "4", "c"], ["1", "3", ""]),
    "groups": ('root ::= ("a" | [b-d])+ ("!" | "?")', ["abd!", "c?"], ["!", "ae!"]),
}
WIDER = {
    "left recursion": ('root ::= "a" | root "b"', ["a", "abb"], ["b", ""]),
    "left recursion after nothing": (
        'root ::= x\nx ::= "a" | y "b"\ny ::= "c" | e x "d" | "e"\ne ::= "f" | ',
        ["a", "cb", "adb", "fadb"],
        ["ad", "c"],
    ),
}


def _wrong(found, yes, no):
    return [t for t in yes if not fits(found, t)] + [t for t in no if fits(found, t)]


@pytest.mark.parametrize("name", [*GRAMMARS, *WIDER])
def test_grammars(name):
    grammar, yes, no = (GRAMMARS | WIDER)[name]
    assert _wrong(matcher(compile_gbnf(grammar).text), yes, no) == []


@pytest.mark.parametrize(
    "grammar",
    [
        'rot ::= "a"',
        "root ::= a\nb ::= [0-9]",
        'root ::= "a"{,}"',
        'root ::= "a"{,10}"',
        'root ::= "a"{5000}',
        'root ::= "a"{5000,}',
        'root ::= "a"{5000,6000}',
    ],
)
def test_what_is_no_grammar_there_is_none_here(grammar):
    with pytest.raises(SamplerError, match="grammar"):
        compile_gbnf(grammar)


INT, TEXT = {"type": "integer"}, {"type": "string"}
SHOP = {
    "properties": {"b": TEXT, "a": TEXT, "d": TEXT, "c": TEXT},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SCHEMAS = [
    (INT | {"minimum": 0}, ["0", "10", "12"], ["-1", "00", "01", "-0"]),
    (INT | {"minimum": 2}, ["2", "10", "1234567890000000"], ["0", "1", "-100", "02"]),
    (INT | {"minimum": 456}, ["456", "460", "4560"], ["455", "356", "50", "050", "-456"]),
    (INT | {"minimum": -123}, ["-123", "-1", "0", "2345"], ["-124", "-1234"]),
    (INT | {"maximum": 9999}, ["-99999", "0", "9999"], ["10000", "99991"]),
    (INT | {"maximum": -9999}, ["-10000", "-9999"], ["-9998", "0", "9999"]),
    (INT | {"minimum": 5, "maximum": 30}, ["5", "10", "30"], ["05", "4", "31", "123"]),
    (INT | {"minimum": -1, "maximum": 1}, ["-1", "0", "1"], ["-11", "-2", "2", "10"]),
    (INT | {"minimum": -123, "maximum": 42}, ["-123", "-13", "0", "39"], ["-0123", "-200", "43"]),
    (
        INT | {"exclusiveMinimum": 0, "maximum": 900719925474091},
        ["1", "900719925474091"],
        ["0", "900719925474092", "9007199254740910"],
    ),
    ({}, ["{}", '{"a": "b"}', "[]", "null", '""', "true"], ["", '{"a"}', "a"]),
    (
        {"items": [{"format": "date"}, {"format": "uuid"}, {"format": "time"}]},
        ['["2012-04-23", "12345678-1234-1234-1234-1234567890ab", "18:25:43.511Z"]'],
        ['["a", "b"]', '["12345678-1234-1234-1234-1234567890ab"]'],
    ),
    (TEXT | {"minLength": 3}, ['"abc"', '"abcd"'], ['""', '"ab"', "{}"]),
    (TEXT | {"minLength": 1, "maxLength": 4}, ['"a"', '"abcd"'], ['""', '"abcde"']),
    ({"type": "boolean"}, ["true", "false"], ['"true"', "True", "FALSE"]),
    (
        {"enum": ["red", None, 42, ["a"]]},
        ['"red"', "null", "42", '["a"]'],
        ["420", "true", "red", ""],
    ),
    (
        {"pattern": r"^a\^\$\.\[\]\(\)\|\{\}\*\+\?b$"},
        ['"a^$.[]()|{}*+?b"'],
        ['"ab"'],
    ),
    ({"pattern": "^[a-zA-Z0-9_-]*$"}, ['""', '"He_llo-12"'], ['"!"', '"a b"']),
    (
        {"type": ["array", "null"], "items": TEXT},
        ["null", "[]", '["1", "2"]'],
        ["", "[1]", '"a"', '["a", 2]'],
    ),
    (
        {"items": {"type": ["number", "integer"]}, "minItems": 2, "maxItems": 3},
        ["[1, 2]", "[1.5, 2, 3]"],
        ["[1]", "[1, 2, 3, 4]", "1"],
    ),
    (
        {"properties": {"a": INT}, "additionalProperties": True},
        ['{"a": 42}', '{"c": ""}', '{"a": 42, "c": ""}', '{"a_": ""}'],
        ["", '{"a": ""}'],
    ),
    (
        SHOP,
        ['{"b": "x", "a": "y"}', '{"b":"x","a":"y","d":"z"}', '{"b":"","a":"","d":"","c":""}'],
        ['{"a": "x", "b": "y"}', '{"b": ""}', '{"b":"","a":"","c":"","d":""}'],
    ),
]


@pytest.mark.parametrize(("schema", "yes", "no"), SCHEMAS, ids=[str(s)[:60] for s, _, _ in SCHEMAS])
def test_schemas(schema, yes, no):
    assert _wrong(matcher(compile_schema(schema).text), yes, no) == []


@pytest.mark.parametrize(
    "schema", [{"type": "kaboom"}, {"type": 123}, {"type": "string", "pattern": "^(a$"}]
)
def test_what_is_no_schema_there_is_none_here(schema):
    with pytest.raises(SamplerError, match="JSON schema"):
        compile_schema(schema)
