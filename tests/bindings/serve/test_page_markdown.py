"""The page's Markdown: what it makes of text, and that no text of a model takes it long."""

import pytest

from tamis.tools.page_markdown import PageMarkdown, available, shown

if not available():
    pytest.skip("there is no node", allow_module_level=True)

SECONDS = 1.0  # of processor time


@pytest.fixture(scope="module")
def page():
    found = PageMarkdown()
    yield found
    found.close()


def nested(tree):
    return max((nested(part) for part in tree if isinstance(part, list)), default=0) + 1


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a **b *c* d** e", ["a ", ["strong", "b ", ["em", "c"], " d"], " e"]),
        ("`x` ``y`z``", [["code", "x"], " ", ["code", "y`z"]]),
        ("x*y*z 2 * 3 * 4", ["x*y*z 2 * 3 * 4"]),
        ("*a* (*b c*)", [["em", "a"], " (", ["em", "b c"], ")"]),
        ("[a](https://b.c) [d](e) [f", [["a", "a"], " [d](e) [f"]),
        ("[a [b](http://c)", [["a", "a [b"]]),
        ("**a", ["**a"]),
        ("a ** b ** c", ["a ** b ** c"]),
        ("`a", ["`a"]),
    ],
)
def test_marks_within_a_line(page, text, tree):
    (paragraph,) = page.read(text)[0][1:]
    parts = [part for part in paragraph[1:] if part != ""]
    assert [_plain(part) for part in parts] == tree


def _plain(part):
    return part if isinstance(part, str) else [_plain(each) for each in part if each != ""]


def test_blocks(page):
    tree, _ = page.read(
        "# a\n\n> b\n> > c\n\n- d\n  - e\n- f\n\n1. g\n\n|h|i|\n|-|-|\n|j|k|\n\n---\n```\nl\n```"
    )
    assert [part[0] for part in tree[1:]] == ["h3", "blockquote", "ul", "ol", "table", "hr", "pre"]
    assert shown(tree) == "abcdefghijkl"


UNITS = """> [ ` * ** *a **a [a [a]( [a](http:b `` ``` `a <!-- ![ ]( | |a| - 1. # ~~~ [a](http:b_c)
>_ >- -_ ;> ;- ;1. ;| ;``` ;** ;[ *_ **_ [](  ]( )
*_a* **a*b *a** `a`` _- ** [[a]( -- - - *** _ ;_"""


@pytest.mark.parametrize("unit", UNITS.split())
@pytest.mark.parametrize("end", ["", "]", "](http:a", "*", "x"])
def test_no_text_takes_long_or_overflows_the_stack(page, unit, end):
    """8,000 `>` overflowed the stack, and 32,000 `[` took 3 s."""
    unit = unit.replace("_", " ").replace(";", "\n")
    text = unit * (100_000 // len(unit)) + end
    tree, seconds = page.read(text)
    assert seconds < SECONDS
    assert nested(tree) < 99


@pytest.mark.parametrize("mark", ["- ", "> ", "1. "])
def test_what_is_nested_deeply_is_shown(page, mark):
    lines = [f"{'  ' * i if mark != '> ' else mark * i}{mark}word{i}" for i in range(300)]
    tree, seconds = page.read("\n".join(lines))
    assert seconds < SECONDS
    assert all(f"word{i}" in shown(tree) for i in range(300))


def test_runs_of_backticks_of_all_lengths(page):
    tree, seconds = page.read(" ".join("`" * n for n in range(1, 600)))
    assert seconds < SECONDS
    assert nested(tree) < 9


def coloured(page, language, code):
    """The parts of a block of code, each with the letter of its colour before it, or with none."""
    (block,) = page.read(f"```{language}\n{code}\n```")[0][1:]
    parts = block[1][1:]
    return [part if isinstance(part, str) else part[1] for part in parts if part != ""]


@pytest.mark.parametrize(
    ("language", "code", "parts"),
    [
        ("python", "x = f'a' # b", ["x = ", "f'a'", " ", "# b"]),
        ("py", "if it's", ["if", " it's"]),
        ("sh", "n=${#a} # b", ["n=${#a} ", "# b"]),
        (
            "rust",
            "fn f<'a>(c: &'a str) { 'b' }",
            ["fn", " f<'a>(c: &'a ", "str", ") { ", "'b'", " }"],
        ),
        ("JS", "a = `b\nc` /* d */ + 0x1f", ["a = ", "`b\nc`", " ", "/* d */", " + ", "0x1f"]),
        ("sql", "SELECT a -- b", ["SELECT", " a ", "-- b"]),
        ("html", '<b c="d">it\'s</b>', ["<b", " c", '="d"', ">", "it's", "</b", ">"]),
        ("", "if a: pass # b", ["if a: pass # b"]),
        ("unknown", "'a'", ["'a'"]),
    ],
)
def test_code_is_coloured_by_its_language(page, language, code, parts):
    assert coloured(page, language, code) == parts


CODES = (
    """# a# a#" ' ` a' a" a` /* */ // "\\ '\\ -- <!-- <a =" """
    + "''' a''' \"\"\" a\"\"\" &'a 1a f'"
)


@pytest.mark.parametrize("unit", CODES.split())
@pytest.mark.parametrize("language", ["python", "js", "rust", "sql", "html"])
@pytest.mark.parametrize("end", ["", "'\"x"])
def test_no_code_takes_long_and_none_is_lost(page, language, unit, end):
    code = unit * (60_000 // len(unit)) + end
    tree, seconds = page.read(f"~~~{language}\n{code}\n~~~")
    assert seconds < SECONDS
    assert shown(tree) == code
