"""A jinja2 environment for untrusted templates: no way out, and little time and memory.

The templates' syntax tree is changed so that whatever can repeat or grow reports to a meter: loops,
macros, calls, operators, tests, filters, lists. All of it counts against one budget. Python cannot
stop a single long operation of C, so those are refused before they start if their operands show
that they would be long.
"""

import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2 import Undefined, nodes
from jinja2.defaults import DEFAULT_FILTERS
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment, SecurityError
from jinja2.tests import TESTS
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from tamis.text.tagged_text import UserText, has_veiled, unveil

# The filters that chat templates use; not those that make long results of short inputs.
_FILTERS = """abs attr capitalize count d default dictsort e escape first float format groupby
indent int items last length list lower map max min reject rejectattr reverse round safe select
selectattr sort string title trim truncate unique upper urlencode wordcount"""
_BINARY = frozenset(["+", "-", "*", "/", "//", "%", "**"])
_NODE_CHARS = 16  # the cost of an item of a list, in addition to its characters
_STEP_CHARS = 32  # the cost of a step: an iteration, a test, a filter, a call
# Filters that process each character in Python, or compare all items with each other.
_SLOW_FILTERS = frozenset(["urlencode", "title", "sort", "unique", "groupby", "dictsort"])
_SLOW = 8
_MAX_BITS = 4096  # of an integer in a calculation
_MAX_WIDTH = 100  # of indents and padding
# Padding to a width makes gigabytes of ten characters; so do the digits of a number format.
_WIDE_FORMAT = re.compile(r"\d{4}|\*|\{[^{}]*\{")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_PADDING = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs", "truncate"])
_TESTS: dict[str, Callable[..., Any]] = dict(TESTS)  # type: ignore[arg-type]
_LIST_METHODS = ("append", "pop")
_REFUSED_METHODS = frozenset(["translate", "maketrans", "encode"])


@dataclass(slots=True)
class WorkLimit:
    """The remaining budget of one rendering; SecurityError if it is exceeded.

    ``max_chars`` limits every value and the output; ``n_left`` is the budget: characters made or
    read, and a fixed cost for each step. ``deadline`` is in seconds of this thread's processor
    time, so that a busy machine stops no rendering.
    """

    max_chars: int
    n_left: int
    deadline: float
    n_out: int = 0

    @classmethod
    def for_input(cls, n_chars: int) -> "WorkLimit":
        """The meter of a rendering whose messages have ``n_chars`` characters."""
        max_chars = 2_000_000 + 4 * n_chars
        seconds = 1.0 + n_chars / 2_000_000
        return cls(max_chars, 16 * max_chars, time.thread_time() + seconds)

    def tick(self, n_chars: int = 0) -> None:
        """Count a step that reads ``n_chars`` characters."""
        self.n_left -= _STEP_CHARS + n_chars
        if self.n_left < 0 or time.thread_time() > self.deadline:
            raise SecurityError("takes too long: endless loop?")

    def grow(self, n_chars: int) -> None:
        """Count a string of ``n_chars`` characters, preferably before it is made."""
        self.n_left -= n_chars
        if n_chars > self.max_chars or self.n_left < 0:
            raise SecurityError(f"makes texts of over {self.max_chars} characters")

    def write(self, n_chars: int) -> None:
        """Count output."""
        self.n_out += n_chars
        if self.n_out > self.max_chars:
            raise SecurityError(f"writes over {self.max_chars} characters")


_METER: ContextVar[WorkLimit] = ContextVar("meter")


def size(value: Any, limit: int) -> int:
    """The size of ``value`` written out, in characters; shared parts count each time.

    SecurityError if it is over ``limit``. Lists of lists of one list can be exponential.
    """
    total, todo = 0, [value]
    while todo:
        item = todo.pop()
        total += len(item) if isinstance(item, str) else _NODE_CHARS
        if isinstance(item, Mapping):
            todo += item.keys()
            todo += item.values()
        elif isinstance(item, list | tuple | set | frozenset):
            todo += item
        if total + len(todo) > limit:
            raise SecurityError(f"makes values of over {limit} characters")
    return total


class _Namespace(Namespace):
    """jinja2's namespace, printed without its content, which could otherwise nest values."""

    def __repr__(self) -> str:
        return "<namespace>"


class _OwnList(list):
    """A list that the template has made."""


class _Generation(Extension):
    """The tag ``{% generation %}``, which marks the assistant's text for training.

    No effect here.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Metered(NodeTransformer):
    """Puts calls of the meter into a syntax tree."""

    def _call(self, name: str, args: list[nodes.Expr], lineno: int) -> nodes.Call:
        target = nodes.EnvironmentAttribute(name, lineno=lineno)
        return nodes.Call(target, args, [], None, None, lineno=lineno)

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        tick = self._call("_tick", [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:
            ticked = self._call("_tick", [], node.lineno)
            node.test = nodes.And(ticked, node.test, lineno=node.lineno)
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _with_tick

    def _wrapped(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return self._call("_metered", [node], node.lineno)

    visit_List = visit_Dict = _wrapped

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._wrapped(node) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        if isinstance(node.arg, nodes.Slice):
            return self._wrapped(node)
        return self.generic_visit(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._call("_ticked", [node.expr], node.lineno)
        for operand in node.ops:
            if operand.op in ("in", "notin"):
                operand.expr = self._call("_searched", [operand.expr], node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("_joined", node.nodes, node.lineno)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment of chat templates: the tags and filters they use, under a meter."""

    intercepted_binops = _BINARY

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constant folding would calculate without a meter
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.concat = _concat  # type: ignore[method-assign]
        self.filters = {name: _filter(name, DEFAULT_FILTERS[name]) for name in _FILTERS.split()}
        own: dict[str, Callable[..., Any]] = {"join": _join, "replace": _replace, "tojson": _tojson}
        self.filters |= {name: _filter(name, function) for name, function in own.items()}
        self.tests = {name: _test(function) for name, function in _TESTS.items()}
        self.globals = {"range": self.globals["range"], "dict": dict, "namespace": _Namespace}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Metered().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def _tick(self) -> bool:
        _METER.get().tick()
        return True

    def _ticked(self, value: Any) -> Any:
        _METER.get().tick(_length(value))
        return value

    def _searched(self, value: Any) -> Any:
        _METER.get().tick(_length(value))
        # a plain string would look for the veiled characters of what it is searched for
        return UserText(value) if type(value) is str else value

    def _metered(self, value: Any) -> Any:
        return _metered(_OwnList(value) if type(value) is list else value)

    def _joined(self, *values: Any) -> str:
        return _concat([_text(value) for value in values])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Do what jinja2's method does; lists that the template has made may also be changed."""
        if type(obj) is _OwnList and attr in _LIST_METHODS:
            return SandboxedEnvironment.is_safe_attribute(self, obj, attr, value)
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse at once: jinja2's would print as an empty string."""
        raise SecurityError(f"attribute {attribute!r} of {type(obj).__name__} is not for templates")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Do what jinja2's method does, without formats that pad or enlarge."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, (args, kwargs))
            return wrapped(*args, **kwargs)

        return checked

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call ``obj`` for a template, if the call and its arguments are harmless."""
        _METER.get().tick()
        _check_call(obj, args, kwargs)
        owner = getattr(obj, "__self__", None)
        if type(owner) is str and any(isinstance(arg, UserText) for arg in args):
            obj = getattr(UserText(owner), obj.__name__)
        return _metered(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Calculate for a template, if the result cannot be large."""
        _METER.get().tick()
        _check_binop(operator, left, right)
        return _metered(super().call_binop(context, operator, left, right))

    def write(self, root: Iterable[str], meter: WorkLimit) -> str:
        """Return all that a template's root function yields."""
        token = _METER.set(meter)
        try:
            out = []
            for piece in root:
                meter.tick()
                meter.write(len(piece))
                out.append(str(piece))
            return "".join(out)
        finally:
            _METER.reset(token)


def _metered(value: Any) -> Any:
    """Return ``value`` with its size checked; strings with a user's characters as UserText."""
    meter = _METER.get()
    if isinstance(value, str):
        meter.grow(len(value))
        return UserText(value) if type(value) is str and has_veiled(value) else value
    if isinstance(value, list | tuple | Mapping | set | frozenset):
        size(value, meter.max_chars)
        meter.grow(_NODE_CHARS * len(value))
    return _ticking(value) if isinstance(value, Generator) else value


def _text(value: Any) -> str:
    """``str(value)``, if that is not long."""
    if not isinstance(value, str):
        size(value, _METER.get().max_chars)
    return str(value)


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Check a printed value.

    It needs the context, so that jinja2 does not call it while compiling.
    """
    _METER.get().tick()
    text = _text(value)
    _METER.get().grow(len(text))
    return text


def _concat(pieces: Iterable[str]) -> str:
    """Join what a macro or a block has written."""
    pieces = list(pieces)
    _METER.get().grow(sum(map(len, pieces)))
    text = "".join(pieces)
    return UserText(text) if has_veiled(text) else text


def _check_format(text: str, values: Any) -> None:
    if _WIDE_FORMAT.search(text):
        raise SecurityError("formats with a width: write the text out")
    meter = _METER.get()
    n_fields = text.count("{") + text.count("%")  # each field may name the same value
    meter.grow(len(text) + n_fields * size(values, meter.max_chars))


def _check_width(name: str, args: Iterable[Any]) -> None:
    if any(isinstance(arg, int) and abs(arg) > _MAX_WIDTH for arg in args):
        raise SecurityError(f"{name} with a number over {_MAX_WIDTH}")


def _check_call(obj: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
    if isinstance(owner, int | float | bytes):
        raise SecurityError(f"method {name} of {type(owner).__name__} is not for templates")
    if isinstance(owner, list) and name in _LIST_METHODS:
        _METER.get().grow(_NODE_CHARS + len(owner) // _NODE_CHARS)
    if not isinstance(owner, str):
        return
    _METER.get().tick(len(owner))
    if name in _REFUSED_METHODS:
        raise SecurityError(f"method {name} of str is not for templates")
    if name in _PADDING:
        _check_width(name, (*args, *kwargs.values()))
        _METER.get().grow(len(owner) * (_MAX_WIDTH if name == "expandtabs" else 1))
    elif name == "replace":
        _check_replace(owner, *args[:2])
    elif name == "join" and args:
        if not isinstance(args[0], list | tuple | Mapping | str):
            raise SecurityError("str.join of what is not a list: use the filter")
        _METER.get().grow(len(owner) * len(args[0]) + size(args[0], _METER.get().max_chars))


def _check_replace(text: str, old: Any = "", new: Any = "") -> None:
    if isinstance(old, str) and isinstance(new, str):
        _METER.get().grow(len(text) + text.count(old) * len(new))


def _check_binop(operator: str, left: Any, right: Any) -> None:
    grow = _METER.get().grow
    if isinstance(left, int) and isinstance(right, int):
        if max(left.bit_length(), right.bit_length()) > _MAX_BITS:
            raise SecurityError("calculates with numbers of over a thousand digits")
        if operator == "**" and left.bit_length() * abs(right) > _MAX_BITS:
            raise SecurityError("calculates a power of over a thousand digits")
    elif operator == "*":
        for items, n in ((left, right), (right, left)):
            if isinstance(items, str | list | tuple) and isinstance(n, int):
                grow(max(n, 0) * size(items, _METER.get().max_chars))
    elif operator == "+" and isinstance(left, str | list | tuple):
        grow(len(left) + (len(right) if isinstance(right, str | list | tuple) else 0))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right)


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter ``function``, metered; it takes a context or the like if the function does."""

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        n_chars = max(map(_length, values), default=0)
        if name in _SLOW_FILTERS:
            n_chars = _SLOW * size([v for v in values if _length(v)], _METER.get().max_chars)
        _METER.get().tick(n_chars)
        if name in ("indent", "round", "truncate"):
            _check_width(name, values)
        if name == "indent":
            width = max([4] + [len(v) if isinstance(v, str) else 0 for v in args[1:]])
            width = max(width, _MAX_WIDTH)
            _METER.get().grow(len(args[0]) + (args[0].count("\n") + 1) * width)
        if name == "format":
            _check_format(_text(args[0]), values[1:])
        if name in ("string", "format", "escape", "e", "urlencode", "wordcount", "truncate"):
            size(values, _METER.get().max_chars)
        return _metered(function(*args, **kwargs))

    return metered


def _test(function: Callable[..., Any]) -> Callable[..., Any]:
    """The test ``function``, metered."""

    @functools.wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        _METER.get().tick(max(map(_length, args), default=0))
        return function(*args, **kwargs)

    return metered


def _length(value: Any) -> int:
    """The size of ``value`` to read: characters, or items at a fixed cost."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple | dict | set | frozenset | range):
        return _NODE_CHARS * len(value)
    return 0


def _ticking(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        _METER.get().tick()
        yield item


@pass_context
def _join(context: Context, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    items: list[str] = []
    for item in value:
        if attribute is not None:
            item = context.environment.getitem(item, attribute)
        _METER.get().tick()
        items.append(_text(item))
        _METER.get().grow(len(items[-1]) + len(d))
    return d.join(items)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (v if isinstance(v, str) else _text(v) for v in (value, old, new))
    _check_replace(text, old, new)
    return text.replace(old, new, -1 if count is None else count)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as templates expect it."""
    meter = _METER.get()
    # results of map, select and their kin; llama.cpp has lists there
    if isinstance(value, Iterator):
        value = list(itertools.islice(value, meter.max_chars + 1))
    size(value, meter.max_chars)
    _check_width("tojson", (indent,))
    encoder = json.JSONEncoder(
        ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    text = "".join(_counted(encoder.iterencode(value), meter))
    return _NOT_ASCII.sub(_escaped, text) if ensure_ascii else text


def _escaped(match: re.Match[str]) -> str:
    """A character escaped in JSON's ASCII; a user's veiled ASCII is not escaped."""
    plain = unveil(match[0])
    return match[0] if plain.isascii() else json.dumps(plain)[1:-1]


def _counted(pieces: Iterable[str], meter: WorkLimit) -> Iterator[str]:
    for piece in pieces:
        meter.tick()
        meter.grow(len(piece))
        yield piece
