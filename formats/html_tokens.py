"""HTML as tags and texts, in time proportional to its length, whatever it contains.

The standard library's parser takes minutes for 100 KB of `<a `. This one follows the HTML
standard's tokenizer, except for what the text of a page does not need: attributes are skipped.
Incomplete markup at the end is text, so that nothing is left out.
"""

import re
from collections.abc import Iterator
from html import unescape
from typing import NamedTuple

RAW = ("script", "style")  # elements whose content has no tags
_NAME = re.compile(r"[a-zA-Z][^\s/>]*+")
_NEXT = re.compile(r"[>=]")
_VALUE = re.compile(r"\s*+(?:(['\"])|[^\s>]*+)")
_RAW_END = {name: re.compile(rf"</{name}(?=[\s/>])", re.IGNORECASE) for name in RAW}
_LONG_NUMBER = re.compile(r"&#(?:[0-9]{8,}+|[xX][0-9a-fA-F]{8,}+);?")  # above all characters


class Token(NamedTuple):
    """A part of a page: "text", or the "start" or "end" of a tag with its name in lower case."""

    kind: str
    text: str


def tokens(source: str) -> Iterator[Token]:
    """The parts of a page in order; comments, declarations and attributes are left out."""
    return _Scanner(source).run()


def characters(text: str) -> str:
    """A text with its character references replaced."""
    return unescape(_LONG_NUMBER.sub("\ufffd", text)) if "&" in text else text


class _Scanner:
    """Scans a page from one mark to the next; a search that found nothing is not repeated."""

    def __init__(self, source: str) -> None:
        self._source, self._end = source, len(source)
        self._last = source.rfind(">")  # no tag ends after it
        self._last_of = {mark: source.rfind(mark) for mark in ("-->", "]]>")}
        self._last_quote = {quote: source.rfind(quote) for quote in "'\""}
        # Whether quotes are ignored: one tag had a quote that did not end before the page did.
        # Otherwise quotes would be searched for repeatedly, in quadratic time.
        self._unquoted = False

    def run(self) -> Iterator[Token]:
        source, at, begin = self._source, 0, 0
        while (at := source.find("<", at)) >= 0 and at <= self._last:
            found = self._markup(at)
            if found is None:  # not markup: a part of the text
                at += 1
                continue
            token, after = found
            if begin < at:
                yield Token("text", characters(source[begin:at]))
            at = begin = after
            if token is None:
                continue
            yield token
            if token.kind == "start" and token.text in RAW:
                at = begin = self._raw_end(token.text, at)
        if begin < self._end:
            yield Token("text", characters(source[begin:]))

    def _markup(self, at: int) -> tuple[Token | None, int] | None:
        """The token that begins at a `<`, and its end; None if it is text."""
        source = self._source
        if source.startswith("<!--", at):
            return None, self._comment_end(at + 4)
        if source.startswith("<![CDATA[", at):
            return None, self._behind("]]>", at)
        if source.startswith(("<!", "<?"), at):
            return None, source.find(">", at) + 1
        closes = source.startswith("</", at)
        name = _NAME.match(source, at + 1 + closes)
        if name is None:
            return (None, source.find(">", at) + 1) if closes else None
        end = self._tag_end(name.end())
        return Token("end" if closes else "start", name[0].lower()), end

    def _comment_end(self, at: int) -> int:
        """The end of a comment whose content begins at a position."""
        if self._source.startswith((">", "->"), at):
            return self._source.index(">", at) + 1
        return self._behind("-->", at)

    def _behind(self, mark: str, at: int) -> int:
        """The position after the next such mark, or after the next `>` if there is none.

        So less is left out.
        """
        found = mark if at <= self._last_of[mark] else ">"
        return self._source.index(found, at) + len(found)

    def _tag_end(self, at: int) -> int:
        """The position after the `>` that ends a tag, given the end of its name.

        The page has one.
        """
        source = self._source
        if self._unquoted:
            return source.index(">", at) + 1
        start = at
        while (found := _NEXT.search(source, at)) is not None:
            if found[0] == ">":
                return found.end()
            value = _VALUE.match(source, found.end())
            assert value is not None
            at, quote = value.end(), value[1]
            if quote is not None:
                at = source.find(quote, at) + 1 if at <= self._last_quote[quote] else 0
                if not at:
                    break
        self._unquoted = True
        return source.index(">", start) + 1

    def _raw_end(self, name: str, at: int) -> int:
        found = _RAW_END[name].search(self._source, at)
        return self._end if found is None else found.start()
