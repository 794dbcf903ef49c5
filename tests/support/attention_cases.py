"""Cases of ATTEND with a NumPy oracle: heads, a paged KV cache of each type, selections."""

from dataclasses import dataclass

import numpy as np
from guarded import is_on_gpu, runs, step_of

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.types import KV_BLOCK, PAGE, kv_row, kv_type


@dataclass(frozen=True)
class Heads:
    """One compiled ATTEND, and the heads it is called for."""

    head_dim: int
    group: int  # query heads of a row
    q_block: int
    n_row: int
    heads_per_kv: int

    @property
    def n_head(self):
        return self.n_row * self.group

    @property
    def n_head_kv(self):
        return self.n_head // self.heads_per_kv

    def __str__(self):
        return "-".join(map(str, vars(self).values()))


# Rows per KV head, and rows per query head (group 1) or per part of a KV head's heads.
HEADS = [
    Heads(head_dim=16, group=1, q_block=1, n_row=6, heads_per_kv=3),
    Heads(head_dim=48, group=7, q_block=1, n_row=1, heads_per_kv=7),
    Heads(head_dim=64, group=2, q_block=16, n_row=3, heads_per_kv=2),
    Heads(head_dim=64, group=2, q_block=16, n_row=4, heads_per_kv=4),
    Heads(head_dim=80, group=1, q_block=16, n_row=4, heads_per_kv=2),
    Heads(head_dim=128, group=8, q_block=16, n_row=1, heads_per_kv=8),
    Heads(head_dim=256, group=4, q_block=1, n_row=2, heads_per_kv=4),
    Heads(head_dim=64, group=12, q_block=16, n_row=2, heads_per_kv=12),
]


F16 = ("f16", "f16")


# Of keys, of values. What is done with each knows little of the other: not all pairs are here.
TYPES = [F16, ("q8_0", "f16"), ("f16", "q8_0"), ("q8_0", "q8_0"), ("q4_0", "q4_0")]


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def page_table(rng, n_position, n_slot):
    """int32: a slot for each page that holds a position, -1 for the others."""
    table = np.full(n_slot, -1, np.int32)
    n_page = -(-n_position // PAGE)
    table[:n_page] = rng.permutation(n_slot)[:n_page]
    return table


def q8_0(x):
    """Rows [.., head_dim] as ggml's reference quantises them, an element at a time."""
    rows = np.zeros(x.shape[:-1], kv_row("q8_0", x.shape[-1]))
    for at in np.ndindex(x.shape[:-1]):
        for block, values in enumerate(x[at].astype(np.float32).reshape(-1, KV_BLOCK)):
            d = np.abs(values).max() / np.float32(127)
            scaled = values * (np.float32(1) / d if d else np.float32(0))
            away = [int(np.floor(abs(y) + np.float64(0.5))) * (1 if y > 0 else -1) for y in scaled]
            rows["q"][at][block * KV_BLOCK : (block + 1) * KV_BLOCK] = away
            rows["d"][at][block] = d
    return rows


def q4_0(x):
    """Rows [.., head_dim] as ggml's reference quantises them, an element at a time."""
    rows = np.zeros(x.shape[:-1], kv_row("q4_0", x.shape[-1]))
    for at in np.ndindex(x.shape[:-1]):
        for block, values in enumerate(x[at].astype(np.float32).reshape(-1, KV_BLOCK)):
            d = values[np.abs(values).argmax()] / np.float32(-8)
            scaled = values * (np.float32(1) / d if d else np.float32(0))
            n = [min(15, int(y + np.float32(8.5))) for y in scaled]
            for i in range(16):
                rows["q"][at][16 * block + i] = n[i] | n[16 + i] << 4
            rows["d"][at][block] = d
    return rows


def kept_as(x, type):
    """Rows as pages of the type have them."""
    return x.astype(np.float16) if type == "f16" else {"q8_0": q8_0, "q4_0": q4_0}[type](x)


def numbers(rows):
    """Float64 of rows of any type."""
    if rows.dtype == np.float16:
        return rows.astype(np.float64)
    q = rows["q"]
    if kv_type(rows) == "q4_0":
        blocks = q.reshape(*q.shape[:-1], -1, 16).astype(int)
        halves = np.concatenate([blocks % 16, blocks // 16], axis=-1) - 8
        q = halves.reshape(*q.shape[:-1], -1)
    return q * np.repeat(rows["d"].astype(np.float64), KV_BLOCK, axis=-1)


def unfilled(shape, type, head_dim):
    """Rows of NaN."""
    rows = np.zeros(shape, kv_row(type, head_dim))
    (rows if type == "f16" else rows["d"])[...] = np.nan
    return rows


def paged(rows, table):
    """rows [n_position, n_head_kv] of kv_row as pages by `table`; NaN where nothing is.

    Rows of float32 are kept as float16.
    """
    rows = rows.astype(np.float16) if rows.dtype == np.float32 else rows
    n_position, n_head_kv = rows.shape[:2]
    type, head_dim = kv_type(rows), numbers(rows).shape[2]
    pages = unfilled((len(table), n_head_kv, PAGE), type, head_dim)
    for j in range(n_position):
        pages[table[j // PAGE], :, j % PAGE] = rows[j]
    return pages


@dataclass(frozen=True)
class Case:
    """What a call of ATTEND reads."""

    heads: Heads
    n_tok: int
    pos: int
    block: int
    window: int
    chosen: list  # a row's block indices, ascending
    log_weight: np.ndarray | None  # f32, one an index of all rows
    q: np.ndarray
    k: np.ndarray  # kv_row [n_position, n_head_kv]
    v: np.ndarray
    k_table: np.ndarray
    v_table: np.ndarray
    row: int = 0  # of q that the first query is
    stride: int = 1  # rows, and positions, from one query to the next
    cap: float = 0.0  # these three: of ATTEND_SCORE_MOD
    slopes: np.ndarray | None = None
    ahead: int = 0

    @property
    def types(self):
        return kv_type(self.k), kv_type(self.v)

    scale = 0.2  # with normal q and k: scores of a standard deviation of 1 to 3

    def fields(self):
        heads, indptr = self.heads, np.cumsum([0, *map(len, self.chosen)])
        return {
            "step": step_of(self.n_tok, self.pos, self.row),
            "stride": self.stride,
            "q": self.q,
            "k_pages": paged(self.k, self.k_table),
            "v_pages": paged(self.v, self.v_table),
            "k_table": self.k_table,
            "v_table": self.v_table,
            "indptr": indptr.astype(np.int32),
            "indices": np.concatenate(self.chosen).astype(np.int32),
            "log_weight": self.log_weight,
            "block": self.block,
            "n_row": heads.n_row,
            "heads_per_kv": heads.heads_per_kv,
            "n_head_kv": heads.n_head_kv,
            "window": self.window,
            "scale": self.scale,
        }


def choose(rng, case_heads, n_tok, pos, stride, block):
    """Blocks of every row: the second row has none, the third all, the others about half."""
    rows = []
    for first in range(0, n_tok, case_heads.q_block):
        newest = pos + stride * (min(n_tok, first + case_heads.q_block) - 1)
        every = np.arange(newest // block + 1)
        for _ in range(case_heads.n_row):
            share = {1: 0.0, 2: 1.0}.get(len(rows), 0.5)
            rows.append(every[rng.random(len(every)) < share])
    return rows


def new_case(heads, n_tok, pos, block, *, window, weighted, row=0, stride=1, types=F16):
    rng = np.random.default_rng((heads.head_dim, heads.group, n_tok, pos, block, window))
    n = pos + stride * (n_tok - 1) + 1
    chosen = choose(rng, heads, n_tok, pos, stride, block)
    k, v = (kept_as(normal(rng, n, heads.n_head_kv, heads.head_dim), type) for type in types)
    n_slot = max(4, -(-n // PAGE))
    return Case(
        heads, n_tok, pos, block, window, chosen,
        log_weight=normal(rng, sum(map(len, chosen))) if weighted else None,
        q=normal(rng, row + stride * (n_tok - 1) + 1, heads.n_head, heads.head_dim), k=k, v=v,
        k_table=page_table(rng, n, n_slot), v_table=page_table(rng, n, n_slot), row=row,
        stride=stride,
    )  # fmt: skip


def attention(case):
    """out [n_tok, n_head, head_dim] and lse [n_tok, n_head] in float64; 0 and -inf of nothing."""
    heads = case.heads
    out = np.zeros((case.n_tok, *case.q.shape[1:]))
    lse = np.full(out.shape[:2], -np.inf)
    start = np.cumsum([0, *map(len, case.chosen)])
    k, v = numbers(case.k), numbers(case.v)
    q = case.q[case.row :: case.stride].astype(np.float64)
    for t in range(case.n_tok):
        p = case.pos + case.stride * t
        for head in range(heads.n_head):
            row = t // heads.q_block * heads.n_row + head // heads.group
            blocks = case.chosen[row]
            j = (blocks[:, None] * case.block + np.arange(case.block)).ravel()
            bias = np.zeros(len(j))
            if case.log_weight is not None:
                bias += np.repeat(case.log_weight[start[row] : start[row + 1]], case.block)
            last = min(p + case.ahead, case.pos + case.n_tok - 1) if case.ahead else p
            seen = (j <= last) & (j > p - case.window if case.window else True)
            if not seen.any():
                continue
            kv_head = head // heads.heads_per_kv
            scores = k[j[seen], kv_head] @ q[t, head] * case.scale
            if case.cap:
                scores = case.cap * np.tanh(scores / case.cap)
            if case.slopes is not None:
                scores -= case.slopes[head] * np.abs(j[seen] - p)
            scores += bias[seen]
            weights = np.exp(scores - scores.max())
            lse[t, head] = scores.max() + np.log(weights.sum())
            out[t, head] = weights @ v[j[seen], kv_head] / weights.sum()
    return out, lse


def check(found, expected, heads, types=F16):
    """Float32 sums of up to 256 products, and exponentials of scores below about 10.

    On a GPU, rows of several tokens are products of float16, and K and V of other types
    become float16: half a step of each of a score's, or of a value's (below 8, as scores are).
    Beside keys of q8_0 or q4_0, one token's queries have 15 bits on the CPU: of elements up to 4, a
    step of 1.2e-4.
    """
    out, lse = expected
    halves = is_on_gpu() and (heads.q_block > 1 or types != F16)
    bound = 2**-11 * heads.head_dim * Case.scale if halves else 2e-5
    if types[0] != "f16" and heads.q_block == 1 and not is_on_gpu():
        bound = 1.2e-4 * Case.scale * heads.head_dim**0.5
    np.testing.assert_allclose(found["out"], out, rtol=0, atol=bound)
    if "lse" in found:
        some = np.isfinite(lse)
        np.testing.assert_allclose(found["lse"][some], lse[some], rtol=0, atol=bound)
        assert (found["lse"][~some] < -1e29).all()  # so that a merge gives it no weight


def unwritten(*shape):
    return np.full(shape, np.nan, np.float32)


def check_attend(case, with_lse):
    heads, expected = case.heads, attention(case)
    constants = (heads.head_dim, heads.group, heads.q_block, *case.types)
    out = {"out": unwritten(*expected[0].shape)}
    if with_lse:
        out["lse"] = unwritten(*expected[1].shape)
    absent = [] if with_lse else ["lse"]
    scratch = ops.attend_scratch(heads.group, heads.head_dim)
    for found in runs(
        ops.ATTEND, constants, out=out, scratch=scratch, n_split=1,
        absent=["partial", *absent], **case.fields(),
    ):  # fmt: skip
        check(found, expected, heads, case.types)
    for n_split in (2, 3):
        shape = (case.n_tok, heads.n_head, n_split, heads.head_dim + 2)
        for found in runs(
            ops.ATTEND, constants, out={"partial": unwritten(*shape)}, scratch=scratch,
            n_split=n_split, absent=["out", "lse"], **case.fields(),
        ):  # fmt: skip
            check(merged(found["partial"]), expected, heads, case.types)
        for joined in runs(
            ops.ATTEND_MERGE, (heads.head_dim, 16), out=out, step=step_of(case.n_tok, case.pos),
            partial=found["partial"], n_head=heads.n_head, n_split=n_split, absent=absent,
        ):  # fmt: skip
            check(joined, expected, heads, case.types)


def check_score_mod(case):
    heads, expected = case.heads, attention(case)
    out = {"out": unwritten(*expected[0].shape), "lse": unwritten(*expected[1].shape)}
    slopes = {} if case.slopes is None else {"slopes": case.slopes.astype(np.float32)}
    for found in runs(
        ops.ATTEND_SCORE_MOD, (heads.head_dim, heads.group, heads.q_block, *case.types), out=out,
        scratch=ops.attend_scratch(heads.group, heads.head_dim), n_split=1, cap=case.cap,
        ahead=case.ahead, absent=["partial", *{"slopes"} - slopes.keys()], **slopes,
        **case.fields(),
    ):  # fmt: skip
        check(found, expected, heads, case.types)


def merged(partial):
    """The parts joined in float64."""
    sums, top, total = partial[..., :-2].astype(float), partial[..., -2], partial[..., -1]
    assert np.isfinite(partial).all()
    weight = np.exp(top.astype(float) - top.max(axis=-1, keepdims=True))
    total = (weight * total).sum(axis=-1)
    out = (weight[..., None] * sums).sum(axis=-2)
    lse = np.where(total > 0, top.max(axis=-1) + np.log(np.where(total > 0, total, 1)), -1e30)
    return {"out": out / np.where(total > 0, total, 1)[..., None], "lse": lse}
