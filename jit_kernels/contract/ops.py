"""The op contract: every op once, its argument struct and its compile-time constants, no body.

A kernel of either backend is built by a function with the op's name in the op's file
(`cpu/<file>.py`, `cuda/<file>.py`), called with the op's constants as keywords; it returns a
function `kernel(tid, n_thread, *fields)`. A field whose name ends in "_f" is a float (float64 in
the struct, float32 in the kernel), every other one an int64: an address or a count.

`step` is the address of the int64 record that changes per call: see STEP.
Shapes: x [n_tok, n] means n_tok rows of n elements, row-major; n_tok is read from step.
"""

from typing import NamedTuple

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.contract.types import KV_BLOCK, PAGE


class Op(NamedTuple):
    """One op: its name, the file of its kernels, its constants and its argument struct."""

    name: str
    file: str
    constants: tuple[str, ...]
    fields: tuple[str, ...]


class _Step(NamedTuple):
    """Byte offsets of the step record."""

    n_tok: int  # rows of this call
    pos: int  # position of the first row
    row: int  # first row of x that the op reads (the output head reads a slice of the chunk)
    begin: int  # position of the first token of the prompt that the chunk is of
    end: int  # position after its last token


STEP = _Step(0, 8, 16, 24, 32)
STEP_SIZE = 5


class _CisMeta(NamedTuple):
    """Byte offsets of what CIS remembers of a row: int64s."""

    next: int  # position that continues the block; any other one starts a new block
    begin: int  # position of the block's first step
    n_ref: int  # references of this block
    n_retrieval: int  # counted, never reset by a kernel
    n_step: int


CIS_META = _CisMeta(0, 8, 16, 24, 32)


class _LfpsMeta(NamedTuple):
    """Byte offsets of what LFPS remembers of a row: int64s."""

    next: int  # position that continues the tables; for any other one they are made anew
    bypassed: int  # 1 where the last step bypassed the row
    n_bypass: int  # counted, never reset by a kernel
    n_step: int
    n_scanned: int  # keys read, over all steps
    n_seen: int  # keys that dense attention would have read


LFPS_META = _LfpsMeta(0, 8, 16, 24, 32, 40)


class _LfpsStats(NamedTuple):
    """Byte offsets of the numbers of a row's tables: float64s."""

    scale: int  # a score is its table's entry times scale
    ver: int  # four power sums of the vertical table's entries
    sla: int  # and of the slash table's


LFPS_STATS = _LfpsStats(0, 8, 40)
LFPS_STATS_SIZE = 9


class _KVState(NamedTuple):
    """Byte offsets of what is known of the frames of keys and values: int64s."""

    n_pass: int  # passes that KV_CLAIM has begun
    serial: int  # of the next KV_TAKE: what pages are marked with that it is to bring; from 1 on
    n_missing: int  # pages that the last KV_TAKE gave frames to
    n_hit: int  # pages that were in frames when they were asked for; counted, never reset
    n_miss: int  # and those that were not


KV_STATE = _KVState(0, 8, 16, 24, 32)
KV_STATE_SIZE = 5


class _AuditFields(NamedTuple):
    """Entries of a head's audit, float64 each."""

    n_seen: int  # positions that dense attention reads
    n_kept: int  # of these, the Selection's
    mass: int  # share of dense attention's weights that they hold
    best_mass: int  # share that as many of the largest weights hold
    recall: int  # share of those largest that are kept
    error: int  # |out - dense|, Euclidean
    norm: int  # |dense|
    entropy: int  # of dense attention's weights, in nats
    kept_entropy: int  # of the kept ones, scaled to sum to 1
    max_k: int  # the longest key, the longest value; 0 but for the first query head of a KV head
    max_v: int


AUDIT = _AuditFields(*range(11))


def _op(file: str, name: str, constants: str, fields: str) -> Op:
    return Op(name, file, tuple(constants.split()), tuple(fields.split()))


# Decoding weights and multiplying by them. type: the ggml type's name.

# table: [n_vocab] rows of n elements in their ggml encoding; ids int32 [n_tok];
# y f32 [n_tok, n] = row * scale.
EMBED = _op("linear.embed", "embed", "type", "step ids table y n scale_f")

# Rows for MATMUL. source: what a row is made of, of x f32 [n_tok, n] from row step.row on: "rows",
# x itself; "norm", x / sqrt(mean(x^2) + eps) * other f32 [n] (Zhang and Sennrich 2019, arXiv
# 1910.07467, Eq. 4); "silu" or "gelu", silu(x) * other or gelu_tanh(x) * other, f32 [n_tok, n].
# packed: packed_bytes(n_tok, n) at a cache line, in a form of the backend's own; form:
# packed_form(type of the weights). scratch as for MATMUL.
PACK_ROWS = _op("linear.pack", "pack_rows", "form source", "step x other packed n scratch eps_f")
# y [n_tok, n_out] (+)= x @ w.T + bias. packed: x [n_tok, n_in] as PACK_ROWS left it; w: n_out rows
# of n_in elements in their ggml encoding; bias f32 [n_out] or 0; add: 1 adds to y; y_stride in
# elements; scratch: n_thread * matmul_scratch(n_in) bytes.
MATMUL = _op(
    "linear.matmul", "matmul", "type", "step packed w bias y n_in n_out y_stride add scratch"
)

# What a GPU runs in one launch instead of several of the ops above, for few rows (fusion.py): no
# Program names them, and no CPU has kernels of them. packed: rows as PACK_ROWS left them (normed
# 0), or as one of these did for a norm (normed 1): then products are divided by the root of the
# mean square, which it left there too, and eps. A matrix has a multiple of 16 rows; w2, w3: more
# matrices, of n2 and n3 rows. The row of `step` is 0.
_X = "step packed normed eps_f n_in"
# y, y2, y3 (+)= rows of w @ x, of w2 @ x and of w3 @ x; n2 and n3 may be 0.
PRODUCTS = _op(
    "linear.gemv_epilogue", "products", "type", f"{_X} w w2 w3 bias bias2 bias3 y y2 y3 n n2 n3 add"
)
# y (+)= rows of w @ x, and `to` is y packed for its norm, whose weights these are.
PRODUCT_NORM = _op("linear.gemv_epilogue", "product_norm", "type", f"{_X} w bias y n add weight to")
# `to` is activation(w @ x) * (w2 @ x), packed.
PRODUCT_GATE = _op("linear.gemv_epilogue", "product_gate", "type activation", f"{_X} w w2 n to")
# Queries (n of them), keys and values (n2 of each) as ROPE_APPEND leaves them; pages are float16.
# Of these n + 2 * n2 rows, n_row from `first` on, which are whole queries, keys or values; a matrix
# of others may be 0.
PRODUCT_KEEP = _op(
    "linear.gemv_epilogue", "product_keep", "type neox",
    f"{_X} w w2 w3 bias bias2 bias3 q n n2 first n_row cos sin n_half k_pages v_pages k_table"
    " v_table",
)  # fmt: skip
# The rows of w as strips of STRIP rows, for the MATMUL of such a type (STRIP_TYPES): see
# cpu/linear/interleaved.py. n_in is a multiple of 64, n_out of STRIP.
ARRANGE = _op("linear.repack", "arrange", "type", "w strips n_in n_out")

# The n_best largest of logits f32 [n_vocab], of equal ones those with the lowest ids, and what
# makes probabilities of them. The vocabulary is cut in n_part even parts (the last ones may be
# shorter, or empty): of each, ids int32 and values f32 [n_part, n_best] in an order of the
# backend's own, id -1 and -inf where it has fewer; sums f32 [n_part, 2]: the largest logit x (at
# least -3e38), and the sum of exp(logit - x). An impossible token, whose logit is -inf, may be
# left out.
LOGIT_PARTS = _op(
    "linear.logits", "logit_parts", "", "logits ids values sums n_vocab n_best n_part"
)
# The same of all parts: best_ids int32 and best_values f32 [n_best], total f32 [2].
LOGIT_BEST = _op(
    "linear.logits", "logit_best", "", "ids values sums best_ids best_values total n_best n_part"
)

# x f32 [n_tok, rows_per_tok, n], rows from step.row on -> y f32 [n_tok, rows_per_tok, n]
# = x / sqrt(mean(x^2) + eps) * w. add: y += that (a norm that closes a residual branch).
RMS_NORM = _op("linear.norm", "rms_norm", "add", "step x w y n rows_per_tok eps_f")

# Rotary positions (Su et al. 2021, arXiv 2104.09864, Eq. 34). inv_freq f64 [n_half];
# cos, sin f32 [n_tok, n_half] of (pos + i) * inv_freq, times scale.
ROPE_TABLE = _op("attention.rope", "rope_table", "", "step inv_freq cos sin n_half scale_f")
# The heads of new tokens made ready, in place, and kept. q f32 [n_tok, n_head, head_dim] and
# k f32 [n_tok, n_head_kv, head_dim]: rms norm by q_norm and k_norm f32 [head_dim] (both may be 0:
# none), then turned by cos and sin; pairs (i, i + n_half) where neox, else (2i, 2i + 1); elements
# from 2 * n_half on stay. k and v go to positions pos.. of the pages (see KVView): as float16,
# as q8_0 (ggml's: d = largest / 127, each element to the nearest multiple, ties away from 0) or as
# q4_0 (ggml's: d = the element of largest magnitude / -8, x / d + 8.5 cut off, at most 15).
# type_k, type_v: of the pages, one of KV_TYPES; an op that has no such constant reads float16.
ROPE_APPEND = _op(
    "attention.rope",
    "rope_append",
    "head_dim neox type_k type_v",
    "step q k v q_norm k_norm cos sin k_pages v_pages k_table v_table n_head n_head_kv n_half"
    " eps_f",
)

# Attention of q f32 [n_tok, n_head, head_dim] over the selected blocks of a layer's pages;
# out f32 like q, lse f32 [n_tok, n_head] or 0. Row r of the Selection holds query heads
# [r * group, (r + 1) * group), all of KV head r * group // heads_per_kv. Position j takes part for
# a query at p where p - window < j <= p (window 0: no lower end). The work of one row is cut in
# n_split parts; where n_split > 1, out and lse are left to ATTEND_MERGE and partial f32
# [n_tok, n_head, n_split, head_dim + 2] holds each part's sum, maximum and normaliser. Where a
# GPU's row is one query and has an out, the block that ends it joins the parts at once.
# A head that no position is left for gets 0, and an lse below -1e29 (it weighs nothing in a merge).
# Query t is row step.row + stride * t of q, at position pos + stride * t; out and lse have row t.
# scratch: n_thread * attend_scratch(group, head_dim) bytes; q_block is at most MAX_Q_BLOCK.
# Where q_block is 1 and keys are quantised, queries are rounded to 15 bits, one scale a KV_BLOCK.
ATTEND = _op(
    "attention.attend",
    "attend",
    "head_dim group q_block type_k type_v",
    "step q k_pages v_pages k_table v_table indptr indices log_weight block n_row heads_per_kv"
    " n_head_kv window n_split stride partial out lse scratch scale_f",
)
# The same of one query a row, whose rows of out are also packed as by PACK_ROWS of source "rows",
# for quantised weights: see PRODUCTS; packed 0: they are not. early: the launch before it writes no
# Selection and no table.
ATTEND_PACK = _op(
    "attention.attend",
    "attend_pack",
    "head_dim group type_k type_v",
    " ".join((*ATTEND.fields, "packed", "early")),
)
# Join the n_split parts of each head: out f32 [n_tok, n_head, head_dim], lse as above. q_block is
# ATTEND's: for 1, a GPU has nothing left to do.
ATTEND_MERGE = _op(
    "attention.attend", "attend_merge", "head_dim q_block", "step partial out lse n_head n_split"
)

# One query token's attention checked against dense attention over every position that the layer's
# window allows: report f64 [n_head, len(AUDIT)]. given f32 [n_head, head_dim] is the method's
# output; the Selection and the pages are as for ATTEND; a log-weight changes what the kept weights
# are in kept_entropy only. Logits and weights are float32 as in ATTEND, their sums float64. Recall
# counts equal logits in the Selection's favour. capacity: a multiple of 16, above pos. work:
# scratch, f64 [n_thread (n_head, where that is less), audit_work(capacity, head_dim)].
AUDIT_HEADS = _op(
    "select.audit",
    "audit_heads",
    "head_dim type_k type_v",
    "step q k_pages v_pages k_table v_table indptr indices log_weight block n_row heads_per_kv"
    " n_head window capacity given report work scale_f",
)

# y = silu(gate) * up or gelu_tanh(gate) * up, f32 [n_tok, n]; activation: "silu" or "gelu".
GATE = _op("linear.activation", "gate", "activation", "step gate up y n")

# Mixture of experts. logits f32 [n_tok, n_expert] -> ids int32 and weights f32 [n_tok, n_used]:
# the n_used largest softmax probabilities, divided by their sum where norm is 1.
MOE_ROUTE = _op("linear.moe", "moe_route", "", "step logits ids weights n_expert n_used norm")
# y f32 [n_tok, n_used, n_out] = x @ w[ids].T; x f32 rows of n_in, one a token where
# x_per_slot is 0, one a (token, slot) where it is 1. w: n_expert matrices of n_out rows.
# scratch as for MATMUL. ids are from 0 to n_expert - 1.
MOE_MATMUL = _op(
    "linear.moe",
    "moe_matmul",
    "type",
    "step x w ids y n_in n_out n_used n_expert x_per_slot scratch",
)
# y f32 [n_tok, n] += sum over slots of weights * x f32 [n_tok, n_used, n].
MOE_SUM = _op("linear.moe", "moe_sum", "", "step x weights y n n_used")

# A Selection of whole blocks: those that hold one of the first n_sink positions or one of the last
# n_recent positions before each query of the row's block (n_recent 0: all of them).
SELECT_WINDOW = _op(
    "select.common", "select_window", "", "step indptr indices n_row q_block block n_sink n_recent"
)
# The middle: positions from the first n_sink, or from floor(drop * pos / 2^32), up to the last
# n_local, which are never in it. scores f32 [n_head_kv, heads, capacity], capacity a multiple of
# 256: q . k of the middle's positions for the first counts int32 [n_head_kv] of the `heads` query
# heads of a KV head (counts 0: of all), q f32 [n_head_kv, heads, head_dim]; the first of `group`
# heads has their maximum; the others of its pages of 64 get -3e38, and rows after counts may be
# written. maxima f32 [n_head_kv, heads, capacity / 16]: entry 16 i + l is the largest of positions
# l, l + 16, ... of the 256 from 256 i on, as far as they are in pages of the middle.
SCORE_KEYS = _op(
    "select.common",
    "score_keys",
    "head_dim heads group type_k",
    "step q counts k_pages k_table scores maxima n_head_kv capacity n_sink n_local drop",
)
# sets int32 [n_row, set_capacity], counts int32 [n_row]: the first n_sink positions, the last
# n_local, and the n_top best scores between them, from scores and maxima as SCORE_KEYS left them
# (rows of `group` heads); ties go to the lower position. scores is used up; order int32
# [n_row, capacity] is scratch.
SELECT_BEST = _op(
    "select.common",
    "select_best",
    "",
    "step scores maxima order sets counts n_row group capacity set_capacity n_sink n_local n_top",
)
# joined int32 [n_head_kv, joined_capacity], n_joined int32 [n_head_kv]: the positions up to pos
# that are in any set of a KV head's rows_per_kv rows, ascending; sets int32 [rows, capacity] and
# counts int32 [rows]. bits int64 [n_head_kv, n_word >= pos / 64 + 1] is scratch.
SELECT_UNION = _op(
    "select.common",
    "select_union",
    "",
    "step sets counts bits joined n_joined rows_per_kv n_head_kv capacity joined_capacity n_word",
)
# A Selection of blocks of `block` positions, scores f32 [n_row, capacity], one a block that holds a
# position up to pos: the first n_sink blocks, the last n_recent, and the n_top best scores between
# them (all blocks where they do not exceed the sum). Ties go to the lower block.
SELECT_TOP_K = _op(
    "select.common",
    "select_top_k",
    "",
    "step scores indptr indices n_row capacity block n_sink n_recent n_top",
)
# A Selection of single positions from sets int32 [n_row, capacity], ascending, the first
# counts int32 [n_row] of each row.
SELECT_PACK = _op("select.common", "select_pack", "", "sets counts indptr indices n_row capacity")

# The method `cpe` (PrHS paper). drop / 2^32 is the part of the past that a layer does not see:
# a query at t sees sinks and positions from P(t) = floor(drop * t / 2^32) on (Eq. 15), never less
# than its last n_local. The middle is what it sees between the sinks and those last n_local.
# A Selection of whole blocks: what the queries of a row's block see.
SELECT_PSAW = _op(
    "select.cpe",
    "select_psaw",
    "",
    "step indptr indices n_row q_block block n_sink n_local drop",
)
# chosen int32 [n_row]: -2 where the middle holds at most n_top positions; the most recent of the
# block's references with a cosine above tau for every head of the row (Eq. 12); else -1, and the
# row's queries become a reference. Where a KV head has a row with -1, its other rows get it too
# unless some reference's cosines are above join. refs f32 [n_row, n_block, group, head_dim]; meta
# int64 [n_row, 5], see CIS_META; a block ends after n_block steps. asking f32 [n_head_kv, heads,
# head_dim]: the queries of a KV head's rows that retrieve, one after the other, and n_asking int32
# [n_head_kv] their number: what SCORE_KEYS reads. No other row reads a key.
CIS_GATE = _op(
    "select.cpe",
    "cis_gate",
    "head_dim heads group",
    "step q refs meta chosen asking n_asking n_head_kv n_block n_sink n_local n_top drop tau_f"
    " join_f",
)
# sets int32 [n_row, set_capacity], counts int32 [n_row]: sinks, last n_local and, of the middle:
# all (chosen -2), the n_top best scores (-1), or what is left of the chosen reference's set.
# scores and maxima are SCORE_KEYS's, rows in the order of the rows that retrieve, and used up.
# A retrieved set goes, dilated (Eq. 13: the n_best best joined by radius neighbours on both sides,
# also those after pos), to ref_sets int32 [n_row, n_block, set_capacity] and ref_counts int32
# [n_row, n_block]; order int32 [n_row, capacity] is scratch. Positions are below 2^29.
CIS_SETS = _op(
    "select.cpe",
    "cis_sets",
    "",
    "step chosen meta scores maxima order ref_sets ref_counts sets counts n_row rows_per_kv group"
    " n_block capacity set_capacity n_sink n_local n_top n_best radius drop",
)

# The method `lfps` (Yao and Wang 2025), for rows of `group` query heads of the `heads` that share a
# KV head. Positions are sinks (the first n_sink), the last n_local, and the middle between them,
# which the tables are over: ver f32 [n_row, capacity] by position, sla f32 [n_row, capacity] by
# distance to the query, distance d at entry capacity - 65 - d (so that nothing is ever shifted, and
# neighbours are neighbours in both), both divided by a common scale (so that decay costs nothing).
# capacity: a multiple of 64, at least n_ctx + 64. bits int64 [n_row, 2, 2, capacity / 64 + 1]: of
# each table, which entries were above the threshold (Eq. 8) and which above the mean when they last
# changed or were looked at. stats f64 [n_row, 9], see LFPS_STATS; spread f64 [n_head]:
# sigma_h^2 / |q_h|^2 of the last prompt query; meta int64 [n_row, 6], see LFPS_META; means f32
# [n_head_kv, 2, head_dim]: of the middle's keys and values when the tables were made.
# Keep the last queries: q f32 [n_tok, n_head, head_dim] to past f32 [n_past, n_head, head_dim] at
# position % n_past, and the position to past_pos int64 [n_past].
LFPS_KEEP = _op("select.lfps", "lfps_keep", "head_dim", "step q past past_pos n_head n_past")
# Make the tables from the weights of the last n_past queries (Eq. 4), or of this one where none is
# kept, for KV heads whose first row's meta.next is not this position. A row's weights are the mean
# of its heads'. scores f32 [n_head, capacity] is scratch.
LFPS_START = _op(
    "select.lfps",
    "lfps_start",
    "head_dim heads group",
    "step q k_pages v_pages k_table v_table past past_pos ver sla bits stats spread meta means"
    " scores n_head_kv capacity n_past n_sink n_local a_f decay_f scale_f",
)
# sets int32 [n_row, set_capacity], counts int32 [n_row]: sinks, last n_local and the best
# budget * (pos + 1) of the candidates (Eq. 5-9), by the mean of the heads' weights; the tables
# learn from them (Eq. 10). A row whose heads' sparsity all exceeds epsilon gets no candidates and
# meta.bypassed 1 (where bypass is not 0), and its tables stay. Each step makes one of `period`
# parts of the bitmaps anew. scores as above; order int32 [n_row, 2, capacity] is scratch.
LFPS_SETS = _op(
    "select.lfps",
    "lfps_sets",
    "head_dim heads group",
    "step q k_pages k_table ver sla bits stats spread meta means scores order sets counts"
    " n_head_kv capacity set_capacity n_sink n_local bypass period a_f budget_f epsilon_f decay_f"
    " scale_f",
)
# Outputs f32 [n_head, head_dim] of bypassed rows' heads: joined with the mean value, which weighs
# w_global (Eq. 5); with bypass 2, replaced by it.
LFPS_BYPASS = _op(
    "select.lfps",
    "lfps_bypass",
    "head_dim heads group",
    "step q k_pages k_table spread meta means sets counts out n_head_kv set_capacity bypass"
    " scale_f",
)

# Quest (Tang et al. 2024, arXiv 2406.10774). bounds f16 [n_head_kv, n_page, 2, head_dim]: largest
# and smallest elements of the keys of each page of `page` positions (of keys of other types, the
# nearest float16). filled int64: that many first
# positions are in the bounds already; pages from there to pos are made anew, filled stays. parts
# f32 [n_head, 2, head_dim]: the larger of q and 0, the smaller of q and 0.
QUEST_BOUNDS = _op(
    "select.quest",
    "quest_bounds",
    "head_dim type_k",
    "step q k_pages k_table bounds filled parts n_head n_head_kv n_page page",
)
# scores f32 [n_head, n_page]: the upper bound of q . k over each page up to pos's; a group's first
# head gets the maximum over the group. heads: of a KV head. Sets filled to pos + 1.
QUEST_SCORE = _op(
    "select.quest",
    "quest_score",
    "head_dim heads group",
    "step parts bounds filled scores n_head_kv n_page page",
)

# HiP (Lee et al. 2024, arXiv 2406.09827), Alg. 1 for one query token. Searched are the whole blocks
# of `block` positions after the first n_sink blocks and before the last n_local positions. mask
# int32 [n_row, 1 + n_chunk]: how many blocks were chosen, and these, ascending. A block's score is
# the largest q . k over its keys 0, stride, 2 * stride, .. and over a row's group of query heads.
# tree: scratch, int32 [n_row, 8, n_chunk].
HIP_ESTIMATE = _op(
    "select.hip",
    "hip_estimate",
    "head_dim group",
    "step q k_pages k_table mask tree n_row heads_per_kv n_head_kv n_chunk block stride n_sink"
    " n_local",
)
# A search over kept means: of blocks of `block` positions, of four blocks, of 16 and so on up to
# level `top`; level l starts at row level_start = 4 / 3 (room - (room >> 2 l)). Only of what is
# whole. A mean is head_dim bytes u from 0 to 127 and two floats: element i is low + width * u[i].
# Four neighbours lie together: means uint8 [n_head_kv, n_mean / 4, head_dim / 4, 4, 4], four bytes
# of each in turn; extents f32 [n_head_kv, n_mean / 4, 2, 4]: their widths and lows. room: a
# multiple of 4^(top + 1), at least the blocks of the context. filled int64 [n_head_kv]: blocks that
# are in the means; those from pos on are made anew. sums: scratch, f32 [n_head_kv, head_dim].
HIP_MEANS = _op(
    "select.hip_means",
    "hip_means",
    "head_dim type_k",
    "step k_pages k_table means extents filled sums n_head_kv room top block",
)
# mask int32 [n_mask, n_row, 1 + n_chunk] as above, one for mask_block queries. Searched are whole
# blocks before the last n_local positions of the mask's first query. Chunks of a level are its
# means; the first level that has at most 4 n_chunk is scored whole. A round keeps the n_chunk
# chunks with the best scores and goes on with their four children; at level 0 blocks before n_sink
# are passed over. A score is the sum over the row's heads and every q_stride-th query of 2^x, in
# straight lines between whole x, x = (q . mean * scale - log(sum exp(q . k * scale))) / log 2, the
# sum over the first n_sink blocks and the positions from the end of the search to the mask's first
# query; the heads' elements are rounded to 127ths of their largest. work: scratch, f32 [n_mask *
# n_row, hip_work(head_dim, group, queries of a mask, n_chunk, n_near)]; n_near: most positions
# of that sum.
HIP_SEARCH = _op(
    "select.hip_means",
    "hip_search",
    "head_dim group type_k",
    "step q k_pages k_table means extents mask work n_row heads_per_kv n_head_kv room top n_chunk"
    " block n_sink n_local mask_block q_stride n_near scale_f",
)
# The Selection of the first n_sink blocks, the mask's blocks with n_near neighbours on both sides,
# and the blocks from the last n_local positions of the mask's first query on. mask_block: queries
# a mask serves, a multiple of q_block, those that a row stands for.
HIP_SELECT = _op(
    "select.hip",
    "hip_select",
    "",
    "step mask indptr indices n_row n_chunk block n_sink n_local n_near mask_block q_block",
)

# Vertical-slash (MInference: Jiang et al. 2024, arXiv 2407.02490). vertical, slash f32 [n_row,
# capacity]: attention weights of the call's last n_last queries, summed over the group's heads by
# position, and by distance: entry i is the distance n - 1 - i, n positions being held. The first
# n_sink columns and the last n_local entries of slash become 3e38. columns int32 [n_row,
# 1 + n_vertical], diagonals int32 [n_row, 1 + n_slash]: how many of the best are kept, and these,
# ascending. work: scratch, f32 [n_row, slash_work(group, capacity)]; capacity: a multiple of TILE.
SLASH_LINES = _op(
    "select.vertical_slash",
    "slash_lines",
    "head_dim group",
    "step q k_pages k_table vertical slash columns diagonals work n_row n_last n_vertical n_slash"
    " n_sink n_local capacity scale_f",
)
# The Selection of single positions that lie on a column, or for one of a row's queries on a
# diagonal; neighbouring queries' diagonals join.
SLASH_SELECT = _op(
    "select.vertical_slash",
    "slash_select",
    "",
    "step columns diagonals indptr indices n_row n_vertical n_slash q_block",
)

# Tactic (Zhu et al. 2025, arXiv 2502.12216). Clustered are the positions n_sink .. end - 1 of each
# KV head, `segment` positions at a time (the last segment may be shorter), each segment into
# per_cluster times fewer clusters. extent int64 [3]: the first position whose segment is to be
# made, end, and the number of clusters; a segment's clusters follow the one before's. starts int32
# [n_head_kv, n_slot + 1] and order int32 [n_head_kv, capacity]: cluster i holds the positions
# order[starts[i]: starts[i + 1]], ascending. means f16 [n_head_kv, n_slot, head_dim]:
# centroids, for queries. While they are made: centroids f32 as means; norms f32
# [n_head_kv, n_slot]: minus half their squared lengths; moving int64 [n_head_kv, n_segment]: 0 once
# an iteration changed no centroid of a segment.
# Start the segments anew with keys that are drawn without replacement (4.2).
TACTIC_SEED = _op(
    "select.tactic",
    "tactic_seed",
    "head_dim",
    "k_pages k_table extent centroids means norms moving n_head_kv n_slot n_segment segment"
    " per_cluster n_sink seed",
)
# labels int32 [n_head_kv, capacity]: the nearest centroid of the position's segment, the lowest of
# equally near ones. panels: scratch, f32 [TACTIC_WORKERS, (head_dim + 3) * 32].
TACTIC_ASSIGN = _op(
    "select.tactic",
    "tactic_assign",
    "head_dim",
    "k_pages k_table extent centroids norms moving labels panels n_head_kv n_slot n_segment"
    " segment per_cluster capacity n_sink",
)
# starts and order by labels; centroids that have members become their means. cursor: scratch, int32
# as norms.
TACTIC_MEAN = _op(
    "select.tactic",
    "tactic_mean",
    "head_dim",
    "k_pages k_table extent centroids means norms moving labels starts order cursor n_head_kv"
    " n_slot n_segment segment per_cluster capacity n_sink",
)
# scores f32 [n_head, n_slot]: q . centroid, for one query token; n_slot is a multiple of 16.
TACTIC_SCORE = _op(
    "select.tactic",
    "tactic_score",
    "head_dim group",
    "q extent means scores n_head_kv n_slot",
)
# For one query token, a head at a time: rank int32 [n_head, n_slot], the clusters by falling score
# (scores within a 65535th of their range are equal), and keep int32 [n_head], how many of the
# positions in that order make up the share of all weight. The first ones, first_share of them and
# at least 20, are weighed. n_sample 0: as Alg. 1 has it, the others are a curve through the windows
# round 10 % and 60 %. n_sample up to TACTIC_SAMPLES: whole clusters, the weight of those after the
# first ones estimated from as many of their positions, times 1 + margin. counted: 1 counts the
# weight of the positions outside of the clusters towards the share. work: scratch, f32 [n_head,
# tactic_work(capacity, n_slot)].
TACTIC_BUDGET = _op(
    "select.tactic",
    "tactic_budget",
    "head_dim",
    "step q k_pages k_table extent scores starts order rank keep work n_head heads_per_kv"
    " n_head_kv n_slot capacity n_sink counted n_sample share_f first_share_f margin_f scale_f",
)
# The same for all heads of a KV head, in one order: rank int32 [n_head_kv, n_slot], the clusters by
# falling sum over the heads of exp(scaled score) / their total, and keep int32 [n_head_kv], with
# how many of the positions n_reach of the heads reach the share. n_sample (at least 1) positions
# after the first ones, drawn in proportion to that sum. scores are used up. Scratch: sizes, density
# f32 [n_head_kv, n_slot], work f32 [n_head_kv, tactic_joint_work(group, capacity, n_slot)].
TACTIC_JOINT = _op(
    "select.tactic_joint",
    "tactic_joint",
    "head_dim group",
    "step q k_pages k_table extent scores starts order sizes density rank keep work n_head_kv"
    " n_slot capacity n_sink counted n_sample n_reach share_f first_share_f margin_f scale_f",
)
# marks int64 [n_row, capacity / 64]: a bit a position, the lowest first, set where a head of the
# row's group keeps it; count int32 [n_row]: how many are.
TACTIC_MARK = _op(
    "select.tactic",
    "tactic_mark",
    "group",
    "extent starts order rank keep marks count n_row heads_per_kv n_slot capacity",
)
# The Selection of the marked positions and of all outside of the clusters.
TACTIC_SELECT = _op(
    "select.tactic",
    "tactic_select",
    "",
    "step extent marks count indptr indices n_row capacity n_sink",
)

# Delta attention (Willette et al. 2025, arXiv 2505.11254), see select/delta.py. Of a chunk:
# which rows are also attended densely, as step records int64 [STEP_SIZE] of their own: those gamma
# apart, counted from the prompt's first row, and the prompt's last gamma, which the former leave
# out.
DELTA_ROWS = _op("select.delta", "delta_rows", "", "step apart last gamma")
# out f32 [n_tok, n_head, head_dim], row i of the prompt, becomes out_i + (dense_g - out_g), with
# g = floor(i / gamma) * gamma (Eq. 7), and dense_g itself where i is g; the rows of `last` become
# last_out. apart and last as above, apart_out and last_out f32 [rows, n_head, head_dim]: their
# dense rows. delta f32 [n_head, head_dim] and delta_pos int64 [n_head]: the last difference and the
# position of its row, for the next chunk. recompute: 1 leaves the rows between as they are (Eq. 5).
DELTA_ADD = _op(
    "select.delta",
    "delta_add",
    "head_dim",
    "step apart last apart_out last_out delta delta_pos out n_head gamma recompute",
)

# Column sums of attention weights: what `observe` gives to methods that learn from them. Of the
# queries before this one that past holds (see LFPS_KEEP), one after the other, or of this one where
# it holds none: sums f32 [n_row, capacity], the softmax over the positions up to each query's,
# summed over queries and the row's `group` of the `heads` that share a KV head; 0 from there on.
# capacity: a multiple of 64. scores f32 [n_head, capacity] is scratch.
COLUMN_SUMS = _op(
    "select.column_sums",
    "column_sums",
    "head_dim heads group",
    "step q past past_pos k_pages k_table sums scores n_head_kv capacity n_past scale_f",
)
# The softmax of one query token over its Selection of single positions, summed over a row's heads,
# is added to sums. Scratch, of `most` entries a row, a multiple of 16 and at least as many as it
# has: lines int32 [n_row, most], scores f32 [n_head, most].
COLUMN_ADD = _op(
    "select.column_sums",
    "column_add",
    "head_dim group",
    "step q k_pages k_table indptr indices sums lines scores n_row heads_per_kv n_head_kv capacity"
    " most scale_f",
)
# Kept sets: kept int32 [n_row, 1 + n_keep], how many positions and these, ascending, from n_sink to
# begin - 1; begin int64: what comes from there on is kept whole.
# sets int32 [n_row, set_capacity], counts int32 [n_row]: the first n_sink positions, the kept ones,
# and begin .. pos. owners int32 [n_row]: whose kept ones, a number of a row of kept; 0: its own.
KEPT_SETS = _op(
    "select.kept_sets",
    "kept_sets",
    "",
    "step kept begin owners sets counts n_row n_keep set_capacity n_sink",
)
# H2O (Zhang et al. 2023, arXiv 2306.14048), Alg. 1. The n_keep largest sums f32 [n_row, capacity]
# before the last n_local positions: chosen anew where `fresh` is 1, else by evicting the smallest
# when the position that has just left the last n_local joins them.
H2O_KEEP = _op(
    "select.kept_sets",
    "h2o_keep",
    "",
    "step sums kept begin n_row capacity n_keep n_sink n_local fresh",
)
# SnapKV (Li et al. 2024, arXiv 2404.14469). Positions before the last n_local by their sums f32
# [n_row, capacity], after 1-D pooling over `pool` neighbours (average 1: their sum, which orders as
# the mean; 0: the largest). n_top a row; of these ada_f are handed out to the rows by how many of
# their pooled sums are among the n_top * n_row best (Feng et al. 2024, arXiv 2407.11550, Alg. 1).
# pooled f32 [n_row, capacity] is scratch.
SNAPKV_KEEP = _op(
    "select.kept_sets",
    "snapkv_keep",
    "",
    "step sums pooled kept begin n_row capacity n_keep n_sink n_local n_top pool average ada_f",
)

# Double Sparsity (Yang et al. 2024, arXiv 2408.07092). channels int32 [n_head_kv, n_label],
# ascending: those with the largest sum of |q_c k_c| over the queries that past holds before this
# one (as for COLUMN_SUMS), the KV head's query heads, and the keys up to pos. work f32 [n_head_kv,
# head_dim] is scratch.
LABEL_CHANNELS = _op(
    "select.double_sparsity",
    "label_channels",
    "head_dim heads",
    "step q past past_pos k_pages k_table channels work n_head_kv n_label n_past",
)
# labels f16 [n_head_kv, n_label, capacity]: the keys' elements in these channels, written for pos,
# or where `fresh` is 1 for all positions up to pos. parts f32 [n_head, n_label]: q's elements.
LABEL_KEYS = _op(
    "select.double_sparsity",
    "label_keys",
    "head_dim",
    "step q k_pages k_table channels labels parts n_head n_head_kv n_label capacity fresh",
)
# scores and maxima as SCORE_KEYS leaves them, of parts and labels. capacity: a multiple of 256.
LABEL_SCORE = _op(
    "select.double_sparsity",
    "label_score",
    "n_label heads group",
    "step parts labels scores maxima n_head_kv capacity n_sink n_local",
)

# HShare (Wu et al. 2025, ICLR). Rows of all layers are numbered together; owners int32 [n_row], of
# one layer: whose set a row shares. Those who own theirs retrieve: asking f32 [n_head_kv, heads,
# head_dim], their queries, and n_asking int32 [n_head_kv], how many heads, are what SCORE_KEYS
# reads. first: number of the layer's first row. fresh: 1 makes every row its own owner.
HSHARE_GATE = _op(
    "select.hshare",
    "hshare_gate",
    "head_dim heads group",
    "step q owners asking n_asking n_head_kv first fresh",
)
# kept (as for KEPT_SETS, of this layer) of the rows that own theirs: the n_keep best scores before
# the last n_local positions. scores and maxima are SCORE_KEYS's and used up; order int32 [n_row,
# capacity] is scratch.
HSHARE_KEEP = _op(
    "select.hshare",
    "hshare_keep",
    "",
    "step owners scores maxima order kept begin n_row rows_per_kv group capacity n_keep n_sink"
    " n_local first",
)
# owners int32 [all layers, n_row] from kept of all layers, for the n_layer layers listed in layers
# int32. n_layer_own of these layers retrieve, in each n_row_own of its rows. Pairs share greedily,
# most alike first: the later of two takes the set of the earlier one, if that is an owner and the
# later one owns only its own. Rows are as alike as their sets have positions in common, layers as
# their rows of the same number together. alike f32 [n, n], n the larger of n_layer and n_row, and
# chosen int32 [n] are scratch.
HSHARE_MAP = _op(
    "select.hshare",
    "hshare_map",
    "",
    "kept layers owners alike chosen n_layer n_row n_keep n_layer_own n_row_own",
)

# MagicPIG (Chen et al. 2024, arXiv 2410.16179). Indexed are positions n_sink .. begin - 1; begin
# int64 is written: the first of the last n_local. n_sink is at most capacity, a multiple of 64.
# centre f32 [n_head_kv, head_dim]: their keys' mean; norms f32 [n_head_kv, capacity]: the lengths
# of the keys without it.
LSH_CENTRE = _op(
    "select.magicpig",
    "lsh_centre",
    "head_dim",
    "step k_pages k_table centre norms begin n_head_kv capacity n_sink n_local",
)
# codes uint16 [n_head_kv, n_table, capacity]: bit i of table t is set where the key without the
# centre has a positive product with plane t * n_bit + i. planes f16 [head_dim, n_plane], n_plane a
# multiple of 32, columns after n_table * n_bit any. work: scratch, f32 [LSH_WORKERS, work_size],
# work_size at least lsh_work(LSH_ROWS, n_plane, head_dim), or of `heads` rows.
LSH_CODES = _op(
    "select.magicpig",
    "lsh_codes",
    "head_dim n_plane n_bit n_table",
    "k_pages k_table centre planes begin codes work n_head_kv capacity n_sink work_size",
)
# The same of queries that heads of a KV head share: codes uint16 [n_head, n_table].
LSH_QUERY = _op(
    "select.magicpig",
    "lsh_query",
    "head_dim heads n_plane n_bit n_table",
    "q planes codes work n_head_kv work_size",
)
# Each table's positions by code: starts int32 [n_head_kv, n_table, 2^n_bit + 1], order int32
# [n_head_kv, n_table, capacity].
LSH_TABLES = _op(
    "select.magicpig",
    "lsh_tables",
    "n_bit n_table",
    "codes begin starts order n_head_kv capacity n_sink",
)
# sets int32 [n_head, set_capacity], ascending, with log_weight f32 as long, counts int32 [n_head]:
# the first n_sink positions and those from begin on, with 0, and the indexed ones that share their
# code with the query in at least two tables, with -log of the probability of that: bias f32
# [n_bias] over the cosine of query and key without the centre, from -1 to 1, linear between.
# codes are LSH_QUERY's. bits int64 [n_head, 2, capacity / 64 + 1] is scratch.
LSH_SAMPLE = _op(
    "select.magicpig",
    "lsh_sample",
    "head_dim n_bit n_table",
    "step q k_pages k_table centre norms begin codes starts order bias sets log_weight counts bits"
    " n_head heads_per_kv n_head_kv capacity set_capacity n_bias n_sink",
)

# HyperAttention (Han et al. 2023, arXiv 2310.05869). Keys in the order of their codes, neighbours
# of which differ by one bit (Gray's): ranked int32 [n_head_kv, capacity], the positions; ranks
# int32 [n_head_kv, 2^n_bit]: where in it the middle of a code's keys is. starts and order are
# LSH_TABLES's of one table. samples int32 [n_head_kv, 1 + n_sample]: how many of the indexed
# positions are drawn, and these, ascending, by seed, KV head and the call's first position.
HYPER_SORT = _op(
    "select.hyperattention",
    "hyper_sort",
    "n_bit",
    "step begin starts order ranked ranks samples n_head_kv capacity n_sink n_sample seed",
)
# The Selection, with log-weights, of the first n_sink positions, those from begin on, and for the
# queries of a row: the n_block blocks of `size` neighbours in ranked that they vote for, two votes
# a query and head for the block of its code's rank and one for the blocks beside it; and the
# samples that are not in them, each of which stands for as many as there are to one. codes uint16
# [n_tok, n_head]. Scratch: votes int32 [capacity / size + 1], bits int64 [2, capacity / 64 + 1].
HYPER_SELECT = _op(
    "select.hyperattention",
    "hyper_select",
    "n_bit",
    "step begin codes ranked ranks samples indptr indices log_weight votes bits n_head_kv"
    " heads_per_kv capacity q_block n_sink n_block size n_sample",
)

# BigBird (Zaheer et al. 2020, arXiv 2007.14062). The Selection of the first n_sink blocks, those of
# the last n_recent positions before each query of a row's block, and n_random of the blocks
# between, drawn without replacement (Knuth's algorithm S) by seed, row and the block of the row's
# first query.
BIGBIRD_SELECT = _op(
    "select.bigbird",
    "bigbird_select",
    "",
    "step indptr indices n_row q_block block n_sink n_recent n_random seed",
)

# Early token freezing, see select/cpe.py. rows int64 [2]: rows rows[0] .. rows[1] - 1 of
# source f32 [n_tok, n] go to target.
COPY_ROWS = _op("kv.token_freezing", "copy_rows", "", "rows source target n")
# Keys and values of those rows' positions, from one layer's pages to another's of the same types.
COPY_KV = _op(
    "kv.token_freezing",
    "copy_kv",
    "head_dim type_k type_v",
    "step rows k_from v_from k_from_table v_from_table k_to v_to k_to_table v_to_table n_head_kv",
)

# Keys and values that are kept in a home elsewhere, and some of them in frames, where all other ops
# read and write them (gpu_page_cache). k_home, v_home: [n_layer * n_page, n_head_kv, PAGE] rows of
# k_bytes and v_bytes, multiples of 2; k_frames, v_frames the same, of frames. table int32 [n_layer,
# n_page]: a page's frame, or -1. Of each layer page p is written in frame layer * n_ring + p %
# n_ring, and ring int32 [n_layer, n_ring] says which page is or was there: -1 none. All frames from
# n_first = n_layer * n_ring on are any page's: owner int32 [n_cache], layer * n_page + page, or -1,
# and used int32 [n_cache], n_pass * n_layer + layer of the pass and layer that last asked for it.
# state int64 [KV_STATE_SIZE], see KV_STATE. What is copied has whole lines and what completes the
# 16 bytes at their ends.
# At the beginning of a pass: the frames of the pages that positions pos .. pos + n_tok - 1 are in,
# with what the home has of positions before.
KV_CLAIM = _op(
    "kv.page_cache",
    "kv_claim",
    "",
    "step state table ring owner used k_home v_home k_frames v_frames n_layer n_page n_ring"
    " n_head_kv k_bytes v_bytes",
)
# At its end: the home gets these positions of all layers.
KV_KEEP = _op(
    "kv.page_cache",
    "kv_keep",
    "",
    "step k_home v_home k_frames v_frames n_layer n_page n_ring n_head_kv k_bytes v_bytes",
)
# wanted int32 [n_page]: the pages that ATTEND of the same step, Selection, window and stride reads
# are marked with state.serial.
KV_WANT = _op(
    "kv.page_cache",
    "kv_want",
    "",
    "step state indptr indices wanted n_row q_block block window stride",
)
# Frames for the pages of a layer that an op is about to read and that are in none: missing int32
# [n_page], state.n_missing of them, in any order. reader, see KV_READERS: which pages these are:
# for "chosen" those marked in wanted, for others found int64 [n_found], block, x and y are fields
# of that op. Taken are frames that their layer did not ask for the last time, longest ago first,
# then those of the layers that come up last; none that this layer asked for in this pass. n_cache
# is at least n_page and a multiple of 16. Counts hits and misses, and state.serial up. counts int32
# [KV_RANKS] is scratch.
KV_TAKE = _op(
    "kv.page_cache",
    "kv_take",
    "reader",
    "step state table owner used wanted missing counts found n_found block x y layer n_layer n_page"
    " n_first n_cache",
)
# Keys and values of the missing pages come to their frames.
KV_BRING = _op(
    "kv.page_cache",
    "kv_bring",
    "",
    "state table missing k_home v_home k_frames v_frames layer n_page n_head_kv k_bytes v_bytes",
)

# What bounds every other op; profiles compare with it. Reads n float32 at x once; y f32 [n_thread]:
# the sum of each thread's share (a rest of less than 128 may be left out).
READ_RATE = _op("runtime.roofline", "read_rate", "", "x y n")
# n products and n sums a thread, in registers (rounded down to whole rounds): y f32 [n_thread] is
# drawn towards 1.
FMA_RATE = _op("runtime.roofline", "fma_rate", "", "y n")

# The thread team's own entries: no argument struct, see cpu/runtime/team.py.
TEAM_RUN = _op("runtime.team", "team_run", "", "")
TEAM_WORKER = _op("runtime.team", "team_worker", "", "")

KV_RANKS = 1024  # of frames, by who is taken first
KV_OLD = 1 << 20  # a frame that nobody asks for was last used so long before the first pass
# What an op may be to KV_TAKE, and what it reads: what ATTEND reads; all positions; or only some,
# whatever these are (access_spans): found is `filled` or `meta`, x is top or n_sink, y n_local.
KV_READERS = ("chosen", "all", "quest_bounds", "hip_means", "hip_search", "lfps_start")

MAX_Q_BLOCK = 16  # queries that a row of ATTEND's Selection stands for, at most
FEW_ROWS = 16  # most rows of x that MATMUL multiplies without unpacking the weights
TACTIC_WORKERS = 64  # threads that TACTIC_ASSIGN keeps busy at most
TACTIC_SAMPLES = 256  # most positions that TACTIC_BUDGET samples
LSH_WORKERS = 64  # threads that LSH_CODES and LSH_QUERY keep busy at most
LSH_ROWS = 8  # keys that are hashed together
SIBLINGS = 4  # chunks that HIP_SEARCH splits one into
TILE, LIST_PAD = 64, 32  # rows multiplied at a time; entries that follow a list of rows
PACKED_ROWS = 16  # PACK_ROWS fills up the rows to a multiple of at most so many
PANEL_SCRATCH = 192 << 10  # bytes of unpacked weights of a thread


STRIP = 16  # rows of weights that ARRANGE puts side by side
# The ggml types that ARRANGE has, by the name that MATMUL knows a matrix in strips by.
STRIP_TYPES = {
    f"{type}x{STRIP}": type
    for type in (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
    )
}
# Bytes that a row's part of a block grows by: 6-bit scales become bytes, an exponent two, 3 bits 4.
_GROWTH = {"MXFP4": 1, "Q3_K": 36, "Q4_K": 4, "Q5_K": 4, "IQ4_XS": 2}


def strip_block(type: str) -> int:
    """Bytes of a row's part of a block in a strip."""
    return GGMLType[type].type_size + _GROWTH.get(type, 0)


def strip_bytes(type: str, n_out: int, n_in: int) -> int:
    """Bytes of a matrix of a ggml type in strips."""
    return n_out * (n_in // GGMLType[type].block_size) * strip_block(type)


def matmul_scratch(n_in: int) -> int:
    """Bytes of scratch that MATMUL and MOE_MATMUL need a thread."""
    return PANEL_SCRATCH + 8 * n_in + 256


def hip_room(n_block: int, n_chunk: int) -> tuple[int, int]:
    """Blocks that HIP_MEANS has room for, at least n_block, and its last level."""
    top = 0
    while n_block >> 2 * top > SIBLINGS * n_chunk:
        top += 1
    whole = SIBLINGS ** (top + 1)
    return -(-n_block // whole) * whole, top


def hip_work(head_dim: int, group: int, n_query: int, n_chunk: int, n_near: int) -> int:
    """Floats of scratch that HIP_SEARCH needs a row: lists, scores, products, bytes of heads."""
    lists = n_chunk + 1 + n_near + 2 * LIST_PAD + 2 * SIBLINGS * (n_chunk + TILE)
    return lists + 2 * TILE + group * (n_query + 1) * (TILE + head_dim) + 3 * group * n_query


def lsh_work(n_row: int, n_plane: int, head_dim: int) -> int:
    """Floats of scratch that n_row rows to be hashed need: they, their products, padding."""
    return n_row * (head_dim + n_plane) + 16


def slash_work(group: int, capacity: int) -> int:
    """Floats of scratch that SLASH_LINES needs a row: a list, scores, a tile."""
    return (group + 1) * capacity + LIST_PAD + group * TILE


def packed_form(type: str) -> str:
    """Which form of rows weights of a ggml type are multiplied with: "float" or "quantised"."""
    return "float" if type in ("F32", "F16", "BF16") else "quantised"


def packed_bytes(n_tok: int, n: int) -> int:
    """Bytes that PACK_ROWS needs for n_tok rows of n elements."""
    return 4 * (n_tok + PACKED_ROWS) * ((n + 63) // 64 * 64)


def tactic_half_window(n: int) -> int:
    """Half of a window of TACTIC_BUDGET: the window is 1 % of n positions, from 32 to 128."""
    return min(max(16, n // 200), 64)


def tactic_list(capacity: int) -> int:
    """Most positions that TACTIC_BUDGET weighs: all, two windows of 1 % or samples, and padding."""
    return capacity + capacity // 50 + 64 + TACTIC_SAMPLES + 32


def tactic_work(capacity: int, n_slot: int) -> int:
    """Floats of scratch that TACTIC_BUDGET needs a head: of clusters, counts, samples and lists."""
    return 4 * (n_slot + 16) + 512 + TACTIC_SAMPLES + 2 * tactic_list(capacity)


def tactic_joint_work(group: int, capacity: int, n_slot: int) -> int:
    """Floats of scratch that TACTIC_JOINT needs a KV head."""
    return 4 * (n_slot + 16 + group) + 512 + TACTIC_SAMPLES + (group + 1) * tactic_list(capacity)


def audit_work(capacity: int, head_dim: int) -> int:
    """Float64s of scratch that AUDIT_HEADS needs a thread: two sums, a row, three a position."""
    return head_dim + (2 * head_dim + 3 * capacity + 1) // 2


def attend_scratch(group: int, head_dim: int) -> int:
    """Bytes of scratch that ATTEND needs a thread: queries, sums and scores, a page in float32.

    And of one token's queries what q8_0 and q4_0 need: 16-bit copies, and weights a KV_BLOCK.
    """
    n_query, n_block = MAX_Q_BLOCK * group, -(-head_dim // KV_BLOCK)
    a_query, a_key = 2 * head_dim + PAGE + 4, 2 * head_dim + 10 + n_block
    quantised = group * (head_dim // 2 + n_block * (PAGE + 1))
    return 4 * (n_query * a_query + PAGE * a_key + quantised) + 64 * 5


LAUNCHED = PRODUCTS, PRODUCT_NORM, PRODUCT_GATE, PRODUCT_KEEP, ATTEND_PACK  # a GPU's only
