"""Readers of tool calls, one for each notation that models use.

A reader takes one call off the tape and returns it once its name and the end of its arguments are
certain; None if it cannot be read: what was taken is then text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tamis.text.calls.elements import attributes, element_arguments
from tamis.text.calls.enclosed import EnclosedValues, hidden, is_key
from tamis.text.calls.format import GEMMA_QUOTE, Argument, ToolFormat
from tamis.text.calls.gemma import gemma_arguments
from tamis.text.calls.json_stream import ObjectReader, Path
from tamis.text.calls.syntax import json_calls, python_calls, unescaped
from tamis.text.calls.tape import MAX_NAME, Steps, Tape
from tamis.text.calls.values import Tools, object_text

_MAX_ENDS = 16  # marks of possible ends that must all be read to decide whether they end a call
_NAMES = (("name",), ("function", "name"))
_ARGUMENTS = tuple((*p, n) for p in ((), ("function",)) for n in ("arguments", "parameters"))
# What models put around calls that are not in their own format, and what ends it.
_CODE = "```"
_LANGUAGES = ("json", "tool_call", "tool_calls", "tool_code", "xml", "")
_FENCES = {_CODE + language: _CODE for language in _LANGUAGES}
_WRAPPERS = ("tools", "tool", "json", "tool_call", "tool_calls", "function_call", "function_calls")
_FENCES |= {f"<{name}>": f"</{name}>" for name in _WRAPPERS}
_FENCES |= {"<|python_tag|>": "", "<|python_start|>": ""}
# Qwen3-Coder's notation, which models use also in place of their own.
CODER = ToolFormat(
    "tagged",
    ("<tool_call>", "<function="),
    ("</function>", "</tool_call>"),
    ("<tool_call>", "<function="),
    middle=(">",),
    argument=Argument("<parameter=", (">",), "</parameter>", margin="\n", end_margin="\n"),
)
# Styles whose texts are written without escapes: marks in them are as those around them.
_AS_THEY_ARE = frozenset(("tagged", "xtml", "elements", "gemma", "python"))
_ANNOUNCED = frozenset(("name", "arguments", "parameters", "type", "id", "function", "index"))


class Call(NamedTuple):
    """A call: ``arguments`` are JSON text, ``id`` is "" where none is written."""

    name: str
    arguments: str
    id: str = ""


Found = Sequence[Call] | None
_Parse = Callable[[str], Found]


def trimmed(name: str, words: Sequence[str] = ()) -> str:
    """``name`` without a prefix that a format adds; "" if it is not a name."""
    for word in words:
        if word[-1:] in ".:":
            name = name.removeprefix(word)
    return name if len(name) <= MAX_NAME and name.strip(".-:/") else ""


class CallReader:
    """Reads the calls of one format off ``tape``.

    ``is_cut`` says whether the answer was cut off. With ``lenient`` set, all of the answer is
    there and could not be read otherwise: then a mark ends an argument wherever it stands, and
    Gemma's arguments end where the next known key begins. With
    ``forced`` set a grammar makes the answer a call, which is one even where it is cut off.
    """

    def __init__(self, tape: Tape, format: ToolFormat, tools: Tools, is_cut: Callable[[], bool]):
        self.lenient = self.forced = self._is_ambiguous = False
        self._tape, self._format, self._tools, self._is_cut = tape, format, tools, is_cut
        self._marks = [m for i, m in enumerate(format.openers) if i == 0 or not _is_word(m)]
        self._words = [m for m in format.openers if m not in self._marks]
        self._is_wrapped = self._in_list = False
        self._read = format  # that of the last call

    @property
    def may_be_lenient(self) -> bool:
        """Whether arguments stand between marks, which models leave out."""
        return self._format.style in ("tagged", "xtml", "gemma") and not self._is_ambiguous

    def calls(self, mark: str) -> Steps[Found]:
        """Read what follows ``mark``, the call's first one, which was taken; "" if it has none."""
        if mark in self._format.triggers:
            self._is_wrapped = self._in_list = False
        mark = yield from self._open(mark)
        c = yield from self._tape.peek()
        self._read, style = self._format, self._format.style
        # Models also use other models' notations after the same mark.
        if c == "{" and style in ("json", "tag", "tagged"):
            return (yield from self._json())
        if c in ("`", "[") and style in ("json", "tag", "tagged"):
            return (yield from self._boxed())
        if style == "json" and mark == "[TOOL_CALLS]":
            style = "tag"
        if style == "json" and mark == "<tool_call>":
            if not (yield from self._tape.mark(["<function="])):
                return None
            self._read = CODER
            return (yield from self._as(CODER)._tagged())
        readers = {"tag": self._tag, "tagged": self._tagged}
        readers |= {"python": self._python, "gemma": self._gemma}
        readers |= {"elements": self._elements, "xtml": self._xtml}
        return (yield from readers[style]()) if style in readers else None

    def _as(self, format: ToolFormat) -> "CallReader":
        """A reader of another format, within the same first mark."""
        reader = CallReader(self._tape, format, self._tools, self._is_cut)
        reader.lenient, reader._is_wrapped = self.lenient, True
        return reader

    def _open(self, mark: str) -> Steps[str]:
        """Take the marks after the first one, in order; return the last."""
        at = self._marks.index(mark) + 1 if mark in self._marks else 0
        has_lists = self._format.style in ("json", "tag")
        self._is_wrapped |= at == 1 < len(self._marks)
        while True:
            yield from self._tape.space()
            if has_lists and (yield from self._tape.mark(["["])):
                self._in_list = True
                continue
            found = yield from self._tape.mark(self._marks[at:])
            if not found:
                return mark
            mark, at = found, self._marks.index(found, at) + 1

    def next_opener(self) -> Steps[str | None]:
        """Take what closes a call; return the mark of the next one, "" for one without a mark.

        None if no call follows: then the white space after it is taken, too. A comma is a mark
        between two calls that nothing else separates.
        """
        is_closed = False
        openers = [m for m in self._marks if m in self._format.triggers or m[0] in "<["]
        while True:
            yield from self._tape.space()
            closers = [*self._format.closers, *(["]", ","] if self._in_list else [])]
            mark = yield from self._tape.mark((*closers, *openers))
            if mark and mark not in closers:
                return mark
            self._in_list &= mark != "]"
            if not mark:
                c = yield from self._tape.peek()
                if c == "," and not is_closed and self._format.style == "json":
                    return (yield from self._tape.mark([","]))
                return "" if c == "{" and self._format.style == "json" else None
            is_closed = True

    @property
    def may_be_torn(self) -> bool:
        """Whether a mark in a value may have ended the last call: its texts have no escapes."""
        return self._read.style in _AS_THEY_ARE

    def is_torn(self) -> Steps[bool]:
        """Whether the end of an argument or a call follows before the next call begins.

        Then the last call ended too early. What is read for this stays on the tape.
        """
        tape, format = self._tape, self._read
        if not self.may_be_torn or not (yield from tape.peek()):
            return False
        closing, ends = format.argument.closing, format.closers[:1]
        marks = [closing] if closing else ends
        place = tape.place
        while (mark := (yield from tape.upto((*format.triggers, *marks), _dropped))) in marks:
            yield from tape.space()
            if not closing or (yield from tape.ahead((format.argument.before, *ends))):
                return True
        if mark or tape.place > place:
            tape.back(place)
        return False

    # JSON

    def _json(self) -> Steps[Found]:
        call = yield from self.json_call(known_only=False)
        return None if call is None else [call]

    def json_call(self, *, known_only: bool) -> Steps[Call | None]:
        """Read an object that is a call; ``known_only``: stop at an unknown name."""
        fields = self._format.fields
        names = [fields[k] for k in ("name",) if k in fields] + [*_NAMES]
        keyed = names[0] == ("*",)
        arguments = [fields[k] for k in ("arguments",) if k in fields] + [*_ARGUMENTS]
        id_path = fields.get("id", ())
        wanted = {*names, *arguments, id_path}
        reader = ObjectReader(
            (lambda path: len(path) == 1)
            if keyed
            else (lambda path: path in wanted or (len(path) == 2 and path[0] == "function"))
        )
        while True:
            self._tape.feed(reader.feed)
            if known_only and not keyed and not self._may_be_call(reader, names):
                return None
            if reader.done:
                break
            if reader.failed or not (yield from self._tape.peek()):
                if not self.forced or reader.failed:
                    return None
                name = _text(reader.values.get(("name",), ""))
                return Call(name, reader.begun) if name else None
        values = reader.values
        if keyed and len(reader.keys) == 1:
            return self._call(reader.keys[0], values.get((reader.keys[0],)))
        name = next((_text(values[path]) for path in names if path in values), None)
        given = next((values[path] for path in arguments if path in values), None)
        if given is None and self._has_other_keys(reader):
            return None
        id = values.get(id_path, "")
        return self._call(name, given, (_text(id) or id).strip('"') if id != "null" else "")

    def _has_other_keys(self, reader: ObjectReader) -> bool:
        """Whether an object has keys that no call has: its arguments may be there."""
        known = _ANNOUNCED | {path[0] for path in self._format.fields.values()}
        inner = {path[1] for path in reader.values if len(path) == 2 and path[0] == "function"}
        return bool({*reader.keys, *inner} - known)

    def _may_be_call(self, reader: ObjectReader, names: Sequence[Path]) -> bool:
        own = {path[0] for path in self._format.fields.values()}
        if reader.keys and reader.keys[0] not in _ANNOUNCED | own:
            return False
        found = [_text(reader.values[path]) for path in names if path in reader.values]
        return not found or found[0] in self._tools

    def _call(self, name: str | None, arguments: str | None, id: str = "") -> Call | None:
        given = object_text(arguments)
        name = trimmed(name or "")
        return Call(name, given, id) if name and given is not None else None

    # A name between marks, then an object

    def _tag(self) -> Steps[Found]:
        tape, id = self._tape, ""
        name = yield from tape.name()
        if name in self._words and name not in self._tools:
            yield from self._open(name)
            name = yield from tape.name()
        elif self._format.fields.get("id") == ("before",):
            id = name
            yield from self._open(name)
            name = yield from tape.name()
        name, number = self._numbered(name)
        closers = [m for m in self._format.closers if m[0] != "`"]
        while True:
            written = yield from self._middle()
            id = written or id
            c = yield from tape.peek()
            if c in "{<[" or name in self._tools:
                break
            name, number = self._numbered((yield from tape.name()))
            if not name:
                return None
        if (yield from tape.ahead(closers)):
            call = self._call(name, "")
        elif c == "{":
            call = self._call(name, (yield from self.object()))
        else:
            return None
        return call and [call._replace(id=id or number)]

    def _middle(self) -> Steps[str]:
        """Take the marks between a name and its arguments; return an id among them."""
        middle = [*self._format.middle, *self._marks[-1:], "[CALL_ID]", "[ARGS]", "```json", "```"]
        id = ""
        while True:
            yield from self._tape.space()
            mark = yield from self._tape.mark(middle)
            if mark == "[CALL_ID]":
                id = yield from self._tape.name()
            if not mark:
                return id

    def _numbered(self, written: str) -> tuple[str, str]:
        """The name and the id in a written name such as ``functions.NAME:0``."""
        name = trimmed(written, self._words)
        front, colon, number = name.rpartition(":")
        if colon and number.isdecimal() and name not in self._tools:
            return front, written
        return name, ""

    def object(self) -> Steps[str]:
        """Read an object; "!" if there is none."""
        reader = ObjectReader(lambda path: False, whole=True)
        while not reader.done:
            self._tape.feed(reader.feed)
            if reader.failed or (not reader.done and not (yield from self._tape.peek())):
                return "!"
        return reader.text

    # A name, then each argument between marks

    def _tagged(self) -> Steps[Found]:
        tape, format = self._tape, self._format
        name = trimmed((yield from tape.name()), self._words)
        if not name:
            return None
        yield from tape.space()
        for mark in format.middle:
            yield from tape.mark([mark])
            yield from tape.space()
        if (yield from tape.peek()) == "{":
            call = self._call(name, (yield from self.object()))
            return call and [call]
        members: dict[str, str] = {}
        values = self._values(name, members)
        while not values.is_closed:
            yield from tape.space()
            if not (yield from tape.mark([format.argument.before])):
                break
            if not (yield from self._member(name, members, values)):
                return None
        return (yield from self._ended(name, members, is_closed=values.is_closed))

    def _values(self, name: str, members: Mapping[str, str]) -> EnclosedValues:
        """A reader of the arguments of tool ``name``, of which ``members`` are known."""
        place = self._tools.arguments(name)
        outer = self._format.closers[1:] if self._is_wrapped else ()
        return EnclosedValues(
            self._tape,
            self._format,
            self._marks,
            outer,
            lambda key: key not in members and place.takes(key),
        )

    def _text_of(self, values: EnclosedValues, kind: str = "") -> Steps[str | None]:
        text = yield from values.read(kind, lenient=self.lenient, is_cut=self._is_cut)
        self._is_ambiguous |= values.is_ambiguous
        return text

    def _ended(self, name: str, members: Mapping[str, str], *, is_closed: bool) -> Steps[Found]:
        """The call of ``name`` with the arguments that were read, if it ends here."""
        is_closed = is_closed or bool((yield from self._tape.ahead(self._format.closers)))
        # Without a closing mark a call ends with the answer.
        if not is_closed and ((yield from self._tape.peek()) or not members or self._is_cut()):
            return None
        written = (f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in members.items())
        return [Call(name, "{" + ", ".join(written) + "}")]

    def _member(self, name: str, members: dict[str, str], values: EnclosedValues) -> Steps[bool]:
        """Read an argument after the mark before its key into ``members``; False if it is none."""
        tape, argument = self._tape, self._format.argument
        pieces: list[str] = []
        found = yield from tape.upto(argument.front[:1], pieces.append, MAX_NAME + 1)
        key = "".join(pieces).strip()
        if not found or not is_key(key):
            return False
        for mark in argument.front[1:]:
            yield from tape.space()
            yield from tape.mark([mark])  # models omit it
        pieces = []
        kind_ends = [argument.kind_end] if argument.kind_end else []
        if kind_ends and not (yield from tape.upto(kind_ends, pieces.append, MAX_NAME)):
            return False
        members[key] = ""
        kinds = self._tools.arguments(name).member(key).kinds
        kind = "object" if kinds and kinds <= {"object", "array"} else ""
        text = yield from self._text_of(values, kind)
        if text is None:
            return False
        members[key] = self._typed(name, key, text, "".join(pieces))
        return True

    def _typed(self, name: str, key: str, text: str, kind: str) -> str:
        """The value as JSON; ``kind``: the kind of value that the model names, or ""."""
        if kind in ("true", "string"):
            return json.dumps(text, ensure_ascii=False)
        if kind:
            return self._tools.typed("", "", text)
        return self._tools.typed(name, key, text, python=self._format.python_words)

    # Markup

    def _xtml(self) -> Steps[Found]:
        """Read tags with attributes: the call's has its name, an argument's its key and type."""
        tape, argument = self._tape, self._format.argument
        name = trimmed((yield from self._attributes()).get("tool", ""))
        members: dict[str, str] = {}
        values = self._values(name, members)
        while name and not values.is_closed:
            yield from tape.space()
            mark = yield from tape.mark([argument.before, *self._format.middle])
            if not mark:
                return (yield from self._ended(name, members, is_closed=False))
            given = yield from self._attributes()
            if mark != argument.before:
                call = self._call(name, (yield from self.object()))
                return call and [call]
            key, kind = given.get("key", ""), given.get("type", "")
            members[key] = ""
            text = yield from self._text_of(values, kind)
            if text is None or not 0 < len(key) <= MAX_NAME:
                return None
            members[key] = self._typed(name, key, text, kind)
        return (yield from self._ended(name, members, is_closed=True)) if name else None

    def _attributes(self) -> Steps[dict[str, str]]:
        """Take the attributes of a tag, and its end."""
        pieces: list[str] = []
        ends = [self._format.argument.kind_end]
        found = yield from self._tape.upto(ends, pieces.append, 4 * MAX_NAME)
        return attributes("".join(pieces)) if found else {}

    def _elements(self) -> Steps[Found]:
        """Read a name, then arguments as elements, which may be nested."""
        tape, format = self._tape, self._format
        name = trimmed((yield from tape.name()), self._words)
        yield from tape.mark(format.middle)
        place = self._tools.arguments(name)

        def parse(text: str) -> Found:
            found = element_arguments(text.strip(), format.argument.before, place)
            return None if found is None else [Call(name, found)]

        return (yield from self._literal(format.closers[:1], "", parse)) if name else None

    # Syntax of other languages

    def _python(self) -> Steps[Found]:
        """Read a list of calls in Python's syntax, or in JSON, which LFM2 writes if asked."""

        def parse(text: str) -> Found:
            calls = python_calls(text) or json_calls(text) or ()
            return [Call(n, json.dumps(a, ensure_ascii=False)) for n, a in calls] or None

        return (yield from self._literal(self._literal_marks, ")]}", parse))

    def _gemma(self) -> Steps[Found]:
        """Read a name and an object whose keys have no quotes and whose texts are between marks."""
        name = trimmed((yield from self._tape.name()))
        if not name or (yield from self._tape.peek()) != "{":
            return None
        place, lenient = self._tools.arguments(name), self.lenient

        def parse(text: str) -> Found:
            found = gemma_arguments(text, GEMMA_QUOTE, place, lenient=lenient)
            return None if found is None else [Call(name, json.dumps(found, ensure_ascii=False))]

        return (yield from self._literal(self._literal_marks, "}", parse))

    @property
    def _literal_marks(self) -> list[str]:
        return [*self._format.closers, *self._format.triggers]

    def _literal(self, marks: Sequence[str], ends: str, parse: _Parse) -> Steps[Found]:
        """The result of ``parse`` for the text up to the one of ``marks`` that ends it.

        A mark within a text does not count: everything before it must be complete. Calls within
        texts are left alone, if their marks can be paired. ``ends`` are characters before an end.
        """
        tape, start = self._tape, self._tape.place
        found, is_last = yield from self._literal_end(marks, ends, self._paired(parse), pairs=True)
        if found is None and is_last:
            tape.back(start)
            found, _ = yield from self._literal_end(marks, ends, parse, pairs=False)
            self._is_ambiguous |= found is None
        return found

    def _paired(self, parse: _Parse) -> _Parse:
        def without_calls(text: str) -> Found:
            unescape = [unescaped] if self._format.style == "python" else []
            text, shown = hidden(text, self._format.triggers, self._format.closers, *unescape)
            return [c._replace(arguments=shown(c.arguments)) for c in parse(text) or ()] or None

        return without_calls

    def _literal_end(
        self, marks: Sequence[str], ends: str, parse: _Parse, *, pairs: bool
    ) -> Steps[tuple[Found, bool]]:
        """What `_literal` reads, and whether it met a call within: with ``pairs`` it skips it."""
        tape, start, opener = self._tape, self._tape.place, self._format.triggers[-1:]
        depth = n_tried = n_within = 0
        while n_tried < _MAX_ENDS:
            mark = yield from tape.upto((*marks, *opener) if pairs else marks, _dropped)
            if pairs and mark in opener:
                depth, n_within = depth + 1, n_within + 1
            elif depth and mark == self._format.closers[0]:
                depth -= 1
            elif not depth or not mark:
                text = tape.between(start, tape.place - bool(mark)).rstrip()
                if not mark and not ends and (self._is_cut() or not text):
                    break
                n_tried += 1
                found = parse(text) if not ends or (text[-1:] and text[-1] in ends) else None
                if found is not None and mark:
                    tape.put_back(mark)
                if found is not None or not mark:
                    return found, n_within > 0
        return None, n_within > 0

    def _boxed(self) -> Steps[Found]:
        """Read fenced JSON, or a list of it, within the marks of a call: it must fit known tools.

        Small models of Qwen2.5 Coder write their calls so.
        """
        tape = self._tape
        yield from tape.mark(fence for fence, end in _FENCES.items() if end == _CODE)
        yield from tape.space()
        in_list = yield from tape.mark(["["])
        yield from tape.space()
        found = yield from self._untagged_objects(bool(in_list))
        if not found or not self._fit(found):
            return None
        yield from tape.space()
        is_ended = yield from tape.mark([_CODE])
        yield from tape.space()
        if (yield from tape.ahead((*self._format.closers, *self._marks))):
            return found
        is_last = not (yield from tape.peek())
        return found if is_last and (is_ended or not self._is_cut()) else None

    def _fit(self, calls: Sequence[Call]) -> bool:
        """Whether calls are of known tools and fit their schemas."""
        return all(self._tools.fits(call.name, call.arguments) for call in calls)

    # Calls without an announcing mark

    def untagged(self, *, own: bool) -> Steps[Found]:
        """Read calls that make up the whole answer, fenced or not; ``own``: in its own format.

        They must be of known tools and, in another format, fit their schemas.
        """
        tape, calls = self._tape, list[Call]()
        yield from tape.space()
        if (yield from tape.ahead(self._format.triggers)):
            return None
        while True:
            fence = yield from tape.mark((*(self._format.openers if own else ()), *_FENCES))
            ends = [_FENCES[fence]] if fence in _FENCES else []
            yield from tape.space()
            inner = yield from tape.mark(_FENCES if ends else ())
            found = yield from self._fenced([_FENCES[inner], *ends] if inner else ends)
            if not found or not all(call.name in self._tools for call in found):
                return None
            if (inner or not own) and not self._fit(found):
                return None
            calls += found
            for mark in self._format.closers:
                yield from tape.space()
                yield from tape.mark([mark])
            yield from tape.space()
            if not (yield from tape.peek()):
                return calls
            if fence not in _FENCES:
                return None

    def _fenced(self, ends: Sequence[str]) -> Steps[Found]:
        """Read calls and the marks that end them, which may be missing in a whole answer."""
        tape = self._tape
        yield from tape.space()
        marks = self._format.triggers if self._format.style == "json" else ()
        own = yield from tape.mark(marks if ends else ())
        yield from tape.space()
        in_list = yield from tape.mark(["["])
        yield from tape.space()
        if in_list and (yield from tape.peek()) not in ("", "{"):
            return (yield from self._untagged_python(ends))
        found = yield from self._untagged_objects(bool(in_list))
        yield from tape.space()
        for mark in self._format.closers if own else ():
            yield from tape.mark([mark])
            yield from tape.space()
        for end in filter(None, ends):
            if not (yield from tape.mark([end])) and self._is_cut():
                return None
            yield from tape.space()
        return found

    def _untagged_objects(self, in_list: bool) -> Steps[Found]:
        tape, found = self._tape, list[Call]()
        while (yield from tape.peek()) == "{":
            call = yield from self.json_call(known_only=True)
            if call is None:
                return None
            found.append(call)
            yield from tape.space()
            if in_list and (yield from tape.mark(["]"])):
                return found
            mark = yield from tape.mark([","] if in_list else [";", ","])
            if in_list and not mark:
                return None
            yield from tape.space()
            if mark == "," and (yield from tape.peek()) != "{":
                return None
        return None if in_list else found

    def _untagged_python(self, ends: Sequence[str]) -> Steps[Found]:
        """A list of calls in Python's syntax, after its bracket, to the answer's end."""
        name = yield from self._tape.name()
        if name not in self._tools or (yield from self._tape.peek()) != "(":
            return None
        pieces: list[str] = []
        yield from self._tape.upto((), pieces.append)
        text = "".join(pieces)
        for end in reversed(ends):
            text = text.rstrip().removesuffix(end)
        calls = python_calls(f"[{name}{text}")
        if not calls:
            return None
        return [Call(name, json.dumps(a, ensure_ascii=False)) for name, a in calls]


def _dropped(_text: str) -> None:
    """The tape keeps what is taken."""


def _is_word(mark: str) -> bool:
    """Whether a part of a format is a word rather than a mark: it may also begin a name."""
    return mark.rstrip(".").isalnum()


def _text(value: str) -> str | None:
    """The text of a JSON string; None for other values."""
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, str) else None
