"""A View: a typed array of an op's record in kernels, used as `a.means[h, c, d]`.

It is an address and the strides of all but its last dimension. With an index for each dimension, []
reads or writes an element: float16 as float32, integers as int64. With fewer, it returns the View
of the rest, such as a row. Where an address is expected, a View is its first element's, so that
vector loads and byte arithmetic accept it. Nothing checks bounds.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import types
from numba.core.typeconv import Conversion

from tamis.jit_kernels.contract.arrays import evaluate
from tamis.jit_kernels.contract.op import Op

I64 = ir.IntType(64)
_FLOATS: dict[str, Any] = {"f16": types.float32, "f32": types.float32, "f64": types.float64}
_BITS = {"f16": 16, "u16": 16, "i8": 8, "u8": 8, "f32": 32, "i32": 32, "f64": 64, "i64": 64}
_BUILDER = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.floordiv: "udiv",
}


class View(types.Type):
    """The Numba type of a View: its element type, named as in contract.arrays, and dimensions."""

    def __init__(self, element: str, ndim: int) -> None:
        self.element, self.ndim = element, ndim
        super().__init__(name=f"View({element}, {ndim})")

    @property
    def value(self) -> types.Type:
        """The Numba type of an element that is read or written."""
        found: types.Type = _FLOATS.get(self.element, types.int64)
        return found

    def can_convert_to(self, _context: Any, other: Any) -> Any:
        """Allow the conversion of a View to its address."""
        return Conversion.safe if other == types.int64 else None


class Target(NamedTuple):
    """What Views need of a backend's Numba, and how it accesses memory."""

    extending: Any  # numba.extending, or numba.cuda's
    templates: Any
    struct_model: Any
    register_model: Any
    load: Callable[[Any, Any, str], Any]  # (builder, address, element) -> value
    store: Callable[[Any, Any, str, Any], None]


def define(target: Target) -> None:
    """Register Views with a backend's Numba: their data model, [] and the conversion."""
    lower, templates = target.extending.lower_builtin, target.templates

    @target.register_model(View)
    class Model(target.struct_model):  # type: ignore[name-defined]
        def __init__(self, manager: Any, view: View) -> None:
            members = [(f"m{i}", types.int64) for i in range(view.ndim)]
            super().__init__(manager, view, members)

    @target.extending.lower_cast(View, types.int64)
    def address(_context: Any, b: Any, _from: Any, _to: Any, value: Any) -> Any:
        return b.extract_value(value, 0)

    @templates.infer_global(operator.getitem)
    class Get(templates.AbstractTemplate):  # type: ignore[name-defined]
        def generic(self, args: Any, kws: Any) -> Any:
            if not isinstance(args[0], View):
                return None
            view, index = args[0], _index_type(args[1])
            n = len(index) if isinstance(index, types.BaseTuple) else 1
            rest = view.ndim - n
            found = view.value if rest == 0 else View(view.element, rest)
            return templates.signature(found, view, index) if rest >= 0 else None

    @templates.infer_global(operator.setitem)
    class Set(templates.AbstractTemplate):  # type: ignore[name-defined]
        def generic(self, args: Any, kws: Any) -> Any:
            if not isinstance(args[0], View):
                return None
            view, index = args[0], _index_type(args[1])
            n = len(index) if isinstance(index, types.BaseTuple) else 1
            if n != view.ndim:
                return None
            return templates.signature(types.none, view, index, view.value)

    def get(_context: Any, b: Any, sig: Any, args: Any) -> Any:
        view, at, n = sig.args[0], *_element(b, sig, args)
        if n == view.ndim:
            return target.load(b, at, view.element)
        parts = [at, *(b.extract_value(args[0], i) for i in range(n + 1, view.ndim))]
        return _struct(b, sig.return_type, parts)

    def put(context: Any, b: Any, sig: Any, args: Any) -> Any:
        at, _ = _element(b, sig, args)
        target.store(b, at, sig.args[0].element, args[2])
        return context.get_dummy_value()

    for index in (types.int64, types.BaseTuple):
        lower(operator.getitem, View, index)(get)
        lower(operator.setitem, View, index, types.Any)(put)


def _index_type(index: Any) -> Any:
    """The Numba type of indices, which are int64."""
    if isinstance(index, types.BaseTuple):
        return types.UniTuple(types.int64, len(index))
    return types.int64


def _element(b: Any, sig: Any, args: Any) -> tuple[Any, int]:
    """The address of an element, or of the row that the first indices select, and their number."""
    view, index = sig.args[0], sig.args[1]
    is_tuple = isinstance(index, types.BaseTuple)
    at = [b.extract_value(args[1], i) for i in range(len(index))] if is_tuple else [args[1]]
    offset: Any = None
    for i, each in enumerate(at):
        part = each if i == view.ndim - 1 else b.mul(each, b.extract_value(args[0], i + 1))
        offset = part if offset is None else b.add(offset, part)
    size = ir.Constant(I64, _BITS[view.element] // 8)
    return b.add(b.extract_value(args[0], 0), b.mul(offset, size)), len(at)


def _struct(b: Any, view: View, parts: list[Any]) -> Any:
    value: Any = ir.Constant(ir.LiteralStructType([I64] * view.ndim), ir.Undefined)
    for i, part in enumerate(parts):
        value = b.insert_value(value, part, i)
    return value


def opened(op: Op, constants: dict[str, int | str], plain: Any) -> tuple[Any, Any]:
    """A record as kernels take it: its Numba type, and (builder, fields) -> its fields.

    plain: Numba's type of the record with plain addresses, in the order of the fields.
    """
    arrays = op.arrays
    kinds = [
        View(arrays[name].element, len(arrays[name].shape)) if name in arrays else kind
        for name, kind in zip(op.fields, plain.types, strict=True)
    ]

    def views(b: Any, values: list[Any]) -> list[Any]:
        fields = dict(zip(op.fields, values, strict=True))

        def known(size: str | int) -> Any:
            if isinstance(size, str) and size in fields:
                return fields[size]
            return ir.Constant(I64, constants[size] if isinstance(size, str) else size)

        def value(size: int | str) -> Any:
            apply = lambda function, x, y: getattr(b, _BUILDER[function])(x, y)  # noqa: E731
            return evaluate(size, known, apply)

        found = []
        for name, kind in zip(op.fields, kinds, strict=True):
            if name not in arrays:
                found.append(fields[name])
                continue
            strides: list[Any] = []
            for size in reversed(arrays[name].shape[1:]):
                strides.insert(0, b.mul(value(size), strides[0]) if strides else value(size))
            found.append(_struct(b, kind, [fields[name], *strides]))
        return found

    return types.BaseTuple.from_types(kinds, op.values), views
