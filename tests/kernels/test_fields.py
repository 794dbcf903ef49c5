"""A call whose arrays have other elements or shapes than the op's record says is an error."""

import numpy as np
import pytest

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.arrays import ANY, ELEMENTS, TOKENS, FieldError, evaluate, names_in
from tamis.jit_kernels.contract.program import Program

TYPED = {name: op for name, op in ops.declared().items() if op.arrays}
TEXTS = {"type_k": "f16", "type_v": "f16"}


def call_of(op):
    """Constants and fields of a call that records: every size is another number."""
    names = dict.fromkeys(
        name for kind in op.arrays.values() for size in kind.shape for name in names_in(size)
    )
    sizes = {name: 16 * (3 + i) for i, name in enumerate([*op.constants, *names])}
    constants = tuple(TEXTS.get(name, sizes[name]) for name in op.constants)

    def number(size):
        return 5 if size in (ANY, TOKENS) else evaluate(size, lambda x: sizes.get(x, x))

    fields = {}
    for name in op.fields:
        if name in op.arrays:
            kind = op.arrays[name]
            fields[name] = np.zeros([number(s) for s in kind.shape], ELEMENTS[kind.element])
        elif name in op.addresses:
            fields[name] = np.zeros(64, np.uint8)
        elif name not in op.sizes:
            fields[name] = sizes.get(name, 1)
    return constants, fields


def record(op, constants, fields):
    program = Program()
    program.add(op, constants, **fields)
    return dict(zip(op.fields, program.calls[0].values, strict=True))


def changed(array, dimension):
    """An array with one row more of a dimension."""
    shape = list(array.shape)
    shape[dimension] += 1
    return np.zeros(shape, array.dtype)


def checked_dimensions(op, name):
    """The dimensions of a field that some other field, constant or number says."""
    others = {
        each
        for field, kind in op.arrays.items()
        if field != name
        for size in kind.shape
        for each in names_in(size)
    } | {*op.constants}
    return [
        i
        for i, size in enumerate(op.arrays[name].shape)
        if size not in (ANY, TOKENS) and (not names_in(size) or {*names_in(size)} & others)
    ]


@pytest.mark.parametrize("name", TYPED)
def test_a_call_of_the_right_shapes_is_recorded_with_its_sizes(name):
    op = TYPED[name]
    constants, fields = call_of(op)
    values = record(op, constants, fields)
    for size in op.sizes:
        assert values[size] > 0
    # A size that is passed, too, must be the arrays'.
    for size in op.sizes:
        record(op, constants, fields | {size: values[size]})
        with pytest.raises(FieldError, match=rf"{op.name}: .*{size}"):
            record(op, constants, fields | {size: values[size] + 1})


@pytest.mark.parametrize("name", TYPED)
def test_a_wrong_dimension_of_any_array_is_an_error_that_names_it(name):
    op = TYPED[name]
    constants, fields = call_of(op)
    planted = 0
    for field in op.arrays:
        for dimension in checked_dimensions(op, field):
            wrong = fields | {field: changed(fields[field], dimension)}
            with pytest.raises(FieldError, match=rf"^{op.name}: \w+ is .*, expected "):
                record(op, constants, wrong)
            planted += 1
    assert planted > 0


@pytest.mark.parametrize("name", TYPED)
def test_other_elements_dimensions_or_strides_are_errors(name):
    op = TYPED[name]
    constants, fields = call_of(op)
    for field, kind in op.arrays.items():
        array = fields[field]
        other = np.float64 if kind.element != "f64" else np.float32
        spread = np.zeros([*array.shape, 2], array.dtype)[..., 0]
        fewer = array[0, 0, ...] if kind.shape[0] == TOKENS else array[0, ...]
        for wrong in (array.astype(other), array[None].repeat(2, 0), fewer, spread):
            if wrong.size < 2 and wrong is spread:
                continue  # one element is contiguous
            with pytest.raises(FieldError, match=rf"^{op.name}: {field} is "):
                record(op, constants, fields | {field: wrong})
        if not kind.is_optional:
            with pytest.raises(FieldError, match=rf"^{op.name}: {field} is None, expected "):
                record(op, constants, fields | {field: None})


def test_an_error_names_what_is_given_and_what_is_expected():
    step, q = np.zeros(6, np.int64), np.zeros((4, 64), np.float32)
    message = (
        r"^quest_score: parts is float32 \[4, 2, 32\], expected float32 "
        r"\[n_head_kv \* heads=4, 2, head_dim=64\]$"
    )
    with pytest.raises(FieldError, match=message):
        record(
            ops.QUEST_SCORE,
            (64, 2, 2),
            {
                "step": step,
                "parts": q.reshape(4, 2, 32),
                "bounds": np.zeros((2, 8, 2, 64), np.float16),
                "filled": np.zeros(1, np.int64),
                "scores": np.zeros((4, 8), np.float32),
                "page": 16,
            },
        )
