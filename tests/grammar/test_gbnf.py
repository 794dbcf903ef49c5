"""GBNF as llama.cpp documents it: which texts a grammar allows, and where a wrong one is wrong."""

import re
import time

import pytest
from grammars import fits, matcher

pytest.importorskip("llguidance")

from tamis.grammar.gbnf.parsing import parsed
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
    # ggml-org/llama.cpp#25156
    ('root ::= x\nx ::= "a"\n  | "b" # so\n\n  |\n  "c"\ny ::= x', ["a", "b", "c"], ["", "ab"]),
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


@pytest.mark.parametrize("n", [100, 101, 300])
def test_rules_that_lead_to_each_other_in_a_long_chain_are_a_grammar(n):
    # Expanded into one tree, more of them were too deep to be walked.
    chain = [f'r{i} ::= "{i % 10}" r{i + 1}\n' for i in range(n)]
    found = matcher(compile_gbnf(f'root ::= r0\n{"".join(chain)}r{n} ::= "."').text)
    text = "".join(str(i % 10) for i in range(n))
    assert fits(found, text + ".")
    assert not fits(found, text)


def _rules(n, text):
    return "root ::= r0\n" + "".join(f"r{i} ::= {text.format(i + 1)}\n" for i in range(n))


COSTLY = {
    "a repetition": ('root ::= " "{3000}', "at most 2000"),
    "in a repetition": ('root ::= ("a"{2000}){2000}', "part of its rule root has over 100000"),
    "in an alternative": ('root ::= "b" | ("a"{1000} "b"){2000}', "part of its rule root has"),
    "in a recursive rule": ('root ::= "a" | (root "b"{900}){900}', "part of its rule root has"),
    "rules that double": (_rules(40, "r{0} r{0}") + 'r40 ::= "x"', "part of its rule r"),
    "rules that double, no end": (_rules(40, "r{0} r{0}") + "r40 ::= r0", "no finite text"),
    "a chain of rules": (_rules(1700, 'r{0} "a"') + 'r1700 ::= "x"', "expected at most 1500"),
    "a chain of recursive rules": (_rules(1700, '"a" r{0} | r0') + 'r1700 ::= "x"', "most 1500"),
    "alternatives": ("root ::= " + " | ".join(f'"w{i}"' for i in range(99_000)), "at most 100000"),
    "a text": ('root ::= "' + "a" * 4_000_000 + '"', "at most 100000"),
    "a set": ("root ::= [" + "a" * 4_000_000 + "]", "at most 100000"),
    "sets": ("root ::= " + "[a]" * 1_300_000, "at most 100000"),
    "spaces": ("root ::= " + " " * 4_000_000, None),
    "comments": ("root ::= (" + "# x \n" * 800_000, "close the group"),
    "digits": ('root ::= "a"{' + "0" * 4_000_000 + "}", "at most 18 digits"),
    "a name": ("root ::= " + "a" * 4_000_000, "the name of a rule"),
}


@pytest.mark.parametrize("kind", COSTLY)
def test_a_grammar_that_would_take_long_is_refused_at_once(kind):
    """Each took 0.8 to 10 s of processor time, or ended the process by its stack."""
    text, message = COSTLY[kind]
    begin = time.process_time()
    if message is None:
        assert matcher(compile_gbnf(text).text)
    else:
        with pytest.raises(SamplerError, match=message):
            compile_gbnf(text)
    assert time.process_time() - begin < 1


def test_tokens_by_their_names_take_time_by_their_number():
    class Vocabulary:
        n_vocab, ends = 9, frozenset([1])

        def token(self, text):
            return 3

    begin = time.process_time()
    found = parsed("root ::= " + f"<{'a' * 40}>" * 50_000, Vocabulary())
    assert len(found["root"].parts) == 50_000
    assert time.process_time() - begin < 1


def test_thousands_of_words_are_one_terminal():
    """As one terminal for each they took over 8 s, and servers refuse what takes over 5."""
    text = compile_gbnf("root ::= " + " | ".join(f'"word{i}"' for i in range(3000))).text
    assert text.count("\n") == 2
    found = matcher(text)
    assert fits(found, "word2999")
    assert not fits(found, "word3000")


# A wrong grammar; the place, what is found there, what is expected, and words of the remedy.
WRONG = [
    ("root ::= a", "1, column 10", "'a'", "the name of a rule of this grammar", 'a ::= ..."'),
    ('root ::= "a', "1, column 12", "", "a quotation mark", "quotation mark within the text"),
    (
        'root ::= "b" |\n  [a',
        "2, column 5",
        "",
        "a bracket that ends the set begun at line 2, column 3",
        r"\]",
    ),
    ('root ::= "\\q"', "1, column 11", "'\\\\q\"'", "one of the escapes", "a backslash itself"),
    ('root ::= "\\u12"', "1, column 11", "'\\\\u12\"'", "4 hexadecimal digits", "zeros in front"),
    ('root ::= "\\UFF000000"', "1, column 11", "'\\\\UFF", "at most 10FFFF", "correct the digits"),
    ('root ::= ("a"', "1, column 14", "", "a symbol, | or )", "begins at line 1, column 10"),
    ("root ::= *", "1, column 10", "'*'", "a symbol that * repeats", "before it"),
    ('root ::= "a"{x}', "1, column 14", "'x}'", "a number", "{m,n}"),
    ('root ::= "a"{1', "1, column 15", "", "} after the number", "{m,n}"),
    ('root ::= "a"{1,2', "1, column 17", "", "} after the number", "{m,n}"),
    ('root ::= "a"{3,1}', "1, column 13", "'{3,1}'", "m up to n", "repeat a group"),
    ('root ::= "a" ) "b"', "1, column 14", "') \"b\"'", "the end of the line", "remove the )"),
    ('root ::= "a" $', "1, column 14", "'$'", "the end of the line", "comments begin with"),
    ('root := "a"', "1, column 6", "':= \"a\"'", "::= after the rule's name root", "next line"),
    ('root ::= "a"\n\n= "b"', "3, column 1", "'= \"b\"'", "the name of a rule", "digits"),
    ('root ::= "a"\n ("b")', "2, column 2", "'(\"b\")'", "the name of a rule", "or before |"),
    ("root ::= !a", "1, column 11", "'a'", "< after !", "!<[id]>"),
    ("root ::= <a", "1, column 12", "", "> after the token begun at line 1, column 10", "<text>"),
    ("root ::= <[7", "1, column 13", "", "]> after the number of a token", "<[id]>"),
    ("root ::= <[a]>", "1, column 12", "'a]>'", "a number", "<text>"),
    ("root ::= <end>", "1, column 10", "'<end>'", "without a vocabulary", "tokenizer"),
    ("root ::= " + "(" * 500, "1, column 110", "'((((", "at most 100 groups", "of its own"),
]


@pytest.mark.parametrize(
    ("grammar", "place", "found", "expected", "remedy"), WRONG, ids=[case[0][:30] for case in WRONG]
)
def test_what_is_wrong_is_named_with_its_place_and_a_remedy(
    grammar, place, found, expected, remedy
):
    with pytest.raises(SamplerError) as caught:
        compile_gbnf(grammar)
    text = str(caught.value)
    parts = re.fullmatch(r"grammar: line (\d.*?): found (.*), expected (.*?): (.*)", text)
    assert parts, text
    assert parts[1] == place
    assert parts[2].startswith(found or "the end of the grammar")
    assert expected in parts[3]
    assert remedy in parts[4]


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('rule ::= "a"', r"its rules are rule, expected one named root: define one"),
        ('root ::= "a" root', r"no finite text matches its rule root, expected one: give each"),
    ],
)
def test_what_is_wrong_nowhere_in_particular_has_a_remedy_too(grammar, why):
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
    with pytest.raises(
        SamplerError, match=r"line 1, column 10: found '<none>', expected one token"
    ):
        compile_gbnf("root ::= <none>", tokenizer)
    with pytest.raises(
        SamplerError, match=r"column 12: found '11]>', expected a token's id, 0 to 10"
    ):
        compile_gbnf("root ::= <[11]>", tokenizer)
