"""Values that are written as they are, so that they may hold the marks of calls themselves.

A value may hold whole calls and arguments of its own notation. Their marks are paired: a value ends
at the first closing mark that belongs to none of them and after which its call can continue. If
there is none, something in the value only looks like a call or an argument: then it ends at the
first mark that could end it. Where several could, the reading is ambiguous. Each character is read
once, or twice where the first reading found no end.
"""

import json
import re
from collections.abc import Callable, Sequence

from tamis.text.calls.elements import attributes
from tamis.text.calls.format import ToolFormat
from tamis.text.calls.tape import MAX_NAME, Steps, Tape
from tamis.text.calls.values import is_value

_CDATA = "<![CDATA["
_COMPLETE = ("object", "array")  # kinds of values that say themselves where they end
_MAX_ENDS = 16  # ends that are tried of them


def is_key(key: str) -> bool:
    """Whether ``key`` can be that of an argument."""
    return 0 < len(key) <= MAX_NAME and not any(c in key for c in '<>"\n')


def _dropped(_text: str) -> None:
    """The tape keeps what is taken."""


class EnclosedValues:
    """Reads the values of one call off ``tape``, which keeps what is taken.

    ``openers`` are the marks before a call, ``outer`` those after its own end, if it stands within
    further marks. ``may_follow`` says whether an argument of a key can come next. ``is_closed``:
    the marks that end the call were taken with its last value; ``is_ambiguous``: a value has
    several possible ends.
    """

    def __init__(
        self,
        tape: Tape,
        format: ToolFormat,
        openers: Sequence[str],
        outer: Sequence[str],
        may_follow: Callable[[str], bool],
    ) -> None:
        self.is_closed = self.is_ambiguous = False
        self._tape, self._format, self._may_follow = tape, format, may_follow
        self._before, self._end = format.argument.before, next(iter(format.closers), "")
        self._openers, self._outer, self._call = openers, outer, openers[-1]
        self._pairs = True
        self._n_read = 0

    def read(
        self, kind: str = "", *, lenient: bool, is_cut: Callable[[], bool]
    ) -> Steps[str | None]:
        """Read a value and the mark after it; None if its end is not certain.

        If ``kind`` is an object or an array, the value must be complete. ``lenient``: any mark
        ends it. ``is_cut``: whether the answer was cut off, so that its end ends nothing.
        """
        tape, argument = self._tape, self._format.argument
        yield from tape.mark([argument.margin])
        closing, margin, start = argument.closing, argument.end_margin, tape.place
        has_cdata = argument.has_cdata and bool((yield from tape.mark([_CDATA])))
        if has_cdata:
            closing, margin, start = "]]>" + closing, "", tape.place

        def is_complete(end: int) -> bool:
            return kind not in _COMPLETE or self._is_complete(tape.between(start, end))

        if lenient:
            end = yield from self._any_end(closing)
        elif not self._pairs or kind in _COMPLETE:
            end = yield from self._first_end(closing, is_complete)
        elif has_cdata:
            end = yield from self._cdata_end(closing, is_cut)
        else:
            end = yield from self._paired_end(closing, is_cut)
        return None if end is None else tape.between(start, end).removesuffix(margin)

    def _is_complete(self, text: str) -> bool:
        """Whether a list or an object is complete; True once too many were read for it."""
        self._n_read += 1
        return self._n_read > _MAX_ENDS or is_value(text)

    def _any_end(self, closing: str) -> Steps[int | None]:
        mark = yield from self._tape.upto([closing, self._before, self._end], _dropped)
        if mark and mark != closing:
            self._tape.put_back(mark)
            return self._tape.place
        return self._tape.place - 1 if mark else None

    def _first_end(self, closing: str, is_complete: Callable[[int], bool]) -> Steps[int | None]:
        """The place of the first closing mark after which the call can continue."""
        while (yield from self._tape.upto([closing], _dropped)):
            end = self._tape.place - 1
            if (yield from self._continues()) and is_complete(end):
                return end
            self.is_closed = False
            if self.is_ambiguous:
                return None
        return None

    def _continues(self) -> Steps[bool]:
        """Whether the next argument or the end of the call follows a closing mark."""
        tape, here = self._tape, self._tape.place
        yield from tape.space()
        mark = yield from tape.mark([self._before, self._end])
        if mark == self._before:
            key = yield from self._key()
            tape.back(here)
            self.is_ambiguous = bool(key) and not self._may_follow(key)
            return bool(key) and not self.is_ambiguous
        if not mark:
            return False
        if not self._outer:
            tape.back(here)
            return True
        self.is_closed = yield from self._is_outer_end()
        return self.is_closed

    def _is_outer_end(self) -> Steps[bool]:
        """Whether what follows the end of a call is what follows this one's."""
        yield from self._tape.space()
        found = yield from self._tape.ahead((*self._outer, *self._openers))
        return not self._outer or bool(found) or not (yield from self._tape.peek())

    def _paired_end(self, closing: str, is_cut: Callable[[], bool]) -> Steps[int | None]:
        """The place of the first closing mark that belongs to nothing within the value."""
        tape, before, call = self._tape, self._before, self._call
        inner = _Inner(before, call)
        while True:
            mark = yield from tape.upto((closing, before, call, self._end), _dropped)
            at, ended = tape.place - 1, inner.after_end()
            if not mark or (mark == closing and inner.opened[-1:] == [call]):
                break
            if mark == closing and not inner.opened:
                if (yield from self._continues()):
                    return at
                if self.is_ambiguous:
                    return None
            elif mark == closing:
                yield from tape.space()
                inner.close((yield from tape.ahead((before, self._end))), at)
            elif mark == before:
                key = yield from self._key()
                inner.open_argument(ended if key and self._may_follow(key) else None, bool(key))
            elif mark == call:
                inner.open_call((yield from self._is_call()))
            elif inner.end_call(ended, ended is not None and (yield from self._is_outer_end())):
                break
        self.is_ambiguous = inner.n_in_call > 1
        if self.is_ambiguous or inner.first is None or (not mark and is_cut()):
            return None
        self._pairs = False
        tape.back(inner.first)
        return (yield from self._first_end(closing, lambda _: True))

    def _cdata_end(self, closing: str, is_cut: Callable[[], bool]) -> Steps[int | None]:
        """The place of the first mark after a CDATA section that ends no section within."""
        tape, depth = self._tape, 0
        opener, first = self._format.argument.front[-1] + _CDATA, None
        while mark := (yield from tape.upto((opener, closing), _dropped)):
            at = tape.place - 1
            if mark == opener:
                depth += 1
            elif depth:
                depth, first = depth - 1, at if first is None else first
            elif (yield from self._continues()):
                return at
            elif self.is_ambiguous:
                return None
        if first is None or is_cut():
            return None
        self._pairs = False
        tape.back(first)
        return (yield from self._first_end(closing, lambda _: True))

    def _key(self) -> Steps[str]:
        """Take what follows the mark before an argument; return its key, "" if it is none."""
        argument = self._format.argument
        if self._format.style == "xtml":
            ended, text = yield from self._tag()
            key = attributes(text).get("key", "")
        else:
            key = (yield from self._tape.key()).strip()
            ended = bool((yield from self._tape.mark(argument.front[:1])))
        return key if ended and is_key(key) else ""

    def _tag(self) -> Steps[tuple[bool, str]]:
        """Take the rest of a tag; return whether it ends before another mark, and its text."""
        tape, end, pieces = self._tape, self._format.argument.kind_end, list[str]()
        mark = yield from tape.upto(("<", end), pieces.append, 4 * MAX_NAME)
        if mark == "<":
            tape.put_back(mark)
        return mark == end, "".join(pieces)

    def _is_call(self) -> Steps[bool]:
        """Whether a call follows its mark: a name, and an argument or an end."""
        tape, format = self._tape, self._format
        if format.style == "xtml":
            named, _ = yield from self._tag()
        else:
            yield from tape.space()
            named = bool((yield from tape.name()))
        for mark in format.middle if named and format.style != "xtml" else ():
            yield from tape.space()
            yield from tape.mark([mark])
        yield from tape.space()
        found = yield from tape.ahead((self._before, self._end, *format.middle))
        return named and bool(found)


class _Inner:
    """The calls and arguments that opened within a value.

    ``first`` is the place of the first closing mark that belongs to one of them and could end the
    value as well, ``n_in_call`` the number of those within a call.
    """

    def __init__(self, before: str, call: str):
        self.opened: list[str] = []
        self.first: int | None = None
        self.n_in_call = 0
        self._before, self._call = before, call
        self._n_calls = 0
        self._end: int | None = None

    def after_end(self) -> int | None:
        """The place of an argument's end directly before this mark; None if none is there."""
        end, self._end = self._end, None
        return end

    def close(self, follows: str, at: int) -> None:
        """A closing mark at ``at``, before the mark ``follows``, ends the last argument."""
        if follows or self.opened[-2:-1] != [self._call]:
            self.opened.pop()
            self._end = at if follows else None

    def open_argument(self, ended: int | None, is_one: bool) -> None:
        """An argument begins; it could follow the value if that had ended at ``ended``."""
        self._could_end(ended)
        if is_one:
            self.opened.append(self._before)

    def open_call(self, is_one: bool) -> None:
        """A call begins, if it is one."""
        if is_one:
            self.opened.append(self._call)
            self._n_calls += 1

    def end_call(self, ended: int | None, is_outer: bool) -> bool:
        """Take the mark after a call; return whether it can only be that of the value's own.

        ``ended``: where its last argument ended; ``is_outer``: what follows may follow both.
        """
        self._could_end(ended if is_outer else None)
        if ended is not None and self._n_calls:
            while self.opened[-1] != self._call:
                self.opened.pop()
        if self.opened[-1:] == [self._call]:
            self.opened.pop()
            self._n_calls -= 1
            return False
        return is_outer

    def _could_end(self, ended: int | None) -> None:
        if ended is not None:
            self.first = ended if self.first is None else self.first
            self.n_in_call += self._n_calls > 0


def hidden(
    text: str,
    openers: Sequence[str],
    closers: Sequence[str],
    unescape: Callable[[str], str] = lambda call: call,
) -> tuple[str, Callable[[str], str]]:
    """Return ``text`` with a short word for each call in it, and what puts calls back into JSON.

    A call is what stands from one of ``openers`` to its closing mark, where these are paired.
    ``unescape`` reads the escapes that texts of the notation have.
    """
    pairs = dict(zip(openers, reversed(closers[: len(openers)]), strict=False))
    marks = re.compile("|".join(map(re.escape, sorted({*pairs, *pairs.values()}, key=len)[::-1])))
    opened: list[tuple[str, int]] = []
    spans: list[tuple[int, int]] = []
    for found in marks.finditer(text):
        if found[0] in pairs:
            opened.append((pairs[found[0]], found.start()))
        elif opened and opened[-1][0] == found[0]:
            start = opened.pop()[1]
            while spans and spans[-1][0] > start:
                spans.pop()
            spans.append((start, found.end()))
    if not spans:
        return text, lambda written: written
    sign = next(c for c in map(chr, range(0xE000, 0xF900)) if c not in text)
    parts, at = list[str](), 0
    for i, (start, end) in enumerate(spans):
        parts += [text[at:start], f"{sign}{i}{sign}"]
        at = end
    calls = [json.dumps(unescape(text[a:b]), ensure_ascii=False)[1:-1] for a, b in spans]
    word = re.compile(f"{sign}([0-9]+){sign}")

    def shown(written: str) -> str:
        return word.sub(lambda found: calls[int(found[1])], written)

    return "".join([*parts, text[at:]]), shown
