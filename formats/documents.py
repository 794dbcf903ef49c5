"""Files as text: plain text and Markdown as they are, HTML and PDF as what a reader sees of them.

Headings come out as Markdown writes them, so that later a long text can be cut where it has
sections. What is no text is refused; nothing is left out silently.
"""

import codecs
import hashlib
import io
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

_HTML_NAMES = {".html", ".htm", ".xhtml"}
_HTML_START = re.compile(
    r"\s*+(?:<\?xml[^>]*+>\s*+)?+(?:<!--(?:(?!-->).)*+-->\s*+)*+<(?:!doctype\s+html|html)\b",
    re.IGNORECASE | re.DOTALL,
)
_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins as UTF-16's does
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_KNOWN_BINARY = (
    (b"PK\x03\x04", "a ZIP archive (docx, odt, epub are such)", "convert it to text or HTML"),
    (b"\xd0\xcf\x11\xe0", "an old Office file", "save it as text, HTML or PDF"),
    (b"{\\rtf", "RTF", "save it as text, HTML or PDF"),
    (b"\x1f\x8b", "gzip", "unpack it"),
    (b"GGUF", "a model", "give it with -m"),
    (b"\x89PNG", "an image", "make text of it with an OCR program"),
    (b"\xff\xd8\xff", "an image", "make text of it with an OCR program"),
)


class DocumentError(ValueError):
    """A file that no text can be made of; the message says what it is and what to do."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text to be read. name: for messages; kind: "text", "html" or "pdf"."""

    name: str
    text: str
    kind: str = "text"

    @property
    def digest(self) -> str:
        """64 hex digits of the text; what the file is called and was made of do not count."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


def read_document(name: str, data: bytes) -> Document:
    """The text of a file's bytes. Raises DocumentError, ImportError (PDF without its extra)."""
    if data.lstrip()[:5] == b"%PDF-":
        kind, text = "pdf", _pdf_text(name, data)
    else:
        text = _decode(name, data)
        html = Path(name).suffix.lower() in _HTML_NAMES or _HTML_START.match(text) is not None
        kind = "html" if html else "text"
        text = html_text(text) if html else text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise DocumentError(f"{name} has no text: expected at least a word; is it the right file?")
    return Document(name, text, kind)


def _decode(name: str, data: bytes) -> str:
    """The bytes as text: UTF-8, or what a byte order mark says."""
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            data, name_of = data[len(mark) :], encoding
            break
    else:
        name_of = "utf-8"
        for start, what, remedy in _KNOWN_BINARY:
            if data.startswith(start):
                raise DocumentError(f"{name} is {what}, expected text, HTML or PDF: {remedy} first")
        if b"\0" in data:
            raise DocumentError(
                f"{name} is binary (byte 0 at {data.index(0)}), expected text, HTML or PDF: "
                "convert it first"
            )
    try:
        return data.decode(name_of)
    except UnicodeDecodeError as error:
        raise DocumentError(
            f"{name} is not {name_of.upper()}: byte {data[error.start]:#04x} at {error.start}; "
            "convert it first, as with iconv -t UTF-8"
        ) from error


def _pdf_text(name: str, data: bytes) -> str:
    """The text of a PDF's pages, a blank line between them."""
    try:
        from pypdf import PdfReader
    except ImportError as error:
        raise ImportError(f'{name} is a PDF: pip install "tamis[pdf]"') from error
    try:
        reader = PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{name} is encrypted: save it without its password first")
        pages = [page.extract_text().strip() for page in reader.pages]
    except DocumentError:
        raise
    except Exception as error:
        # A damaged file meets pypdf's code in ways beyond its own errors.
        raise DocumentError(f"{name} is a damaged PDF ({error}): repair it first") from error
    if not any(pages):
        raise DocumentError(
            f"{name} has {len(pages)} pages and no text, so they are images: "
            "make text of them with an OCR program first"
        )
    return "\n\n".join(filter(None, pages))


def html_text(source: str) -> str:
    """What a reader sees of an HTML page: blocks as paragraphs, headings and lists as Markdown."""
    reader = _Reader()
    reader.feed(source)
    reader.close()
    return reader.text()


_HIDDEN = {"script", "style", "template"}
_HEADINGS = {f"h{n}": "#" * n + " " for n in range(1, 7)}
_BLOCK_NAMES = """address article aside blockquote body caption center dd details dialog div dl dt
fieldset figcaption figure footer form header hr html legend li main menu nav ol p pre section
summary table tbody tfoot thead title tr ul"""
_BLOCKS = {*_BLOCK_NAMES.split(), *_HEADINGS}
_CELLS = {"td", "th"}


class _Reader(HTMLParser):
    """Collects blocks of text. Of a head only the title is text; scripts and styles are none."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._blocks: list[str] = []
        self._line: list[str] = []  # of the block that is open
        self._start = ""  # what it begins with, such as "## "
        self._hidden: list[str] = []  # open tags whose content is not shown
        self._n_pre = 0

    def parse_marked_section(self, i: int, report: bool = True) -> int:
        """A `<![` that begins nothing known is a comment, as HTML has it."""
        try:
            return super().parse_marked_section(i, report)
        except AssertionError:
            return self.parse_bogus_comment(i)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _HIDDEN:
            self._hidden.append(tag)
        elif tag in _BLOCKS:
            self._end_block()
            self._start = _HEADINGS.get(tag, "- " if tag == "li" else "")
            self._n_pre += tag == "pre"
        elif tag == "br":
            self._line.append("\n")
        elif tag in _CELLS and any(part.strip() for part in self._line):
            self._line.append(" | ")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._hidden:
            del self._hidden[self._hidden.index(tag) :]
        elif tag in _BLOCKS:
            self._end_block()
            self._n_pre -= tag == "pre" and self._n_pre > 0

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._line.append(data if self._n_pre else re.sub(r"\s+", " ", data))

    def _end_block(self) -> None:
        text = "".join(self._line)
        if not self._n_pre:
            text = "\n".join(re.sub(r" +", " ", line).strip() for line in text.split("\n"))
        if text.strip():
            self._blocks.append(self._start + text.strip("\n"))
            self._start = ""
        self._line.clear()

    def text(self) -> str:
        """All blocks, a blank line between them; items of a list on lines of their own."""
        self._end_block()
        out, before = [], ""
        for block in self._blocks:
            listed = block.startswith("- ") and before.startswith("- ")
            out.append(("\n" if listed else "\n\n") * bool(before) + block)
            before = block
        return "".join(out)
