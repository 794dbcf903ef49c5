"""The built-in indexer of sparse models (DeepSeek-V3.2, 2025, arXiv 2512.02556, 2.1)."""

from tamis.jit_kernels.contract.op import READS_ALL, READS_NOTHING, Address, op


class IndexScore:
    """scores[t, b] = the sum over index heads h of weights[t, h] * max(0, q[t, h] . key of b).

    It covers blocks of positions that end before or at token t's own. The key of a block is that of
    its last position: the last n_key elements of the last KV head's row.
    """

    step: Address
    q: Address  # f32 [n_tok, n_head, n_key]
    weights: Address  # f32 [n_tok, n_head]
    k_pages: Address  # see KVView
    k_table: Address
    scores: Address  # f32 [n_tok, capacity]
    n_head: int
    n_head_kv: int
    block: int
    capacity: int
    scratch: Address  # n_thread * 4 * n_key bytes


INDEX_SCORE = op("select.indexer", IndexScore, "head_dim n_key type_k", reads=READS_ALL)


class IndexChoose:
    """A Selection of blocks, n_row equal rows per token: the top_k best, and the one it is in.

    The best have the largest scores of those that end before or at the token's own position, all of
    them if there are no more; of equal ones the lower wins. The token's own block is added if it is
    not among them, as it is incomplete.
    """

    step: Address
    scores: Address  # f32 [n_tok, capacity]
    indptr: Address  # int32 [n_tok * n_row + 1]
    indices: Address  # int32 [n_tok * n_row * (top_k + 1)] at most
    block: int
    n_row: int
    capacity: int
    top_k: int


INDEX_CHOOSE = op("select.indexer", IndexChoose, reads=READS_NOTHING)


FORCED = 1e30  # the score of blocks that are always selected


class HeadScore:
    """scores[t, h, b] = the largest q[t, h] . key of b's positions, up to token t's own.

    It covers blocks that begin before or at token t's position; FORCED for the last n_local of
    them. The key of a position is as in INDEX_SCORE.
    """

    step: Address
    q: Address  # f32 [n_tok, n_head, n_key]
    k_pages: Address  # see KVView
    k_table: Address
    scores: Address  # f32 [n_tok, n_head, capacity]
    n_head: int
    n_head_kv: int
    block: int
    n_local: int
    capacity: int
    scratch: Address  # n_thread * 4 * n_key bytes


HEAD_SCORE = op("select.indexer", HeadScore, "head_dim n_key type_k", reads=READS_ALL)


class HeadChoose:
    """A Selection of blocks, a row per KV head: the top_k best of each index head.

    Others are empty.

    Only blocks that begin before or at a token's position count; of equal ones the lower wins.
    """

    step: Address
    scores: Address  # f32 [n_tok, n_head, capacity]
    indptr: Address  # int32 [n_tok * n_row + 1]
    indices: Address
    block: int
    n_head: int  # number of a token's first rows that have blocks
    n_row: int
    capacity: int
    top_k: int


HEAD_CHOOSE = op("select.indexer", HeadChoose, reads=READS_NOTHING)


class EntryChoose:
    """A Selection of single positions, two rows per token: its window, and the entries it reads.

    An entry is stored where its block of `every` positions ends. The row has those of the top_k
    best blocks that end before or at the token's own position, all of them if there are no more, or
    without scores. Of equal ones the lower wins.
    """

    step: Address
    scores: Address  # f32 [n_tok, capacity], or 0
    indptr: Address  # int32 [n_tok * 2 + 1]
    indices: Address  # int32 [n_tok * (n_window + top_k)] at most
    n_window: int  # the last positions, including the token's own
    every: int  # 0: there are no entries
    capacity: int
    top_k: int


ENTRY_CHOOSE = op("select.indexer", EntryChoose, reads=READS_NOTHING)
