"""Ops of `magicpig`; `hyperattention` reads the tables of LSH_TABLES."""

from tamis.jit_kernels.contract.op import READS_ALL, op

LSH_WORKERS = 64  # threads that LSH_CODES and LSH_QUERY keep busy at most
LSH_ROWS = 8  # keys that are hashed together

# MagicPIG (Chen et al. 2024, arXiv 2410.16179). Indexed are positions n_sink .. begin - 1; begin
# int64 is written: the first of the last n_local. n_sink is at most capacity, a multiple of 64.
# centre f32 [n_head_kv, head_dim]: their keys' mean; norms f32 [n_head_kv, capacity]: the lengths
# of the keys without it.
LSH_CENTRE = op(
    "select.magicpig",
    "lsh_centre",
    "head_dim",
    "step k_pages k_table centre norms begin n_head_kv capacity n_sink n_local",
    reads=READS_ALL,
)

# codes uint16 [n_head_kv, n_table, capacity]: bit i of table t is set where the key without the
# centre has a positive product with plane t * n_bit + i. planes f16 [head_dim, n_plane], n_plane a
# multiple of 32, columns after n_table * n_bit any. work: scratch, f32 [LSH_WORKERS, work_size],
# work_size at least lsh_work(LSH_ROWS, n_plane, head_dim), or of `heads` rows.
LSH_CODES = op(
    "select.magicpig",
    "lsh_codes",
    "head_dim n_plane n_bit n_table",
    "k_pages k_table centre planes begin codes work n_head_kv capacity n_sink work_size",
    reads=READS_ALL,
)

# The same of queries that heads of a KV head share: codes uint16 [n_head, n_table].
LSH_QUERY = op(
    "select.magicpig",
    "lsh_query",
    "head_dim heads n_plane n_bit n_table",
    "q planes codes work n_head_kv work_size",
)

# Each table's positions by code: starts int32 [n_head_kv, n_table, 2^n_bit + 1], order int32
# [n_head_kv, n_table, capacity].
LSH_TABLES = op(
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
LSH_SAMPLE = op(
    "select.magicpig",
    "lsh_sample",
    "head_dim n_bit n_table",
    "step q k_pages k_table centre norms begin codes starts order bias sets log_weight counts bits"
    " n_head heads_per_kv n_head_kv capacity set_capacity n_bias n_sink",
    reads=READS_ALL,
)


def lsh_work(n_row: int, n_plane: int, head_dim: int) -> int:
    """Floats of scratch that n_row rows to be hashed need: they, their products, padding."""
    return n_row * (head_dim + n_plane) + 16
