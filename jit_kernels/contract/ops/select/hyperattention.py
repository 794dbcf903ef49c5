"""Ops of `hyperattention`: Han et al. 2023, arXiv 2310.05869."""

from tamis.jit_kernels.contract.op import Address, op


class HyperSort:
    """Keys in the order of their codes; neighbours in that order differ by one bit (Gray's)."""

    step: Address
    begin: Address
    starts: Address  # LSH_TABLES's of one table
    order: Address
    ranked: Address  # int32 [n_head_kv, capacity]: the positions in that order
    ranks: Address  # int32 [n_head_kv, 2^n_bit]: the middle of a code's keys in that order
    # int32 [n_head_kv, 1 + n_sample]: the number of drawn ones among the indexed positions, and
    # these, ascending, by seed, KV head and the call's first position.
    samples: Address
    n_head_kv: int
    capacity: int
    n_sink: int
    n_sample: int
    seed: int


HYPER_SORT = op("select.hyperattention", HyperSort, "n_bit")


class HyperSelect:
    """The Selection, with log-weights, of sinks, recent positions, voted blocks and samples.

    Recent are positions from begin on. The queries of a row vote for blocks of `size` neighbours in
    ranked, each query and head with two votes for the block of its code's rank and one for each
    block beside it; n_block are selected. A sample that is in none of them has the weight of all
    remaining positions divided by the samples.
    """

    step: Address
    begin: Address
    codes: Address  # uint16 [n_tok, n_head]
    ranked: Address
    ranks: Address
    samples: Address
    indptr: Address
    indices: Address
    log_weight: Address
    votes: Address  # int32 [capacity / size + 1], scratch
    bits: Address  # int64 [2, capacity / 64 + 1], scratch
    n_head_kv: int
    heads_per_kv: int
    capacity: int
    q_block: int
    n_sink: int
    n_block: int
    size: int
    n_sample: int


HYPER_SELECT = op("select.hyperattention", HyperSelect, "n_bit")
