"""Selection ops that several methods share."""

from tamis.jit_kernels.contract.op import READS_ALL, Address, op

TILE, LIST_PAD = 64, 32  # rows multiplied at a time; padding entries after a list of rows


class SelectWindow:
    """A Selection of whole blocks: the first n_sink positions and the last n_recent.

    n_recent counts back from each query of the row's block; 0: all positions.
    """

    step: Address
    indptr: Address
    indices: Address
    n_row: int
    q_block: int  # query tokens of a row
    block: int  # positions of a block
    n_sink: int
    n_recent: int


SELECT_WINDOW = op("select.common", SelectWindow)


class ScoreKeys:
    """q . k of the middle's positions for the query heads of each KV head.

    The middle: positions from the first n_sink, or from floor(drop * pos / 2^32), up to the last
    n_local, which are never in it. The first of `group` heads gets their maximum; positions that
    share a page of 64 with the middle get -3e38, and rows after counts may be overwritten.
    """

    step: Address
    q: Address  # f32 [n_head_kv, heads, head_dim]
    counts: Address  # int32 [n_head_kv]: number of query heads to score; 0: all
    k_pages: Address
    k_table: Address
    scores: Address  # f32 [n_head_kv, heads, capacity]
    # f32 [n_head_kv, heads, capacity / 16]: entry 16 i + l is the largest of positions l, l + 16,
    # ... of the 256 from 256 i on, if they are in pages of the middle.
    maxima: Address
    n_head_kv: int
    capacity: int  # a multiple of 256
    n_sink: int
    n_local: int
    drop: int


SCORE_KEYS = op("select.common", ScoreKeys, "head_dim heads group type_k", reads=READS_ALL)


class SelectBest:
    """The first n_sink positions, the last n_local, and the n_top best scores between them.

    Rows are of `group` heads; of equal scores the lower position wins.
    """

    step: Address
    scores: Address  # as SCORE_KEYS left them; overwritten
    maxima: Address
    order: Address  # int32 [n_row, capacity], scratch
    # what the best are chosen from, as COPY_CANDIDATES left it; 0: all scores
    found: Address
    exact: Address
    n_found: Address
    sets: Address  # int32 [n_row, set_capacity]
    counts: Address  # int32 [n_row]
    n_row: int
    group: int
    capacity: int
    set_capacity: int
    n_sink: int
    n_local: int
    n_top: int


SELECT_BEST = op("select.common", SelectBest)


class SelectUnion:
    """The positions up to pos that are in any set of a KV head's rows, ascending."""

    step: Address
    sets: Address  # int32 [rows, capacity]
    counts: Address  # int32 [rows]
    bits: Address  # int64 [n_head_kv, n_word], scratch
    joined: Address  # int32 [n_head_kv, joined_capacity]
    n_joined: Address  # int32 [n_head_kv]
    rows_per_kv: int
    n_head_kv: int
    capacity: int
    joined_capacity: int
    n_word: int  # above pos / 64


SELECT_UNION = op("select.common", SelectUnion)


class SelectTopK:
    """A Selection: the first n_sink blocks, the last n_recent, the n_top best scores between them.

    All blocks if there are no more than that. Of equal scores the lower block wins.
    """

    step: Address
    scores: Address  # f32 [n_row, capacity], one for each block that holds a position up to pos
    indptr: Address
    indices: Address
    n_row: int
    capacity: int
    block: int  # positions of a block
    n_sink: int
    n_recent: int
    n_top: int


SELECT_TOP_K = op("select.common", SelectTopK)


class SelectPack:
    """A Selection of single positions from sets."""

    sets: Address  # int32 [n_row, capacity], ascending
    counts: Address  # int32 [n_row]: number of filled entries of each row
    indptr: Address
    indices: Address
    n_row: int
    capacity: int


SELECT_PACK = op("select.common", SelectPack)


class SelectJoin:
    """A Selection of the single positions that are in either of two, up to a row's last query.

    A row of the other one serves n_row / other_n_row rows.
    """

    step: Address
    block_indptr: Address  # int32 [rows + 1]
    block_indices: Address  # int32: blocks of `block` positions
    other_indptr: Address  # int32 [other rows + 1]
    other_indices: Address  # int32: single positions
    indptr: Address
    indices: Address
    n_row: int
    other_n_row: int
    block: int
    q_block: int


SELECT_JOIN = op("select.common", SelectJoin)


class ColumnSums:
    """Column sums of attention weights, from which methods learn.

    They sum the softmax over the positions up to each query's, over queries and the row's `group`
    of the `heads` that share a KV head; they are 0 beyond. Queries are the earlier ones that past
    holds (see LFPS_KEEP), one after another, or this one if it holds none.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    past: Address  # as for LFPS_KEEP
    past_pos: Address
    k_pages: Address
    k_table: Address
    sums: Address  # f32 [n_row, capacity]
    scores: Address  # f32 [n_head, capacity], scratch
    n_head_kv: int
    capacity: int  # a multiple of 64
    n_past: int
    scale: float


COLUMN_SUMS = op("select.column_sums", ColumnSums, "head_dim heads group", reads=READS_ALL)


class ColumnAdd:
    """sums += one query token's softmax over its Selection of single positions, over heads."""

    step: Address
    q: Address  # f32 [n_head, head_dim]
    k_pages: Address
    k_table: Address
    indptr: Address
    indices: Address
    sums: Address  # f32 [n_row, capacity]
    lines: Address  # int32 [n_row, most], scratch
    scores: Address  # f32 [n_head, most], scratch
    n_row: int
    heads_per_kv: int
    n_head_kv: int
    capacity: int
    most: int  # a multiple of 16, at least the Selection's positions per row
    scale: float


COLUMN_ADD = op("select.column_sums", ColumnAdd, "head_dim group", reads=READS_ALL)


class KeptSets:
    """The first n_sink positions, the kept ones of a row, and begin .. pos."""

    step: Address
    # int32 [n_row, 1 + n_keep]: their number, and the positions, ascending, n_sink .. begin - 1
    kept: Address
    begin: Address  # int64: all positions from there on are kept
    owners: Address  # int32 [n_row]: the row of kept whose positions a row uses; 0: its own
    sets: Address  # int32 [n_row, set_capacity]
    counts: Address  # int32 [n_row]
    n_row: int
    n_keep: int
    set_capacity: int
    n_sink: int


KEPT_SETS = op("select.kept_sets", KeptSets)
