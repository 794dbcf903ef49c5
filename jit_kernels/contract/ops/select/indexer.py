"""The indexer of models that are sparse by design (DeepSeek-V3.2, 2025, arXiv 2512.02556, 2.1)."""

from tamis.jit_kernels.contract.op import READS_ALL, READS_NOTHING, Address, op


class IndexScore:
    """scores[t, b] = the sum over index heads h of weights[t, h] * max(0, q[t, h] . key of b).

    For blocks of positions that end before or at token t's own. The key of a block is of its last
    position: the last n_key elements of the last KV head's row.
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
    """A Selection of blocks, n_row equal rows a token: the top_k best, and the one it is in.

    The best by their scores of those that end before or at the token's own position, all of them
    where they are not more; ties go to the lower one. That of the token itself where it is not one
    of them, as it goes on.
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


FORCED = 1e30  # the score of blocks that are chosen whatever they have


class HeadScore:
    """scores[t, h, b] = the largest q[t, h] . key of b's positions, up to token t's own.

    For blocks that begin before or at token t's position; FORCED for the last n_local of them. The
    key of a position is as of INDEX_SCORE.
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
    """A Selection of blocks, a row a KV head: the top_k best of each index head; others are empty.

    Of the blocks that begin before or at a token's position; ties go to the lower one.
    """

    step: Address
    scores: Address  # f32 [n_tok, n_head, capacity]
    indptr: Address  # int32 [n_tok * n_row + 1]
    indices: Address
    block: int
    n_head: int  # rows of a token that have blocks, the first ones
    n_row: int
    capacity: int
    top_k: int


HEAD_CHOOSE = op("select.indexer", HeadChoose, reads=READS_NOTHING)


class EntryChoose:
    """A Selection of single positions, two rows a token: its window, and the entries it reads.

    An entry is kept where its block of `every` positions ends: those of the top_k best blocks that
    end before or at the token's own position, all of them where they are not more, or have no
    scores. Ties go to the lower one.
    """

    step: Address
    scores: Address  # f32 [n_tok, capacity], or 0
    indptr: Address  # int32 [n_tok * 2 + 1]
    indices: Address  # int32 [n_tok * (n_window + top_k)] at most
    n_window: int  # the last positions, the token's own included
    every: int  # 0: there are no entries
    capacity: int
    top_k: int


ENTRY_CHOOSE = op("select.indexer", EntryChoose, reads=READS_NOTHING)
