"""The indexer of models that are sparse by design (DeepSeek-V3.2, 2025, arXiv 2512.02556, 2.1)."""

from tamis.jit_kernels.contract.op import READS_ALL, READS_NOTHING, Address, op


class IndexScore:
    """scores[t, j] = the sum over index heads h of weights[t, h] * max(0, q[t, h] . key of j).

    For positions j up to token t's own. The key of a position is the last n_key elements of its
    row; one KV head.
    """

    step: Address
    q: Address  # f32 [n_tok, n_head, n_key]
    weights: Address  # f32 [n_tok, n_head]
    k_pages: Address  # see KVView
    k_table: Address
    scores: Address  # f32 [n_tok, capacity]
    n_head: int
    capacity: int
    scratch: Address  # n_thread * 4 * n_key bytes


INDEX_SCORE = op("select.indexer", IndexScore, "head_dim n_key type_k", reads=READS_ALL)


class IndexChoose:
    """A Selection of single positions, a row a token: the top_k best scores up to its own position.

    All of them where they are not more. Ties go to the lower position.
    """

    step: Address
    scores: Address  # f32 [n_tok, capacity]
    indptr: Address  # int32 [n_tok + 1]
    indices: Address
    capacity: int
    top_k: int


INDEX_CHOOSE = op("select.indexer", IndexChoose, reads=READS_NOTHING)
