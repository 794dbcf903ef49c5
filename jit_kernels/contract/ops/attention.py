"""RoPE, the KV append and attention over a Selection."""

from tamis.jit_kernels.contract.op import READS_NOTHING, READS_SELECTION, Address, InOut, Out, op
from tamis.jit_kernels.contract.types import KV_BLOCK, PAGE

MAX_Q_BLOCK = 16  # the most queries that a row of ATTEND's Selection stands for


class RopeTable:
    """cos and sin of (pos + i) * inv_freq, times scale (RoFormer, arXiv 2104.09864, Eq. 34)."""

    step: Address
    inv_freq: Address  # f64 [n_half]
    cos: Out[Address]  # f32 [n_tok, n_half]
    sin: Out[Address]  # f32 [n_tok, n_half]
    n_half: int
    scale: float


ROPE_TABLE = op("attention.rope", RopeTable)


class RopeHeads:
    """RMS norm and RoPE of heads, in place; order: the first of both, "norm" or "rope"."""

    step: Address
    x: InOut[Address]  # f32 [n_tok, n_head, head_dim]
    norm: Address  # f32 [head_dim], or [n_head, head_dim], or 0: none
    cos: Address  # f32 [n_tok, n_half]
    sin: Address  # f32 [n_tok, n_half]
    n_head: int
    norm_step: int  # elements from one head's weights to the next's
    n_half: int
    eps: float


ROPE_HEADS = op("attention.rope", RopeHeads, "head_dim neox order")


class PlaceHeads:
    """y[t, h] = x[t, source[h]], truncated or zero-padded; all zeros where source[h] < 0."""

    step: Address
    x: Address  # f32 [n_tok, n_x, x_dim]
    source: Address  # int32 [n_y]
    y: Out[Address]  # f32 [n_tok, n_y, y_dim]
    n_x: int
    n_y: int
    x_dim: int
    y_dim: int


PLACE_HEADS = op("attention.rope", PlaceHeads)


class AddPositions:
    """x += row pos + i of the table: learned positions, or one row for all."""

    step: Address
    x: InOut[Address]  # f32 [n_tok, n]
    table: Address  # f32, rows of n
    n: int
    stride: int  # elements from a position's row to the next one's; 0: one row


ADD_POSITIONS = op("attention.rope", AddPositions)


class ScaleByPosition:
    """x *= 1 + scale * log(1 + floor((pos + i + offset) / length)).

    Attention temperature tuning: queries grow with the number of keys that they see.
    """

    step: Address
    x: InOut[Address]  # f32 [n_tok, n]
    n: int
    length: int
    scale: float
    offset: float


SCALE_BY_POSITION = op("attention.rope", ScaleByPosition)


class RopeAppend:
    """QK norm and RoPE of new tokens' heads, in place, and the KV append at positions pos.. .

    RoPE rotates pairs (i, i + n_half) where neox, else (2i, 2i + 1); elements from 2 * n_half on
    stay. Pages hold float16, q8_0 (ggml's: d = largest / 127, each element to the nearest multiple,
    ties away from 0) or q4_0 (ggml's: d = the element of largest magnitude / -8, x / d + 8.5 cut
    off, at most 15). type_k, type_v: of the pages, one of KV_TYPES; an op that has no such constant
    reads float16.
    """

    step: Address
    q: InOut[Address]  # f32 [n_tok, n_head, head_dim]
    k: InOut[Address]  # f32 [n_tok, n_head_kv, head_dim]
    v: Address  # f32 [n_tok, n_head_kv, head_dim]
    q_norm: Address  # f32 [head_dim], weights of the RMS norm, or 0: none
    k_norm: Address  # f32 [head_dim], or 0
    cos: Address  # f32 [n_tok, n_half]
    sin: Address  # f32 [n_tok, n_half]
    k_pages: Out[Address]  # see KVView
    v_pages: Out[Address]
    k_table: Address
    v_table: Address
    n_head: int
    n_head_kv: int
    n_half: int
    eps: float


ROPE_APPEND = op("attention.rope", RopeAppend, "head_dim neox type_k type_v", reads=READS_NOTHING)


class Attend:
    """Attention of queries over the selected blocks of a layer's pages.

    Row r of the Selection holds query heads [r * group, (r + 1) * group), all of KV head r * group
    // heads_per_kv. Position j takes part for a query at p if p - window < j <= p. Query t is row
    step.row + stride * t of q, at position pos + stride * t; out and lse have row t. A head without
    any position gets 0, and an lse below -1e29 (it has no weight in a merge). q_block: query tokens
    of a row of the Selection, at most MAX_Q_BLOCK. If it is 1 and keys are quantised, queries are
    rounded to 15 bits, with one scale per KV_BLOCK.
    """

    step: Address
    q: Address  # f32 [n_tok, n_head, head_dim]
    k_pages: Address  # see KVView
    v_pages: Address
    k_table: Address
    v_table: Address
    indptr: Address  # the Selection, see types.Selection
    indices: Address
    log_weight: Address  # f32, added to a block's logits, or 0
    block: int  # positions of a block of the Selection
    n_row: int  # rows of the Selection for each query block
    heads_per_kv: int
    n_head_kv: int
    window: int  # 0: no lower end
    n_split: int  # split-KV parts of a row's work; above 1, ATTEND_MERGE writes out and lse
    stride: int  # rows and positions from one query to the next
    # f32 [n_tok, n_head, n_split, head_dim + 2]: for each part its sum, maximum and normaliser
    partial: Out[Address]
    out: Out[Address]  # f32 like q; on a GPU a row of one query is merged at once, if it has an out
    lse: Out[Address]  # f32 [n_tok, n_head], or 0
    scratch: Out[Address]  # n_thread * attend_scratch(group, head_dim) bytes
    scale: float


ATTEND = op(
    "attention.attend", Attend, "head_dim group q_block type_k type_v", reads=READS_SELECTION
)


class AttendScoreMod(Attend):
    """ATTEND with modified scores, or whose queries see further.

    A score x of a head becomes cap * tanh(x / cap), if cap is not 0, and then gets slopes[head]
    times minus the distance of key and query (ALiBi, Press et al. 2021, arXiv 2108.12409). Position
    j takes part if p - window < j <= p + ahead. n_split is 1; queries are not rounded.
    """

    cap: float
    slopes: Address  # f32 [n_head], or 0
    ahead: int  # later positions that a query sees, if they exist


ATTEND_SCORE_MOD = op(
    "attention.score_mod",
    AttendScoreMod,
    "head_dim group q_block type_k type_v",
    reads=READS_SELECTION,
)


class AttendMerge:
    """Merge the n_split parts of each head.

    q_block is ATTEND's: for 1, a GPU has merged already.
    """

    step: Address
    partial: Address  # f32 [n_tok, n_head, n_split, head_dim + 2]
    out: Out[Address]  # f32 [n_tok, n_head, head_dim]
    lse: Out[Address]  # f32 [n_tok, n_head], or 0
    n_head: int
    n_split: int


ATTEND_MERGE = op("attention.attend", AttendMerge, "head_dim q_block")


class AttendSink:
    """out *= 1 / (1 + exp(sink - lse)): each head has a key with a score and no value.

    If heads attend to several parts of the keys separately, the first part's rows become the mean
    of all, each weighted by exp(lse), the sink's value being 0.
    """

    step: Address
    sinks: Address  # f32 [n_head]
    lse: Address  # f32 [n_tok, n_part, n_head], as ATTEND leaves it
    out: InOut[Address]  # f32 [n_tok, n_part, n_head, head_dim]
    n_head: int
    head_dim: int
    n_part: int


ATTEND_SINK = op("attention.sink", AttendSink)


def attend_scratch(group: int, head_dim: int) -> int:
    """Bytes of scratch that ATTEND needs per thread: queries, sums and scores, a page in float32.

    For one token's queries also what q8_0 and q4_0 need: 16-bit copies, and weights per KV_BLOCK.
    """
    n_query, n_block = MAX_Q_BLOCK * group, -(-head_dim // KV_BLOCK)
    a_query, a_key = 2 * head_dim + PAGE + 4, 2 * head_dim + 10 + n_block
    quantised = group * (head_dim // 2 + n_block * (PAGE + 1))
    return 4 * (n_query * a_query + PAGE * a_key + quantised) + 64 * 5
