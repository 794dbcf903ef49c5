"""Selection ops that several methods share."""

from tamis.jit_kernels.contract.op import READS_ALL, op

TILE, LIST_PAD = 64, 32  # rows multiplied at a time; entries that follow a list of rows

# A Selection of whole blocks: those that hold one of the first n_sink positions or one of the last
# n_recent positions before each query of the row's block (n_recent 0: all of them).
SELECT_WINDOW = op(
    "select.common", "select_window", "", "step indptr indices n_row q_block block n_sink n_recent"
)

# The middle: positions from the first n_sink, or from floor(drop * pos / 2^32), up to the last
# n_local, which are never in it. scores f32 [n_head_kv, heads, capacity], capacity a multiple of
# 256: q . k of the middle's positions for the first counts int32 [n_head_kv] of the `heads` query
# heads of a KV head (counts 0: of all), q f32 [n_head_kv, heads, head_dim]; the first of `group`
# heads has their maximum; the others of its pages of 64 get -3e38, and rows after counts may be
# written. maxima f32 [n_head_kv, heads, capacity / 16]: entry 16 i + l is the largest of positions
# l, l + 16, ... of the 256 from 256 i on, as far as they are in pages of the middle.
SCORE_KEYS = op(
    "select.common",
    "score_keys",
    "head_dim heads group type_k",
    "step q counts k_pages k_table scores maxima n_head_kv capacity n_sink n_local drop",
    reads=READS_ALL,
)

# sets int32 [n_row, set_capacity], counts int32 [n_row]: the first n_sink positions, the last
# n_local, and the n_top best scores between them, from scores and maxima as SCORE_KEYS left them
# (rows of `group` heads); ties go to the lower position. scores is used up; order int32
# [n_row, capacity] is scratch.
SELECT_BEST = op(
    "select.common",
    "select_best",
    "",
    "step scores maxima order sets counts n_row group capacity set_capacity n_sink n_local n_top",
)

# joined int32 [n_head_kv, joined_capacity], n_joined int32 [n_head_kv]: the positions up to pos
# that are in any set of a KV head's rows_per_kv rows, ascending; sets int32 [rows, capacity] and
# counts int32 [rows]. bits int64 [n_head_kv, n_word >= pos / 64 + 1] is scratch.
SELECT_UNION = op(
    "select.common",
    "select_union",
    "",
    "step sets counts bits joined n_joined rows_per_kv n_head_kv capacity joined_capacity n_word",
)

# A Selection of blocks of `block` positions, scores f32 [n_row, capacity], one a block that holds a
# position up to pos: the first n_sink blocks, the last n_recent, and the n_top best scores between
# them (all blocks where they do not exceed the sum). Ties go to the lower block.
SELECT_TOP_K = op(
    "select.common",
    "select_top_k",
    "",
    "step scores indptr indices n_row capacity block n_sink n_recent n_top",
)

# A Selection of single positions from sets int32 [n_row, capacity], ascending, the first
# counts int32 [n_row] of each row.
SELECT_PACK = op("select.common", "select_pack", "", "sets counts indptr indices n_row capacity")

# Column sums of attention weights: what `observe` gives to methods that learn from them. Of the
# queries before this one that past holds (see LFPS_KEEP), one after the other, or of this one where
# it holds none: sums f32 [n_row, capacity], the softmax over the positions up to each query's,
# summed over queries and the row's `group` of the `heads` that share a KV head; 0 from there on.
# capacity: a multiple of 64. scores f32 [n_head, capacity] is scratch.
COLUMN_SUMS = op(
    "select.column_sums",
    "column_sums",
    "head_dim heads group",
    "step q past past_pos k_pages k_table sums scores n_head_kv capacity n_past scale_f",
    reads=READS_ALL,
)

# The softmax of one query token over its Selection of single positions, summed over a row's heads,
# is added to sums. Scratch, of `most` entries a row, a multiple of 16 and at least as many as it
# has: lines int32 [n_row, most], scores f32 [n_head, most].
COLUMN_ADD = op(
    "select.column_sums",
    "column_add",
    "head_dim group",
    "step q k_pages k_table indptr indices sums lines scores n_row heads_per_kv n_head_kv capacity"
    " most scale_f",
    reads=READS_ALL,
)

# Kept sets: kept int32 [n_row, 1 + n_keep], how many positions and these, ascending, from n_sink to
# begin - 1; begin int64: what comes from there on is kept whole.
# sets int32 [n_row, set_capacity], counts int32 [n_row]: the first n_sink positions, the kept ones,
# and begin .. pos. owners int32 [n_row]: whose kept ones, a number of a row of kept; 0: its own.
KEPT_SETS = op(
    "select.kept_sets",
    "kept_sets",
    "",
    "step kept begin owners sets counts n_row n_keep set_capacity n_sink",
)
