"""GBNF as llama.cpp documents it: which texts a grammar allows, and where a wrong one is wrong."""

import pytest
from grammars import fits, matcher

pytest.importorskip("llguidance")

from tamis.sampling.base import SamplerError
from tamis.sampling.grammar import Grammar, compile_gbnf
from tamis.sampling.vocabulary import GrammarTokenizer

ARITHMETIC = r"""
root ::= (expr "=" term "\n")+   # lines
expr ::= term ([-+*/] term)*
term ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num ::= [0-9]+ ws
ws ::= [ \t\n]*
"""
ACCEPTED = [  # grammar, texts that it allows, texts that it does not
    (r'root ::= "\x41\u00e9\U0001F600"', ["Aé😀"], ["A"]),
    (r"root ::= [\U0001F600-\U0001F64F\x30-\x32]+", ["😀🙏02"], ["3"]),
    (r'root ::= "\[" [0-9\]\[] "\]" "\\" "\""', ['[1]\\"', '[]]\\"'], ["[1]"]),
    (r"root ::= [a-c\-]+", ["a-b"], ["d"]),
    (r"root ::= [^\-<]+", ["ab\n"], ["a-b"]),
    ('root ::= [a-z-] "x"', ["-x"], ["--"]),
    ('root ::= start\nstart ::= "s" Start\nStart ::= "S"', ["sS"], ["ss", "SS"]),
    ('root ::= ( # a comment with ) in it\n  "a" |\n  "b"\n)\n# last', ["a", "b"], ["ab"]),
    ('root ::= "ab"{2} "c"{1,} "d"{0,2} "e"{2,3}', ["ababcee", "ababccddeee"], ["abcee", "ababce"]),
    ('root ::= "a" |\n  "b"\n', ["a", "b"], [""]),
    ('root ::= "" | "a"', ["", "a"], ["aa"]),
    ("root ::= .{2}", ["é\n"], ["a"]),
    ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),
    ('root ::= [a-z]* "z" tail\ntail ::= "!" tail | "."', ["zz!.", "az."], ["a."]),
    ('root ::= key value\nkey ::= [a-z]+\nvalue ::= [a-z] value | "1"', ["ab1", "aab1"], ["a"]),
    (
        'root ::= ("a" | "ab") rest\nrest ::= "c" rest | "bc" rest | ";"',
        ["abc;", "abbc;", "ac;"],
        ["abb;"],
    ),
    (ARITHMETIC, ["42=1\n", "x1+(y*2)=z\n1=1\n"], ["x+=1\n", "x=y", "1=1"]),
    ('root ::= a{0,3}\na ::= "(" a ")" | "x"', ["", "x(x)", "((x))xx"], ["xxxx", "("]),
]


@pytest.mark.parametrize(("grammar", "yes", "no"), ACCEPTED, ids=[g[:40] for g, _, _ in ACCEPTED])
def test_a_grammar_allows_what_it_says_and_nothing_else(grammar, yes, no):
    found = matcher(compile_gbnf(grammar).text)
    assert [text for text in yes if not fits(found, text)] == []
    assert [text for text in no if fits(found, text)] == []


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('rule ::= "a"', "no rule named root"),
        ("root ::= a", "column 10 expected a rule, there is none named a"),
        ('root ::= "a', "quotation mark"),
        ('root ::= "\\q"', "escapes"),
        ('root ::= "\\u12"', "4 hexadecimal digits"),
        ('root ::= ("a"', r"expected \)"),
        ("root ::= *", "something before"),
        ('root ::= "a"{3,1}', "m up to n"),
        ('root ::= "a" ) "b"', "end of the line"),
        ('root := "a"', "::="),
        ('root ::= "a" root', "no text ends it"),
        ("root ::= <end>", "expected a model"),
        ("root ::= " + "(" * 500, "groups"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(grammar, why):
    with pytest.raises(SamplerError, match=why):
        compile_gbnf(grammar)


class Words:
    """Ten tokens: digits, of which 7 is the mark <t>, and an end."""

    bos, eos, eog = None, 10, frozenset([10])

    def encode(self, text, *, add_special=True, parse_special=False, compose=True):
        return [7] if text == "<t>" else [int(c) for c in text if c.isdigit()]

    def piece(self, token_id, *, special=False):
        return (b"<t>" if special else b"") if token_id == 7 else b"%d" % (token_id % 10)


@pytest.mark.parametrize("mark", ["<t>", "<[7]>"])
def test_tokens_are_named_by_text_and_number_and_may_be_excluded(mark):
    tokenizer = GrammarTokenizer(Words(), 11)
    text = compile_gbnf(f'root ::= {mark} rest {mark} "3"\nrest ::= !{mark}*', tokenizer).text

    def allowed(step):
        mask = step.mask()
        return [i for i in range(11) if mask[i // 8] >> (i % 8) & 1]

    step = Grammar(text, tokenizer)
    assert allowed(step) == [7]
    step.accept(7)
    assert allowed(step) == list(range(10))  # any other token, and the mark that ends it
    step.accept_all([1, 5, 7])
    assert allowed(step) == [3]
    with pytest.raises(SamplerError, match="no single token"):
        compile_gbnf("root ::= <none>", tokenizer)
    with pytest.raises(SamplerError, match="expected 0 to 10"):
        compile_gbnf("root ::= <[11]>", tokenizer)
