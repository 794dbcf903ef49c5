"""Fusion: which neighbouring ops of few rows a GPU runs in one launch.

A launch waits for the last block of the one before it, looks up its rows, and has no weights in
flight meanwhile: 2 to 3 us, however little it does. A Program only states what is computed, so that
recording is independent of this. Fused ops are ops of the contract that no Program names, on GPUs
that copy in bulk (sm_90).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.contract.ops import (
    ATTEND,
    ATTEND_MERGE,
    ATTEND_PACK,
    MATMUL,
    PACK_ROWS,
    PRODUCT_GATE,
    PRODUCT_NORM,
    PRODUCT_ROPE_APPEND,
    PRODUCTS,
    ROPE_APPEND,
    STAGED_GATE,
    STAGED_PRODUCTS,
    packed_form,
)
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cuda.lang.scratch import (
    CHUNK,
    DEPTH,
    LONGEST_HEAD,
    LONGEST_NORM,
    ROOM,
    SOME_ROWS,
    STAGED_ROOM,
    STAGED_ROWS,
    STAGED_TILES,
    WORKERS,
    bundle_of,
    heads_of,
    staged_room,
)

# Ops that are launched before attention and write neither Selections nor tables.
_KEEP_SELECTIONS = {PRODUCT_ROPE_APPEND, ROPE_APPEND, ATTEND_PACK}


class Step(NamedTuple):
    """One op of a replay: its kernels, its fields, and whether what follows waits for it."""

    spec: KernelSpec
    fields: dict[str, Any]
    sync: bool


class _Rows(NamedTuple):
    """The location of a packed row, and the norm or gate that its products still need."""

    packed: int
    normed: int
    eps: float


def candidates(specs: Iterable[KernelSpec]) -> set[KernelSpec]:
    """The kernels that `fused` and `merged` may use for Programs of these kernels."""
    specs, found = list(specs), set()
    sources = {str(s.constants[1]) for s in specs if s.op is PACK_ROWS} & {"rows", "norm"}
    gates = {s.constants[1] for s in specs if s.op is PACK_ROWS} & {"silu", "gelu"}
    rotations = {s.constants[1] for s in specs if s.op is ROPE_APPEND and _keeps_f16(s)}
    for spec in specs:
        if spec.op is MATMUL and packed_form(str(spec.constants[0])) == "quantised":
            found |= {
                KernelSpec(PRODUCTS, spec.constants),
                KernelSpec(PRODUCT_NORM, spec.constants),
            }
            found |= {KernelSpec(PRODUCT_GATE, (*spec.constants, gate)) for gate in gates}
            for source in (*sources, "packed"):
                found.add(KernelSpec(STAGED_PRODUCTS, (*spec.constants, source)))
                found |= {KernelSpec(STAGED_GATE, (*spec.constants, g, source)) for g in gates}
            found |= {
                KernelSpec(PRODUCT_ROPE_APPEND, (*spec.constants, rotation))
                for rotation in rotations
            }
        if spec.op is ATTEND and _is_few(spec):
            found.add(_packing(spec))
    return found


def _is_few(spec: KernelSpec) -> bool:
    """Whether an ATTEND's rows are one query, and its blocks have whole warps of elements."""
    head_dim, group, q_block = (int(x) for x in spec.constants[:3])
    whole = heads_of(group) * head_dim % 64 == 0
    return q_block == 1 and whole and head_dim <= LONGEST_HEAD


def merges_nothing(spec: KernelSpec) -> bool:
    """Whether a kernel is an ATTEND_MERGE of rows of one query, whose parts ATTEND has merged."""
    return spec.op is ATTEND_MERGE and spec.constants[1] == 1


def _packing(spec: KernelSpec) -> KernelSpec:
    head_dim, group, _, *types = spec.constants
    return KernelSpec(ATTEND_PACK, (head_dim, group, *types))


def passed_on(steps: Sequence[Step]) -> set[int]:
    """The addresses of a Program's products that only the following ops read."""
    written, read, named = Counter[int](), Counter[int](), set[Any]()
    for step in steps:
        fields = step.fields
        if step.spec.op is MATMUL:
            written[fields["y"]] += 1
        elif step.spec.op is PACK_ROWS:
            read.update({fields["x"], fields["other"]})
        elif step.spec.op is ROPE_APPEND:
            read.update({fields["q"], fields["k"], fields["v"]})
        else:
            named.update(fields.values())
    return {y for y, n in written.items() if n == read[y] and y not in named}


def fused(
    steps: Sequence[Step], private: set[int], other: Callable[[int], int], n_block: int
) -> list[Step]:
    """The ops of a replay of few rows, with fewer launches.

    private: the `passed_on` addresses of the whole Program; other: for the address of a packed row,
    that of the second buffer of its pair; n_block: of a launch.
    """
    found: list[Step] = []
    made: _Rows | None = None  # the rows that the next PACK_ROWS would have made
    i = 0
    while i < len(steps):
        products = _products(steps, i, n_block)
        if not products:
            attended = _attended(steps, i, found)
            if attended:
                found.append(attended)
                packed, after = attended.fields["packed"], steps[i + 1 : i + 2]
                i += 2 if after and merges_nothing(after[0].spec) else 1
                made = _Rows(packed, 0, 0.0) if packed else None
                continue
            if made is None:
                found.append(steps[i])
            i, made = i + 1, None
            continue
        rows = made
        if rows is None:
            found.append(steps[i])
            rows = _Rows(steps[i].fields["packed"], 0, 0.0)
        i, made = i + 1 + len(products), None
        following = steps[i] if i < len(steps) else None
        kept = following and _kept(rows, products, following, private)
        if kept:
            found += kept
            i += 1
        elif following and _products(steps, i, n_block):
            to = other(rows.packed)
            one = _normed(rows, products, following, to)
            made = _Rows(to, int(one is not None), following.fields["eps"])
            one = one or _gated(rows, products, following, to, private)
            made = made if one else None
            found += [one] if one else _plain(rows, products)
        else:
            found += _plain(rows, products)
    return found


def merged(
    steps: Sequence[Step], private: set[int], other: Callable[[int], int], n_block: int
) -> list[Step]:
    """The ops of a replay of some rows: neighbouring products of the same rows are one launch.

    A gate and its other branch are merged, too, and their result is packed. Products whose weights
    fit into shared memory read unpacked rows and norm them themselves. Parameters: see `fused`.
    """
    found: list[Step] = []
    made, i = 0, 0  # the address of the rows that the next PACK_ROWS would have made
    while i < len(steps):
        products = _products(steps, i, 0)
        if not products:
            assert not made
            found.append(steps[i])
            i += 1
            continue
        packing, packed = steps[i], made
        rows = _Rows(made or packing.fields["packed"], 0, 0.0)
        i += 1 + len(products)
        one, following = None, _products(steps, i, 0)
        if following and products[0].fields["n_out"] % DEPTH == 0:
            one = _gated(rows, products, steps[i], other(rows.packed), private)
        made = one.fields["to"] if one else 0
        launches = [one] if one else _plain(rows, products)
        own = [] if packed else [_staged(step, packing, n_block) for step in launches]
        if packed or None in own:  # the readers of packed rows are there, or cannot be spared
            found += [] if packed else [packing]
            own = [_staged(step, None, n_block) for step in launches]
        found += [
            step if staged is None else staged for step, staged in zip(launches, own, strict=True)
        ]
    return found


def _staged(step: Step, packing: Step | None, n_block: int) -> Step | None:
    """The products of a launch whose weights fit a block's shared memory; or None.

    packing: the PACK_ROWS whose unpacked rows are read; None: packed ones are.
    """
    fields, spec = step.fields, step.spec
    is_gate, n_in = spec.op is PRODUCT_GATE, fields["n_in"]
    kind = GGMLType[str(spec.constants[0])]
    n_byte, n_group = n_in // kind.block_size * kind.type_size, 2 if is_gate else 1
    n_row = 2 * fields["n"] if is_gate else fields["n"] + fields["n2"] + fields["n3"]
    n_tile = n_group * -(-n_row // (STAGED_ROWS * n_group * n_block))
    room = staged_room(n_byte, n_in, n_tile, packed=packing is None)
    if n_tile > STAGED_TILES or room > STAGED_ROOM or n_row % (STAGED_ROWS * n_group):
        return None
    x = {"x": fields["packed"], "other": 0, "eps": 0.0}
    source = "packed"
    if packing is not None:
        source, after = str(packing.spec.constants[1]), packing.fields
        x = {name: after[name] for name in x}
        ends = [fields["to"]] if is_gate else [fields[name] for name in ("y", "y2", "y3")]
        if source not in ("rows", "norm") or after["step"] != fields["step"]:
            return None
        if any((x["x"] % 16, x["other"] % 16)) or any(_overlap(x["x"], n_in, y) for y in ends):
            return None
    op = STAGED_GATE if is_gate else STAGED_PRODUCTS
    staged = _step(KernelSpec(op, (*spec.constants, source)), **fields | x, n_shared=room)
    return staged._replace(sync=step.sync)


def _overlap(x: int, n: int, y: int) -> bool:
    """Whether an output begins within rows of x, which blocks read until the last one ends."""
    return x <= y < x + 4 * n * SOME_ROWS


def _attended(steps: Sequence[Step], i: int, before: Sequence[Step]) -> Step | None:
    """ATTEND_PACK, if the i-th op is attention of one query per row; else None.

    before: the launches before it.
    """
    spec, fields, _ = steps[i]
    if spec.op is not ATTEND or not _is_few(spec):
        return None
    early = int(_writes_no_selection(before))
    return _step(_packing(spec), **fields, packed=_packed(steps, i), early=early)


def _writes_no_selection(before: Sequence[Step]) -> bool:
    """Whether no earlier launch that may still run writes a Selection or a table."""
    beside: list[Step] = []  # none of them waits for another
    for step in reversed(before):
        if beside and step.sync:
            break
        beside.append(step)
    return bool(beside) and all(step.spec.op in _KEEP_SELECTIONS for step in beside)


def of_rows(steps: Sequence[Step], parts: Iterable[range]) -> list[Step]:
    """A sequence's ops as they are launched for the rows of a batch, part by part.

    Attention of one query looks up its keys while the launch before is still running.
    """
    found = list(steps)
    for part in parts:
        for i in part:
            spec, fields, sync = steps[i]
            if spec.op is ATTEND and _is_few(spec):
                early = int(_writes_no_selection(steps[part.start : i]))
                one = _step(_packing(spec), **fields, packed=0, early=early)
                found[i] = one._replace(sync=sync)
    return found


def _packed(steps: Sequence[Step], i: int) -> int:
    """The address to which attention's rows of the i-th op are packed next, unchanged; or 0."""
    spec, fields, _ = steps[i]
    ends = fields["out"], fields["step"]
    after = list(steps[i + 1 : i + 3])
    if after and after[0].spec.op is ATTEND_MERGE:
        if (after[0].fields["out"], after[0].fields["step"]) != ends:
            return 0
        del after[0]
    if not after or after[0].spec != KernelSpec(PACK_ROWS, ("quantised", "rows")):
        return 0
    row, n = after[0].fields, fields["n_row"] * int(spec.constants[0]) * int(spec.constants[1])
    found = (row["x"], row["step"], row["n"]) == (*ends, n) and fields["stride"] == 1
    return int(row["packed"]) if found else 0


def _products(steps: Sequence[Step], i: int, n_block: int) -> list[Step]:
    """The products of the rows that the i-th op packs, if it does and all of them are suitable.

    n_block: of a launch of few rows, 0: of some.
    """
    if i >= len(steps):
        return []
    spec, packing, _ = steps[i]
    if spec.op is not PACK_ROWS or spec.constants[0] != "quantised":
        return []
    found = []
    for step in steps[i + 1 :]:
        fields = step.fields
        if step.spec.op is not MATMUL or fields["packed"] != packing["packed"]:
            return []
        if fields["n_in"] != packing["n"] or not _suits(step, n_block):
            return []
        found.append(step)
        if step.sync:
            return found
    return []


def _suits(step: Step, n_block: int) -> bool:
    """Whether a matrix's pieces can be copied in bulk, and its rows divide evenly."""
    kind, fields = GGMLType[str(step.spec.constants[0])], step.fields
    n_in, n_out = fields["n_in"], fields["n_out"]
    size, is_long = n_in // kind.block_size * kind.type_size, n_in > WORKERS * CHUNK
    piece = size if is_long else bundle_of(kind.name) * size
    return (
        fields["w"] % 16 == piece % 16 == n_out % 16 == 0
        and fields["y_stride"] == n_out
        # Up to three of them share a launch, and get half of the blocks each.
        and (not is_long or n_block == 0 or 6 * n_out // n_block + 32 <= ROOM)
    )


def _x_of(rows: _Rows, product: Step) -> dict[str, Any]:
    own = {name: product.fields[name] for name in ("step", "n_in", "scratch")}
    return own | rows._asdict()


def _step(spec: KernelSpec, **fields: Any) -> Step:
    return Step(spec, {name: fields[name] for name in spec.op.fields}, True)


def _plain(rows: _Rows, products: list[Step]) -> list[Step]:
    """PRODUCTS of up to three neighbours of the same type."""
    groups = [
        group[i : i + 3]
        for _, alike in itertools.groupby(products, lambda p: (p.spec, p.fields["add"]))
        for group in [list(alike)]
        for i in range(0, len(group), 3)
    ]
    found = []
    for group in groups:
        fields = _x_of(rows, group[0]) | {"add": group[0].fields["add"]}
        for i, end in enumerate(("", "2", "3")):
            own = group[i].fields if i < len(group) else {"w": 0, "bias": 0, "y": 0, "n_out": 0}
            fields |= {f"w{end}": own["w"], f"bias{end}": own["bias"], f"y{end}": own["y"]}
            fields[f"n{end}"] = own["n_out"]
        step = _step(KernelSpec(PRODUCTS, group[0].spec.constants), **fields)
        found.append(step._replace(sync=group is groups[-1]))
    return found


def _normed(rows: _Rows, products: list[Step], packing: Step, to: int) -> Step | None:
    """PRODUCT_NORM, if the only product is the row that is normed next; else None."""
    fields, after = products[0].fields, packing.fields
    if len(products) > 1 or packing.spec.constants[1] != "norm" or after["n"] > LONGEST_NORM:
        return None
    if (fields["y"], fields["n_out"], fields["step"]) != (after["x"], after["n"], after["step"]):
        return None
    return _step(
        KernelSpec(PRODUCT_NORM, products[0].spec.constants), **_x_of(rows, products[0]),
        w=fields["w"], bias=fields["bias"], y=fields["y"], n=fields["n_out"], add=fields["add"],
        weight=after["other"], to=to,
    )  # fmt: skip


def _gated(
    rows: _Rows, products: list[Step], packing: Step, to: int, private: set[int]
) -> Step | None:
    """PRODUCT_GATE, if the products are just a gate and its other branch; else None."""
    activation, after = packing.spec.constants[1], packing.fields
    if len(products) != 2 or activation not in ("silu", "gelu"):
        return None
    one, two = products[0].fields, products[1].fields
    if (products[0].spec, one["n_out"], one["y"], two["y"], one["step"]) != (
        products[1].spec, two["n_out"], after["x"], after["other"], after["step"]
    ):  # fmt: skip
        return None
    if any(f["bias"] or f["add"] or f["y"] not in private for f in (one, two)):
        return None
    spec = KernelSpec(PRODUCT_GATE, (*products[0].spec.constants, activation))
    x = _x_of(rows, products[0])
    return _step(spec, **x, w=one["w"], w2=two["w"], n=one["n_out"], to=to)


def _keeps_f16(spec: KernelSpec) -> bool:
    return spec.constants[2:] == ("f16", "f16")


def _kept(rows: _Rows, products: list[Step], rope: Step, private: set[int]) -> list[Step]:
    """PRODUCT_ROPE_APPEND of each type, if ROPE_APPEND comes next, on unchanged products."""
    if rope.spec.op is not ROPE_APPEND or not _keeps_f16(rope.spec) or len(products) != 3:
        return []
    (q, k, v), after = (product.fields for product in products), rope.fields
    ys, rotated = (q["y"], k["y"], v["y"], q["step"]), itemgetter("q", "k", "v", "step")(after)
    head_dim, neox = rope.spec.constants[:2]
    widths = after["n_head"] * head_dim, *2 * (after["n_head_kv"] * head_dim,)
    if (
        ys != rotated
        or (q["n_out"], k["n_out"], v["n_out"]) != widths
        or (2 * after["n_half"], head_dim % 8) != (head_dim, 0)
        or after["q_norm"] or after["k_norm"] or q["add"] or k["add"] or v["add"]
        or not {k["y"], v["y"]} <= private
    ):  # fmt: skip
        return []
    names = "cos", "sin", "n_half", "k_pages", "v_pages", "k_table", "v_table"
    fields = _x_of(rows, products[0]) | {name: after[name] for name in names} | {
        "w": q["w"], "w2": k["w"], "w3": v["w"],
        "bias": q["bias"], "bias2": k["bias"], "bias3": v["bias"],
        "q": q["y"], "n": q["n_out"], "n2": k["n_out"],
    }  # fmt: skip
    found, first = [], 0
    for spec, group in itertools.groupby(products, lambda product: product.spec):
        n_row = sum(product.fields["n_out"] for product in group)
        spec = KernelSpec(PRODUCT_ROPE_APPEND, (*spec.constants, neox))
        found.append(_step(spec, **fields, first=first, n_row=n_row))
        first += n_row
    return [step._replace(sync=step is found[-1]) for step in found]
