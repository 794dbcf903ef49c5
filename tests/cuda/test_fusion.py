"""Which ops of a decode step are launched together, and which are not."""

import numpy as np
import pytest

from tamis.jit_kernels.backends.fusion import Step, candidates, fused, merged, of_rows, passed_on
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec, Program
from tamis.jit_kernels.contract.types import zeros
from tamis.jit_kernels.cuda.lang.scratch import LONGEST_NORM, staged_room

N, N_FF, N_KV, N_HEAD, N_HEAD_KV, HEAD_DIM, N_VOCAB = 256, 512, 128, 4, 2, 64, 1024
F16 = ("f16", "f16")
N_BLOCK = 8
STAGED = {ops.STAGED_PRODUCTS, ops.STAGED_GATE}
HALF = 1 << 40  # from a packed row to the other one
# The ops of a layer and the head after it, by what they are called here, and what they become.
NAMES = (
    *("norm", "q", "k", "v", "rope", "attend", "merge", "pack", "out", "ffn_norm", "gate", "up"),
    *("gated", "down", "last_norm", "logits"),
)
START = "pack_rows product_rope_append attend_pack"
WHOLE = f"{START} product_norm product_gate product_norm products"


class Buffers:
    """What the ops of a layer read and write."""

    def __init__(self, n=1):
        self.step, self.other_step = np.array([n, 0, 0, 0, 1, 0]), np.array([n, 0, 0, 0, 1, 0])
        self.x, self.q, self.att = (zeros((n, N), np.float32) for _ in range(3))
        self.k, self.v = (zeros((n, N_KV), np.float32) for _ in range(2))
        self.gate, self.up = (zeros((n, N_FF), np.float32) for _ in range(2))
        self.logits, self.packed = zeros((n, N_VOCAB), np.float32), zeros(1 << 16, np.uint8)
        self.weight = zeros(N, np.float32)


def pack(program, at, x, source, n, other=None):
    program.add(
        ops.PACK_ROWS, ("quantised", source), step=at.step, x=x, other=other, packed=at.packed, n=n,
        scratch=0, eps=1e-5 if source == "norm" else 0.0,
    )  # fmt: skip


def multiply(program, at, n_in, *ys, add=0):
    """Products of a packed row with matrices of type Q8_0."""
    for i, y in enumerate(ys):
        n_out = y.shape[-1]
        w = zeros(n_out * n_in // 32 * 34, np.uint8)
        program.add(
            ops.MATMUL, ("Q8_0",), sync=i == len(ys) - 1, step=at.step, packed=at.packed, w=w,
            bias=None, y=y, n_in=n_in, n_out=n_out, y_stride=n_out, add=add, scratch=0,
        )  # fmt: skip


def attend(program, at):
    fields = dict.fromkeys(ops.ATTEND.fields, 1) | {"n_row": N_HEAD // 2, "scale": 0.1}
    program.add(
        ops.ATTEND, (HEAD_DIM, 2, 1, *F16),
        **fields | {"step": at.step, "q": at.q, "out": at.att},
    )  # fmt: skip
    program.add(
        ops.ATTEND_MERGE, (HEAD_DIM, 1), step=at.step, partial=1, out=at.att, lse=0, n_head=N_HEAD,
        n_split=2,
    )  # fmt: skip


def rope(program, at):
    names = "cos", "sin", "k_pages", "v_pages", "k_table", "v_table"
    program.add(
        ops.ROPE_APPEND, (HEAD_DIM, 1, *F16), step=at.step, q=at.q, k=at.k, v=at.v, q_norm=None,
        k_norm=None, n_head=N_HEAD, n_head_kv=N_HEAD_KV, n_half=HEAD_DIM // 2, eps=1e-5,
        **{name: 101 + i for i, name in enumerate(names)},
    )  # fmt: skip


def steps_of(program):
    return [
        Step(call.spec, dict(zip(call.spec.op.fields, call.values, strict=True)), call.sync)
        for call in program.calls
    ]


@pytest.fixture
def at():
    return Buffers()


@pytest.fixture
def layer(at):
    """A decode step's layer and the head after it: steps by name, in order."""
    yield from recorded(at)


@pytest.fixture
def rows():
    """Buffers of as many rows as a batch has, and the layer over them."""
    at = Buffers(64)
    return at, next(layer := recorded(at)), layer


def recorded(at):
    program = Program()
    pack(program, at, at.x, "norm", N, at.weight)
    multiply(program, at, N, at.q, at.k, at.v)
    rope(program, at)
    attend(program, at)
    pack(program, at, at.att, "rows", N)
    multiply(program, at, N, at.x, add=1)
    pack(program, at, at.x, "norm", N, at.weight)
    multiply(program, at, N, at.gate, at.up)
    pack(program, at, at.gate, "silu", N_FF, at.up)
    multiply(program, at, N_FF, at.x, add=1)
    pack(program, at, at.x, "norm", N, at.weight)
    multiply(program, at, N, at.logits)
    yield dict(zip(NAMES, steps_of(program), strict=True))
    del program  # until now it has kept the weights, so that addresses differ


def launched(steps, n_block=N_BLOCK):
    """The steps that are launched, all of kernels that `candidates` has told of."""
    steps = list(steps)
    found = fused(steps, passed_on(steps), lambda packed: packed ^ HALF, n_block)
    specs = {step.spec for step in steps}
    assert {step.spec for step in found} <= candidates(specs) | specs
    for step in found:
        assert tuple(step.fields) == step.spec.op.fields
    return found


def names(steps):
    return " ".join(step.spec.op.name for step in steps)


def changed(layer, **changes):
    """The layer with other fields of some ops, or other constants where those are a tuple."""
    found = dict(layer)
    for name, change in changes.items():
        step = found[name]
        if isinstance(change, tuple):
            found[name] = step._replace(spec=KernelSpec(step.spec.op, change))
        else:
            assert set(change) <= set(step.fields)
            found[name] = step._replace(fields=step.fields | change)
    return found


def with_after(layer, name, *steps):
    """The layer's steps, with some more after one of them."""
    i = NAMES.index(name) + 1
    found = list(layer.values())
    return [*found[:i], *steps, *found[i:]]


def reader(address):
    """An op that no launch has more of, and reads this."""
    spec = KernelSpec(ops.GATE, ("silu",))
    return Step(spec, {"step": 1, "gate": address, "up": 2, "y": 3, "n": 4}, True)


def test_a_layer_is_five_launches_and_each_has_its_fields(layer, at):
    first, keep, attention, out, gate, down, logits = launched(layer.values())
    assert names([first, keep, attention, out, gate, down, logits]) == WHOLE
    assert first == layer["norm"]
    assert all(step.sync for step in (keep, attention, out, gate, down, logits))
    step, one, two = at.step.ctypes.data, at.packed.ctypes.data, at.packed.ctypes.data ^ HALF
    x, weight = at.x.ctypes.data, at.weight.ctypes.data
    w = {name: layer[name].fields["w"] for name in NAMES if "w" in layer[name].fields}
    scratch = {"scratch": layer["logits"].fields["scratch"]}

    def rows(packed, n_in, normed=0):
        eps = 1e-5 if normed else 0.0
        return {"step": step, "packed": packed, "normed": normed, "eps": eps, "n_in": n_in}

    assert keep.spec.constants == ("Q8_0", 1)
    assert keep.fields == rows(one, N) | {
        "w": w["q"], "w2": w["k"], "w3": w["v"], "bias": 0, "bias2": 0, "bias3": 0,
        "q": at.q.ctypes.data, "n": N, "n2": N_KV, "n_half": HEAD_DIM // 2, "cos": 101, "sin": 102,
        "k_pages": 103, "v_pages": 104, "k_table": 105, "v_table": 106,
        "first": 0, "n_row": N + 2 * N_KV,
    }  # fmt: skip
    assert attention.spec.constants == (HEAD_DIM, 2, *F16)
    assert attention.fields == layer["attend"].fields | {"packed": one, "early": 1}
    assert out.spec.constants == down.spec.constants == logits.spec.constants == ("Q8_0",)
    norm = {"bias": 0, "y": x, "n": N, "add": 1, "weight": weight, "to": two}
    assert out.fields == rows(one, N) | norm | {"w": w["out"]}
    assert gate.spec.constants == ("Q8_0", "silu")
    assert (
        gate.fields
        == rows(two, N, 1) | {"w": w["gate"], "w2": w["up"], "n": N_FF, "to": one} | scratch
    )
    assert down.fields == rows(one, N_FF) | norm | {"w": w["down"]}
    own = {
        "w": w["logits"],
        "bias": 0,
        "y": at.logits.ctypes.data,
        "n": N_VOCAB,
        "add": 0,
    } | scratch
    none = {f"{name}{i}": 0 for name in ("w", "bias", "y", "n") for i in (2, 3)}
    assert logits.fields == rows(two, N, 1) | own | none


@pytest.mark.parametrize(
    ("types", "parts"),
    [
        ("qqk", [("Q8_0", N + N_KV), ("Q4_K", N_KV)]),
        ("qkk", [("Q8_0", N), ("Q4_K", 2 * N_KV)]),
        ("qkq", [("Q8_0", N), ("Q4_K", N_KV), ("Q8_0", N_KV)]),
    ],
)
def test_q_k_and_v_of_other_types_are_concurrent_launches(layer, types, parts):
    of = {"q": ("Q8_0",), "k": ("Q4_K",)}
    found = launched(changed(layer, **dict(zip("qkv", map(of.get, types), strict=True))).values())
    kept = found[1 : 1 + len(parts)]
    assert names(found) == WHOLE.replace(
        "product_rope_append", " ".join(["product_rope_append"] * len(parts))
    )
    assert [(s.spec.constants[0], s.fields["n_row"]) for s in kept] == parts
    firsts = np.cumsum([0, *(n_row for _, n_row in parts)])
    assert [s.fields["first"] for s in kept] == firsts[:-1].tolist()
    assert [s.sync for s in kept] == [*[False] * (len(parts) - 1), True]
    same = [{k: v for k, v in s.fields.items() if k not in ("first", "n_row")} for s in kept]
    assert all(fields == same[0] for fields in same)
    assert found[1 + len(parts)].fields["early"] == 1


def test_biases_of_q_k_and_v_are_added(layer):
    biased = changed(layer, q={"bias": 7}, k={"bias": 8}, v={"bias": 9})
    keep = launched(biased.values())[1]
    assert [keep.fields[name] for name in ("bias", "bias2", "bias3")] == [7, 8, 9]


def test_what_a_norm_is_of_may_have_a_bias_and_be_new(layer):
    found = launched(changed(layer, down={"bias": 7, "add": 0}).values())
    assert names(found) == WHOLE
    assert (found[5].fields["bias"], found[5].fields["add"]) == (7, 0)


@pytest.mark.parametrize("neox", [0, 1])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_constants_are_those_of_the_ops(layer, activation, neox):
    other = changed(layer, gated=("quantised", activation), rope=(HEAD_DIM, neox, *F16))
    found = launched(other.values())
    assert found[1].spec.constants == ("Q8_0", neox)
    assert found[4].spec.constants == ("Q8_0", activation)


def test_packed_rows_go_to_the_two_halves_in_turn(layer, at):
    one = at.packed.ctypes.data
    other = one ^ HALF
    _, *found = launched([*layer.values()][9:14] * 2 + [layer["last_norm"], layer["logits"]])
    assert names(found) == "product_gate product_norm " * 2 + "products"
    assert [step.fields["packed"] for step in found] == [one, other, one, other, one]
    assert [step.fields["to"] for step in found[:-1]] == [other, one, other, one]


GATES = f"{START} product_norm products pack_rows product_norm products"
GATES_APART = f"{START} product_norm products products pack_rows product_norm products"
UNSUITED = f"{START} products pack_rows matmul matmul pack_rows product_norm products"
REST = "product_norm product_gate product_norm products"
KEPT = f"pack_rows products rope_append attend_pack {REST}"
KEPT_APART = f"pack_rows products products rope_append attend_pack {REST}"
NORM = f"{START} products pack_rows product_gate product_norm products"
ATTENDED = f"{START} pack_rows {REST}"
ATTENDED_MANY = f"pack_rows product_rope_append attend attend_merge pack_rows {REST}"
LONG, OTHER = LONGEST_NORM + 1024, 1 << 30
WIDE = {"n_out": LONG, "y_stride": LONG}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(changes, expected, id=id)
        for id, changes, expected in [
            # Matrices that do not suit.
            ("w at no multiple of 16", {"up": {"w": 8}}, UNSUITED),
            ("rows", {"up": {"n_out": 504, "y_stride": 504}}, UNSUITED),
            ("pieces", {"ffn_norm": {"n": 160}, "gate": {"n_in": 160}, "up": {"n_in": 160}},
             UNSUITED),
            ("stride", {"gate": {"y_stride": 1024}}, UNSUITED),
            ("elements", {"up": {"n_in": 512}}, UNSUITED),
            ("of other rows", {"gate": {"packed": OTHER}}, UNSUITED),
            ("floats", {"ffn_norm": ("float", "norm")}, UNSUITED),
            ("what attention packed", {"out": {"w": 8}},
             f"{START} matmul pack_rows product_gate product_norm products"),
            # Gates.
            ("bias of a gate", {"gate": {"bias": 16}}, GATES),
            ("bias of what it is for", {"up": {"bias": 16}}, GATES),
            ("added", {"gate": {"add": 1}, "up": {"add": 1}}, GATES),
            ("added to one", {"up": {"add": 1}}, GATES_APART),
            ("types of gates", {"up": ("Q4_K",)}, GATES_APART),
            ("widths of gates", {"up": {"n_out": 256, "y_stride": 256}}, GATES),
            ("gate", {"gated": {"x": OTHER}}, GATES),
            ("what it is for", {"gated": {"other": OTHER}}, GATES),
            ("record of gates", {"gated": {"step": OTHER}}, GATES),
            ("a norm of two", {"gated": ("quantised", "norm")}, GATES),
            ("float gates", {"gated": ("float", "silu")},
             f"{START} product_norm products pack_rows matmul pack_rows products"),
            # The QKV projection.
            ("norm of queries", {"rope": {"q_norm": 16}}, KEPT),
            ("norm of keys", {"rope": {"k_norm": 16}}, KEPT),
            ("queries added", {"q": {"add": 1}}, KEPT_APART),
            ("keys added", {"k": {"add": 1}},
             f"pack_rows products products products rope_append attend_pack {REST}"),
            ("values added", {"v": {"add": 1}}, KEPT_APART),
            ("part of the head", {"rope": {"n_half": 16}}, KEPT),
            ("short heads",
             {"rope": (4, 1, *F16), "rope ": {"n_half": 2, "n_head": 64, "n_head_kv": 32}}, KEPT),
            ("quantised keys", {"rope": (HEAD_DIM, 1, "q8_0", "f16")}, KEPT),
            ("quantised values", {"rope": (HEAD_DIM, 1, "f16", "q4_0")}, KEPT),
            ("types of what is added", {"v": ("Q4_K",), "q": {"add": 1}},
             f"pack_rows products products products rope_append attend_pack {REST}"),
            ("queries elsewhere", {"rope": {"q": OTHER}}, KEPT),
            ("keys elsewhere", {"rope": {"k": OTHER}}, KEPT),
            ("values elsewhere", {"rope": {"v": OTHER}}, KEPT),
            ("heads", {"rope": {"n_head": 2}}, KEPT),
            ("heads of keys", {"rope": {"n_head_kv": 4}}, KEPT),
            ("record of keys", {"rope": {"step": OTHER}}, KEPT),
            # A norm.
            ("long norm",
             {"out": WIDE, "ffn_norm": {"n": LONG}, "gate": {"n_in": LONG}, "up": {"n_in": LONG}},
             NORM),
            ("width of a norm",
             {"ffn_norm": {"n": 512}, "gate": {"n_in": 512}, "up": {"n_in": 512}}, NORM),
            ("normed is another row", {"ffn_norm": {"x": OTHER}}, NORM),
            ("record of a norm", {"ffn_norm": {"step": OTHER}}, NORM),
            ("no norm", {"ffn_norm": ("quantised", "rows")}, NORM),
            # Attention.
            ("stride of attention", {"attend": {"stride": 2}}, ATTENDED),
            ("rows of queries", {"attend": (HEAD_DIM, 2, 16, *F16)}, ATTENDED_MANY),
            ("half a warp", {"attend": (16, 2, 1, *F16)}, ATTENDED_MANY),
            ("packed is something else", {"pack": {"x": OTHER}}, ATTENDED),
            ("record of attention", {"pack": {"step": OTHER}}, ATTENDED),
            ("more is packed", {"pack": {"n": 2 * N}, "out": {"n_in": 2 * N}}, ATTENDED),
            ("parts of another row", {"merge": {"out": OTHER}}, ATTENDED),
            ("record of parts", {"merge": {"step": OTHER}}, ATTENDED),
            ("packed is more", {"pack": ("quantised", "silu")}, ATTENDED),
            ("packed as floats", {"pack": ("float", "rows")},
             f"{START} pack_rows matmul pack_rows product_gate product_norm products"),
        ]
    ],
)  # fmt: skip
def test_ops_that_do_not_fit_are_launched_as_they_are(layer, changes, expected):
    for name, change in changes.items():
        layer = changed(layer, **{name.strip(): change})
    assert names(launched(layer.values())) == expected


@pytest.mark.parametrize(
    ("buffer", "expected"), [("gate", GATES), ("up", GATES), ("k", KEPT), ("v", KEPT)]
)
def test_what_another_op_reads_is_written(layer, at, buffer, expected):
    steps = [*layer.values(), reader(getattr(at, buffer).ctypes.data)]
    assert names(launched(steps)) == f"{expected} gate"


def test_what_is_packed_once_more_is_written(layer):
    """By ops of another part of the Program, too, which is replayed by itself."""
    steps = [*layer.values(), layer["gated"]]
    private = passed_on(steps)
    assert layer["gate"].fields["y"] not in private
    found = fused([*layer.values()], private, lambda packed: packed ^ HALF, N_BLOCK)
    assert names(found) == GATES


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v", f"pack_rows products gate rope_append attend_pack {REST}"),
        ("rope", f"pack_rows product_rope_append gate attend_pack {REST}"),
        ("attend", f"{START} gate attend_merge pack_rows {REST}"),
        ("merge", f"{START} gate pack_rows {REST}"),
        ("pack", f"{START} gate matmul pack_rows product_gate product_norm products"),
        ("out", f"{START} products gate pack_rows product_gate product_norm products"),
        ("up", f"{START} product_norm products gate pack_rows product_norm products"),
    ],
)
def test_ops_with_another_one_between_them_stay_apart(layer, name, expected):
    assert names(launched(with_after(layer, name, reader(OTHER)))) == expected


def test_two_products_that_are_waited_for_apart_are_no_pair(layer):
    layer["gate"] = layer["gate"]._replace(sync=True)
    expected = f"{START} product_norm products matmul pack_rows product_norm products"
    assert names(launched(layer.values())) == expected


def test_two_products_are_not_fused_with_rope(layer):
    del layer["v"]
    layer["k"] = layer["k"]._replace(sync=True)
    assert names(launched(layer.values())) == KEPT


def test_a_norm_of_one_of_two_products_is_an_op_of_its_own(layer):
    more = layer["out"]._replace(fields=layer["out"].fields | {"y": OTHER})
    layer["out"] = layer["out"]._replace(sync=False)
    assert names(launched(with_after(layer, "out", more))) == NORM


def test_attention_in_one_part_has_nothing_to_merge(layer):
    del layer["merge"]
    assert names(launched(layer.values())) == WHOLE


@pytest.mark.parametrize("last", ["v", "attend", "merge", "pack", "up"])
def test_what_comes_after_the_last_op_is_not_known(layer, last):
    steps = [*layer.values()][: NAMES.index(last) + 1]
    assert (
        names(launched(steps))
        == {
            "v": "pack_rows products",
            "attend": START,
            "merge": START,
            "pack": START,
            "up": f"{START} product_norm products",
        }[last]
    )


def test_attention_looks_ahead_where_no_selection_is_written_before_it(layer):
    def early(steps):
        return [s.fields["early"] for s in launched(steps) if s.spec.op is ops.ATTEND_PACK]

    steps = [*layer.values()]
    attention = [layer["attend"], layer["merge"]]
    assert early(steps) == [1]
    assert early(changed(layer, rope={"q_norm": 16}).values()) == [1]  # behind an op of its own
    assert early(with_after(layer, "rope", reader(OTHER))) == [0]
    assert early(steps[5:]) == [0]  # what is before the first op is not known
    assert early([*steps[:7], *attention, *steps[7:]]) == [1, 1]
    # What has not waited for the one before it may start before a Selection is there.
    beside = reader(OTHER)._replace(sync=False)
    assert early([beside, layer["rope"], *attention]) == [0]
    assert early([beside._replace(sync=True), layer["rope"], *attention]) == [1]


@pytest.mark.parametrize(("name", "packed"), [("pack", False), (None, True)])
def test_attention_is_packed_where_its_rows_are_what_is_packed_next(layer, at, name, packed):
    steps = changed(layer, **({name: {"x": OTHER}} if name else {})).values()
    (found,) = (s for s in launched(steps) if s.spec.op is ops.ATTEND_PACK)
    assert found.fields["packed"] == (at.packed.ctypes.data if packed else 0)


@pytest.mark.parametrize(
    ("n_in", "n_out", "n_block", "together"),
    [
        (17408, 2048, 32, True),
        (17408, 2048, 16, False),  # more rows of a block than there is room for sums
        (16512, 2048, 32, False),  # of a row alone, not of two, no multiple of 16 bytes
        (16256, 2048, 1, True),
    ],
)
def test_long_rows_are_copied_one_by_one(at, n_in, n_out, n_block, together):
    program = Program()
    pack(program, at, at.x, "rows", n_in)
    multiply(program, at, n_in, zeros((1, n_out), np.float32))
    expected = "pack_rows products" if together else "pack_rows matmul"
    assert names(launched(steps_of(program), n_block)) == expected


def test_up_to_three_products_of_a_type_are_launched_together(at):
    ys = [zeros((1, n), np.float32) for n in (16, 32, 48, 64)]
    program = Program()
    pack(program, at, at.x, "rows", N)
    multiply(program, at, N, *ys)
    steps = steps_of(program)
    steps[2] = steps[2]._replace(fields=steps[2].fields | {"bias": 7})
    _, three, one = launched(steps)
    assert (three.sync, one.sync) == (False, True)
    w = [step.fields["w"] for step in steps[1:]]
    for step, first, n in ((three, 0, 3), (one, 3, 1)):
        own, ends = range(first, first + n), ("", "2", "3")
        rest = [0] * (3 - n)
        assert [step.fields[f"w{end}"] for end in ends] == [*(w[i] for i in own), *rest]
        assert [step.fields[f"n{end}"] for end in ends] == [*(ys[i].size for i in own), *rest]
        found = [step.fields[f"y{end}"] for end in ends]
        assert found == [*(ys[i].ctypes.data for i in own), *rest]
    assert [three.fields[f"bias{end}"] for end in ("", "2", "3")] == [0, 7, 0]


def test_candidates_are_what_may_be_asked_for_and_no_more():
    product, float_product = KernelSpec(ops.MATMUL, ("Q4_K",)), KernelSpec(ops.MATMUL, ("F16",))
    rotations = [
        KernelSpec(ops.ROPE_APPEND, (HEAD_DIM, 0, *types)) for types in (F16, ("q8_0", "f16"))
    ]
    attends = [KernelSpec(ops.ATTEND, (HEAD_DIM, 2, q_block, *F16)) for q_block in (1, 16)]
    packs = [KernelSpec(ops.PACK_ROWS, ("quantised", source)) for source in ("norm", "gelu")]
    rows = {KernelSpec(ops.PRODUCTS, ("Q4_K",)), KernelSpec(ops.PRODUCT_NORM, ("Q4_K",))}
    gates = {KernelSpec(ops.PRODUCT_GATE, ("Q4_K", "gelu"))}
    rows.add(KernelSpec(ops.STAGED_PRODUCTS, ("Q4_K", "packed")))
    assert candidates([product, float_product, rotations[1], attends[1]]) == rows
    assert candidates([float_product, *packs, rotations[0]]) == set()
    gates |= {KernelSpec(ops.STAGED_GATE, ("Q4_K", "gelu", x)) for x in ("norm", "packed")}
    normed = {KernelSpec(ops.STAGED_PRODUCTS, ("Q4_K", "norm"))}
    assert candidates([product, *packs]) == rows | gates | normed
    kept = {KernelSpec(ops.PRODUCT_ROPE_APPEND, ("Q4_K", 0))}
    assert candidates([product, rotations[0]]) == rows | kept
    assert candidates(attends) == {KernelSpec(ops.ATTEND_PACK, (HEAD_DIM, 2, *F16))}


def staged(layer, n_block):
    steps = list(layer.values())
    specs = {step.spec for step in steps}
    found = merged(steps, passed_on(steps), lambda packed: packed ^ HALF, n_block)
    assert {step.spec for step in found} <= candidates(specs) | specs
    assert all(tuple(step.fields) == step.spec.op.fields for step in found)
    return found


def test_some_rows_are_read_as_they_are_where_all_weights_fit_into_shared_memory(rows):
    at, layer, _ = rows
    found = staged(layer, 16)
    own = "staged_products rope_append attend attend_merge staged_products staged_gate"
    assert names(found) == f"{own} staged_products staged_products"
    sources = [step.spec.constants[-1] for step in found if step.spec.op in STAGED]
    assert sources == ["norm", "rows", "norm", "packed", "norm"]
    qkv, gate, down = found[0].fields, found[5].fields, found[6].fields
    x, one = at.x.ctypes.data, at.packed.ctypes.data
    assert (qkv["x"], qkv["other"], qkv["eps"]) == (x, at.weight.ctypes.data, 1e-5)
    assert found[4].fields["x"] == at.att.ctypes.data
    assert gate["to"] == down["x"] == one ^ HALF
    n_byte = N // 32 * 34
    assert qkv["n_shared"] == staged_room(n_byte, N, 2, packed=False)  # 32 tiles of 16 blocks
    assert down["n_shared"] == staged_room(N_FF // 32 * 34, N_FF, 1, packed=True)


def test_rows_are_packed_where_weights_do_not_fit_or_outputs_overwrite_them(rows):
    at, layer, _ = rows
    found = staged(layer, 2)  # blocks have up to 32 tiles of the gate, and of the logits
    assert names(found).startswith("staged_products rope_append")
    assert (
        names(found[4:]) == "staged_products pack_rows product_gate staged_products pack_rows "
        "products"
    )
    over = changed(layer, v={"y": at.x.ctypes.data + 64})
    assert names(staged(over, 16)).startswith("pack_rows staged_products rope_append")
    other = changed(layer, norm={"step": at.other_step.ctypes.data})
    assert names(staged(other, 16)).startswith("pack_rows staged_products rope_append")


def test_attention_of_a_batchs_rows_looks_its_keys_up_early_where_nobody_writes_them(layer):
    steps = [layer["rope"], layer["attend"], layer["merge"]]
    found = of_rows(steps, [range(3)])
    assert names(found) == "rope_append attend_pack attend_merge"
    assert found[1].fields == layer["attend"].fields | {"packed": 0, "early": 1}
    assert [step.sync for step in found] == [step.sync for step in steps]
    assert of_rows([layer["rope"], reader(1), *steps[1:]], [range(4)])[2].fields["early"] == 0
    assert of_rows(steps, [range(1), range(1, 3)])[1].fields["early"] == 0
    assert of_rows(steps, []) == steps
