"""Ops of `double_sparsity`: Yang et al. 2024, arXiv 2408.07092."""

from tamis.jit_kernels.contract.op import READS_ALL, Address, op


class LabelChannels:
    """The channels with the largest sum of |q_c k_c|.

    The sum is over the earlier queries that past holds (as for COLUMN_SUMS), the KV head's query
    heads and the keys up to pos.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    past: Address
    past_pos: Address
    k_pages: Address
    k_table: Address
    channels: Address  # int32 [n_head_kv, n_label], ascending
    work: Address  # f32 [n_head_kv, head_dim], scratch
    n_head_kv: int
    n_label: int
    n_past: int


LABEL_CHANNELS = op("select.double_sparsity", LabelChannels, "head_dim heads", reads=READS_ALL)


class LabelKeys:
    """The keys' and the query's elements in these channels; the keys' for pos."""

    step: Address
    q: Address  # f32 [n_head, head_dim]
    k_pages: Address
    k_table: Address
    channels: Address
    labels: Address  # f16 [n_head_kv, n_label, capacity]
    parts: Address  # f32 [n_head, n_label]: q's elements
    n_head: int
    n_head_kv: int
    n_label: int
    capacity: int
    fresh: int  # 1: for all positions up to pos


LABEL_KEYS = op("select.double_sparsity", LabelKeys, "head_dim", reads=READS_ALL)


class LabelScore:
    """The scores and maxima in the form of SCORE_KEYS, from parts and labels."""

    step: Address
    parts: Address
    labels: Address
    scores: Address
    maxima: Address
    n_head_kv: int
    capacity: int  # a multiple of 256
    n_sink: int
    n_local: int


LABEL_SCORE = op("select.double_sparsity", LabelScore, "n_label heads group")
