"""Files as text: plain text and Markdown unchanged, HTML and PDF as a reader sees them.

Headings become Markdown headings, so that a long text can later be cut at its sections. A file that
is not text is refused; nothing is left out silently.
"""

import codecs
import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

from tamis.formats.html_tokens import tokens

_HTML_NAMES = {".html", ".htm", ".xhtml"}
# The endings of documents, by which they are found in folders; a file named alone may have any.
ENDINGS = frozenset({".txt", ".text", ".md", ".markdown", ".rst", ".pdf", *_HTML_NAMES})
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
    """No text can be made of a file; the message says what it is and what to do."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text to be read. name: for messages; kind: "text", "html" or "pdf".

    pages: the offset in the text at which each page of a PDF begins; () for other kinds.
    """

    name: str
    text: str
    kind: str = "text"
    pages: tuple[int, ...] = ()

    @property
    def digest(self) -> str:
        """The 64 hex digits of the text's digest; the file's name and kind do not count."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()


def read_document(name: str, data: bytes) -> Document:
    """The text of a file's bytes. Raises DocumentError, ImportError (PDF without its extra)."""
    if data.lstrip()[:5] == b"%PDF-":
        pages = _pdf_pages(name, data)
        return Document(name, "\n\n".join(filter(None, pages)), "pdf", _starts(pages))
    text = _decode(name, data)
    html = Path(name).suffix.lower() in _HTML_NAMES or _HTML_START.match(text) is not None
    kind = "html" if html else "text"
    text = html_text(text) if html else text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise DocumentError(f"{name} has no text: expected at least a word; is it the right file?")
    return Document(name, text, kind)


def _decode(name: str, data: bytes) -> str:
    """The bytes as text: UTF-8, or the encoding of a byte order mark."""
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


def _starts(pages: list[str]) -> tuple[int, ...]:
    """The offset of each page in the whole text; an empty page has that of the next one."""
    starts, at = [], 0
    for page in pages:
        starts.append(at)
        at += len(page) + 2 if page else 0
    return tuple(starts)


def _pdf_pages(name: str, data: bytes) -> list[str]:
    """The text of each of a PDF's pages; with blank lines between they are the whole text."""
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
        # A damaged file raises more in pypdf than its own exceptions.
        raise DocumentError(f"{name} is a damaged PDF ({error}): repair it first") from error
    if not any(pages):
        raise DocumentError(
            f"{name} has {len(pages)} pages and no text, so they are images: "
            "make text of them with an OCR program first"
        )
    return pages


def html_text(source: str) -> str:
    """The visible text of an HTML page: blocks as paragraphs, headings and lists as Markdown."""
    reader = _Reader()
    for kind, text in tokens(source):
        if kind == "text":
            reader.data(text)
        elif kind == "start":
            reader.start(text)
        else:
            reader.end(text)
    return reader.text()


_HIDDEN = {"script", "style", "template"}
_HEADINGS = {f"h{n}": "#" * n + " " for n in range(1, 7)}
_BLOCK_NAMES = """address article aside blockquote body caption center dd details dialog div dl dt
fieldset figcaption figure footer form header hr html legend li main menu nav ol p pre section
summary table tbody tfoot thead title tr ul"""
_BLOCKS = {*_BLOCK_NAMES.split(), *_HEADINGS}
_CELLS = {"td", "th"}


class _Reader:
    """Collects blocks of text. Of a head only the title is kept; scripts and styles are dropped."""

    def __init__(self) -> None:
        self._blocks: list[str] = []
        self._line: list[str] = []  # of the open block
        self._has_text = False  # whether any part of it is more than spaces
        self._start = ""  # its prefix, such as "## "
        self._hidden: list[str] = []  # open tags whose content is not shown
        self._first: dict[str, int] = {}  # the index of the first tag of each name among them
        self._n_pre = 0

    def start(self, tag: str) -> None:
        """Open a tag."""
        if tag in _HIDDEN:
            self._first.setdefault(tag, len(self._hidden))
            self._hidden.append(tag)
        elif tag in _BLOCKS:
            self._end_block()
            self._start = _HEADINGS.get(tag, "- " if tag == "li" else "")
            self._n_pre += tag == "pre"
        elif tag == "br":
            self._line.append("\n")
        elif tag in _CELLS and self._has_text:
            self._line.append(" | ")

    def end(self, tag: str) -> None:
        """Close a tag, and all open tags within it."""
        if (first := self._first.get(tag)) is not None:
            del self._hidden[first:]
            self._first = {name: at for name, at in self._first.items() if at < first}
        elif tag in _BLOCKS:
            self._end_block()
            self._n_pre -= tag == "pre" and self._n_pre > 0

    def data(self, text: str) -> None:
        """Append text."""
        if not self._hidden:
            self._line.append(text if self._n_pre else re.sub(r"\s+", " ", text))
            self._has_text = self._has_text or not text.isspace()

    def _end_block(self) -> None:
        text = "".join(self._line)
        if not self._n_pre:
            text = "\n".join(re.sub(r" +", " ", line).strip() for line in text.split("\n"))
        if text.strip():
            self._blocks.append(self._start + text.strip("\n"))
            self._start = ""
        self._line.clear()
        self._has_text = False

    def text(self) -> str:
        """All blocks with blank lines between them; list items are on lines of their own."""
        self._end_block()
        out, before = [], ""
        for block in self._blocks:
            listed = block.startswith("- ") and before.startswith("- ")
            out.append(("\n" if listed else "\n\n") * bool(before) + block)
            before = block
        return "".join(out)
