"""Typed arrays as fields of ops: an element type and a shape whose sizes have names.

`centroids: F32["n_head_kv", "n_slot", "head_dim"]` states all that a kernel and its caller agree
on. A size is a number, the name of a constant or of an int field, another name, or an expression of
these ("n_row + 1"). Names that are neither constants nor fields are sizes that recording reads off
the arrays: the op gets an int field of that name, and every array must agree on it. The first
dimension may be ANY, or TOKENS, which means any, too: buffers have room for more rows than a call
has.
"""

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

ANY, TOKENS = "*", "n_tok"


class FieldError(TypeError):
    """A field of a recorded op is not what the op's record says; the message has both."""


class Array(NamedTuple):
    """The type of a field: elements and shape.

    is_optional: it may be None, which is 0 in kernels.
    """

    element: str  # a name of ELEMENTS
    shape: tuple[int | str, ...]
    is_optional: bool = False

    def __or__(self, other: None) -> "Array":
        return self._replace(is_optional=True)


class _Element:
    """A factory: F32["n", "m"] is the type of an array of float32."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, shape: Any) -> Array:
        sizes = shape if isinstance(shape, tuple) else (shape,)
        assert not {ANY, TOKENS} & set(sizes[1:]), f"{sizes}: only the first size may be any"
        return Array(self.name, sizes)


ELEMENTS = {
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
    "i8": np.int8, "u8": np.uint8, "u16": np.uint16, "i32": np.int32, "i64": np.int64,
}  # fmt: skip

if TYPE_CHECKING:  # names in the brackets are not types, whereas a Literal may have any string
    from typing import Literal as F16
    from typing import Literal as F32
    from typing import Literal as F64
    from typing import Literal as I8
    from typing import Literal as I32
    from typing import Literal as I64
    from typing import Literal as U8
    from typing import Literal as U16
else:
    F16, F32, F64, I8, U8, U16, I32, I64 = (_Element(name) for name in ELEMENTS)

_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def evaluate(size: int | str, known: Callable[[str | int], Any], apply: Any = None) -> Any:
    """The value of a size: known(name or number), and apply(operator, x, y) of its parts."""
    apply = apply or (lambda function, x, y: function(x, y))

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.BinOp):
            return apply(_OPERATORS[type(node.op)], value(node.left), value(node.right))
        assert isinstance(node, ast.Name | ast.Constant), f"{size}: names, numbers, + - * //"
        return known(node.id if isinstance(node, ast.Name) else int(str(node.value)))

    return value(_parsed(str(size)))


@functools.cache
def _parsed(size: str) -> ast.expr:
    return ast.parse(size, mode="eval").body


@functools.cache
def names_in(size: int | str) -> tuple[str, ...]:
    """The names that occur in a size."""
    if size in (ANY, TOKENS):
        return ()
    nodes = ast.walk(_parsed(str(size)))
    return tuple(node.id for node in nodes if isinstance(node, ast.Name))


def bound(
    name: str, types: Mapping[str, Array], known: Mapping[str, int], fields: Mapping[str, Any]
) -> dict[str, int]:
    """The sizes of an op's arrays: known ones, and those read off the arrays. Raises FieldError.

    name: the op's. An array may have additional leading dimensions of size 1, and may lack that of
    tokens, as one token's.
    """
    shapes, sizes = {}, dict(known)
    for field, kind in types.items():
        value = fields[field]
        if value is None or (isinstance(value, int) and value == 0):
            if not kind.is_optional:
                raise FieldError(f"{name}: {field} is None, expected {_shown(kind, sizes)}")
            continue
        shapes[field] = _shape(name, field, kind, value)
        for size, found in zip(kind.shape, shapes[field], strict=True):
            if isinstance(size, str) and size.isidentifier() and size != TOKENS:
                sizes.setdefault(size, found)
    for field, shape in shapes.items():
        _check(name, field, types[field], (fields[field], shape), sizes)
    return sizes


def _shape(name: str, field: str, kind: Array, value: Any) -> tuple[int, ...]:
    """The shape of an array, with as many dimensions as its type. Raises FieldError."""
    is_array = isinstance(value, np.ndarray)
    if not is_array or value.dtype != ELEMENTS[kind.element]:
        found = f"{value.dtype} {list(value.shape)}" if is_array else repr(value)
        raise FieldError(f"{name}: {field} is {found}, expected {_shown(kind, {})}")
    if not value.flags.c_contiguous:
        raise FieldError(f"{name}: {field} is not contiguous, expected {_shown(kind, {})}")
    if kind.shape[0] == TOKENS and value.ndim == len(kind.shape) - 1:
        return (1, *value.shape)
    more = value.ndim - len(kind.shape)
    if more < 0 or any(n != 1 for n in value.shape[:more]):
        found = f"{value.dtype} {list(value.shape)}"
        raise FieldError(f"{name}: {field} is {found}, expected {_shown(kind, {})}")
    return value.shape[more:]


def _check(
    name: str, field: str, kind: Array, found: tuple[Any, tuple[int, ...]], sizes: dict[str, int]
) -> None:
    value, shape = found
    for size, n in zip(kind.shape, shape, strict=True):
        if size in (ANY, TOKENS):
            continue
        if missing := [each for each in names_in(size) if each not in sizes]:
            raise FieldError(f"{name}: {field}: no array says what {missing[0]} is: pass it")
        if evaluate(size, lambda x: sizes[x] if isinstance(x, str) else x) != n:
            shown = f"{value.dtype} {list(value.shape)}"
            raise FieldError(f"{name}: {field} is {shown}, expected {_shown(kind, sizes)}")


def _shown(kind: Array, sizes: Mapping[str, int]) -> str:
    """A type for error messages, with its known sizes: "float32 [n_head=4, n=64]"."""

    def shown(size: int | str) -> str:
        if size in (ANY, TOKENS) or any(name not in sizes for name in names_in(size)):
            return str(size)
        value = evaluate(size, lambda x: sizes[x] if isinstance(x, str) else x)
        return f"{size}={value}" if isinstance(size, str) else str(size)

    shape = ", ".join(shown(size) for size in kind.shape)
    return f"{np.dtype(ELEMENTS[kind.element]).name} [{shape}]"
