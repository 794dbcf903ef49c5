"""Ops of `magicpig`: Chen et al.

2024, arXiv 2410.16179; `hyperattention` reads LSH_TABLES's output.

Indexed are positions n_sink .. begin - 1.
"""

from tamis.jit_kernels.contract.op import READS_ALL, Address, op

LSH_WORKERS = 64  # most threads that LSH_CODES and LSH_QUERY use
LSH_ROWS = 8  # keys that are hashed together


class LshCentre:
    """The mean of the indexed keys, and the lengths of the keys without it."""

    step: Address
    k_pages: Address
    k_table: Address
    centre: Address  # f32 [n_head_kv, head_dim]
    norms: Address  # f32 [n_head_kv, capacity]
    begin: Address  # int64: output, the first of the last n_local
    n_head_kv: int
    capacity: int  # a multiple of 64
    n_sink: int  # at most capacity
    n_local: int


LSH_CENTRE = op("select.magicpig", LshCentre, "head_dim", reads=READS_ALL)


class LshCodes:
    """The hash codes of keys.

    Bit i of table t is set if the key minus the centre has a positive product with plane t * n_bit
    + i.
    """

    k_pages: Address
    k_table: Address
    centre: Address
    planes: Address  # f16 [head_dim, n_plane], columns after n_table * n_bit are arbitrary
    begin: Address
    codes: Address  # uint16 [n_head_kv, n_table, capacity]
    # f32 [LSH_WORKERS, work_size], scratch; n_plane, a constant, is a multiple of 32
    work: Address
    n_head_kv: int
    capacity: int
    n_sink: int
    work_size: int  # at least lsh_work(LSH_ROWS, n_plane, head_dim)


LSH_CODES = op("select.magicpig", LshCodes, "head_dim n_plane n_bit n_table", reads=READS_ALL)


class LshQuery:
    """The hash codes of queries."""

    q: Address  # f32 [n_head, head_dim]
    planes: Address
    codes: Address  # uint16 [n_head, n_table]
    work: Address
    n_head_kv: int
    work_size: int  # at least lsh_work(heads, n_plane, head_dim)


LSH_QUERY = op("select.magicpig", LshQuery, "head_dim heads n_plane n_bit n_table")


class LshTables:
    """Each table's positions by code."""

    codes: Address
    begin: Address
    starts: Address  # int32 [n_head_kv, n_table, 2^n_bit + 1]
    order: Address  # int32 [n_head_kv, n_table, capacity]
    n_head_kv: int
    capacity: int
    n_sink: int


LSH_TABLES = op("select.magicpig", LshTables, "n_bit n_table")


class LshSample:
    """Sinks, positions from begin on, and the indexed ones that collide with the query.

    A collision is the same code in at least two tables. Its log-weight is -log of its probability;
    the others' is 0.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    k_pages: Address
    k_table: Address
    centre: Address
    norms: Address
    begin: Address
    codes: Address  # LSH_QUERY's
    starts: Address
    order: Address
    # f32 [n_bias]: log-weights over the cosine of query and key minus the centre, from -1 to 1,
    # interpolated linearly.
    bias: Address
    sets: Address  # int32 [n_head, set_capacity], ascending
    log_weight: Address  # f32 [n_head, set_capacity]
    counts: Address  # int32 [n_head]
    bits: Address  # int64 [n_head, 2, capacity / 64 + 1], scratch
    n_head: int
    heads_per_kv: int
    n_head_kv: int
    capacity: int
    set_capacity: int
    n_bias: int
    n_sink: int


LSH_SAMPLE = op("select.magicpig", LshSample, "head_dim n_bit n_table", reads=READS_ALL)


def lsh_work(n_row: int, n_plane: int, head_dim: int) -> int:
    """Floats of scratch for n_row rows to be hashed: the rows, their products, padding."""
    return n_row * (head_dim + n_plane) + 16
