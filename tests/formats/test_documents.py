"""Files as text: what a reader sees of HTML and PDF, and a clear no to everything else."""

import sys
import time

import pytest
from small_pdf import pdf

from tamis.formats.documents import DocumentError, html_text, read_document


def test_text_and_markdown_stay_as_they_are_but_for_line_ends_and_byte_order_marks():
    text = "# Title\r\n\r\ngrüß <|im_end|> <b>\rend"
    expected = "# Title\n\ngrüß <|im_end|> <b>\nend"
    marks = {"utf-8": b"\xef\xbb\xbf", "utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}
    for encoding, mark in [("utf-8", b""), *marks.items()]:
        document = read_document("a.md", mark + text.encode(encoding))
        assert (document.text, document.kind) == (expected, "text")


def test_a_digest_is_of_the_text_alone():
    a, b = read_document("a.txt", b"x\r\ny"), read_document("b.md", b"x\ny")
    assert a.digest == b.digest
    assert a.digest != read_document("a.txt", b"x\ny ").digest


PAGE = """<!DOCTYPE html><html><head><title>A &amp; B</title><style>p { x: y }</style>
<script>var s = "<p>no</p>";</script></head>
<body><!-- no --><h1>One <em>two</em></h1><p>First   line<br>second&nbsp;line</p>
<ul><li>a</li><li>b<p>c</p></ul><pre>
  x = 1
    y</pre><table><tr><th>k</th><th>v</th></tr><tr><td>1</td><td></td></tr></table>
<noscript>shown</noscript> tail <template>no</template></body></html>"""


def test_html_is_what_a_reader_sees_of_it():
    assert html_text(PAGE) == (
        "A & B\n\n# One two\n\nFirst line\nsecond line\n\n- a\n- b\n\nc\n\n  x = 1\n    y\n\n"
        "k | v\n\n1 |\n\nshown tail"
    )


@pytest.mark.parametrize(("name", "data"), [("p.html", "<p>a"), ("p", " <!DOCTYPE HTML><p>a")])
def test_html_is_known_by_its_name_or_its_beginning(name, data):
    document = read_document(name, data.encode())
    assert (document.text, document.kind) == ("a", "html")


@pytest.mark.parametrize(
    "mark", ["<![x", "<![x>", "<![x[y]]>", "<![", "<![]>", "<![if x]>y<![endif]>"]
)
def test_a_marked_section_of_any_kind_is_a_comment(mark):
    text = html_text(f"<p>before</p>{mark}\n<p>after</p>")
    assert text.startswith("before")
    assert ">" not in mark or text.endswith("after")


def test_an_end_without_a_start_changes_nothing_that_follows():
    assert html_text("</pre><p>a   b</p><pre>c   d</pre><p>e   f") == "a b\n\nc   d\n\ne f"
    assert html_text("</script>a</style><p>b") == "a\n\nb"


@pytest.mark.parametrize("source", ["<p>a<p>b", "<title>a<p>b", "a<pre>b", "<h2>a<div>b", "a</p>b"])
def test_html_that_is_not_closed_loses_nothing(source):
    assert [c for c in html_text(source) if c in "ab"] == ["a", "b"]


def test_a_hostile_page_takes_no_longer_than_another():
    """The beginning of a page is looked at once; blocks are joined once."""
    assert read_document("x", b"<!-- a -->" * 10_000 + b"x").kind == "text"
    assert html_text("<p>a" * 50_000) == "\n\n".join("a" * 50_000)


UNITS = """<!-- < <a  <a_b=' <a_b=" <a_b='> & &# &a &#x1 <![CDATA[ <![CDATA[> <![ <? </ </a <script>
<style> <a_b= <a_b=c_ <!doctype_ <p><b> <li> <pre> <td> _<td> <script></ <template> ]]> --> ' <a/ <_
<template></style> <br> <!--> <!--- <a<b <h1> = <a=b=c= &lt &amp; <title> <p_a="<!--">"""


@pytest.mark.parametrize("unit", UNITS.split())
@pytest.mark.parametrize("end", ["", ">", "'>", '">'])
def test_a_page_takes_time_by_its_length(unit, end):
    """Each took seconds to minutes with the standard library's parser; a second is for the slow."""
    unit = unit.replace("_", " ")
    begin = time.process_time()
    html_text("<html>" + unit * (200_000 // len(unit)) + end)
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a<!-- <p>no --> b", "a b"),
        ("a<!-->b", "ab"),
        ("a<!--->b", "ab"),
        ("a<!-- open <p>b", "ab"),
        ("a < b and c > d", "a < b and c > d"),
        ("a <b", "a <b"),
        ("1 <2> 3", "1 <2> 3"),
        ("<a title='x > y'>z</a>", "z"),
        ('<a title="x > y" href=q/>z</a>', "z"),
        ("<a title = 'x>'  b=c>z", "z"),
        ("<a title='x>z", "z"),
        ("<P>A</P\n><DIV\tx>B", "A\n\nB"),
        ("a<script>if (a < b) '</p>'</SCRIPT >b", "ab"),
        ("a<style>p > b { }</style/>b", "ab"),
        ("a<script>open", "a"),
        ("<template><p>x<template>y</template>z</p>w", "z\n\nw"),
        ("a<![CDATA[x > y]]>b", "ab"),
        ("a<?php echo 1 ?>b", "ab"),
        ("a</3>b</>c", "abc"),
        (
            "&lt;p&gt; &amp;amp; &#65;&#x42; &#99999999999999999999; &nosuch;",
            "<p> &amp; AB \ufffd &nosuch;",
        ),
        ("&#" + "9" * 9999 + ";", "\ufffd"),
        ("&#x" + "f" * 9999, "\ufffd"),
    ],
)
def test_marks_are_read_as_browsers_read_them(source, text):
    assert html_text(source) == text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "x has no text: expected at least a word"),
        (b" \n\t\n", "x has no text"),
        (b"<html><body><script>1</script>", "x has no text"),
        (b"a\0b", "x is binary (byte 0 at 1), expected text, HTML or PDF"),
        (b"caf\xe9!", "x is not UTF-8: byte 0xe9 at 3; convert it first"),
        (b"\xff\xfea", "x is not UTF-16-LE: byte 0x61 at 0"),
        (b"PK\x03\x04rest", "x is a ZIP archive (docx, odt, epub are such), expected text"),
        (b"GGUF\3", "x is a model, expected text, HTML or PDF: give it with -m first"),
    ],
)
def test_what_is_no_text_is_refused_with_what_to_do(data, message):
    with pytest.raises(DocumentError) as error:
        read_document("x", data)
    assert str(error.value).startswith(message)


def test_the_pages_of_a_pdf_are_paragraphs():
    pytest.importorskip("pypdf")
    document = read_document("x.pdf", pdf("first page", "", "third"))
    assert (document.text, document.kind) == ("first page\n\nthird", "pdf")
    assert document.pages == (0, 12, 12)  # an empty page has the offset of the next one


def test_a_pdf_without_text_and_a_damaged_one_are_refused():
    pytest.importorskip("pypdf")
    with pytest.raises(DocumentError, match=r"2 pages and no text.*OCR"):
        read_document("x.pdf", pdf("", ""))
    with pytest.raises(DocumentError, match=r"x\.pdf is a damaged PDF"):
        read_document("x.pdf", b"%PDF-1.4\nnothing")


def test_a_pdf_without_the_extra_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(ImportError, match=r'pip install "tamis\[pdf\]"'):
        read_document("x.pdf", pdf("a"))
