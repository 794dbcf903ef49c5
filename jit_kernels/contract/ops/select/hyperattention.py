"""Ops of `hyperattention`."""

from tamis.jit_kernels.contract.op import op

# HyperAttention (Han et al. 2023, arXiv 2310.05869). Keys in the order of their codes, neighbours
# of which differ by one bit (Gray's): ranked int32 [n_head_kv, capacity], the positions; ranks
# int32 [n_head_kv, 2^n_bit]: where in it the middle of a code's keys is. starts and order are
# LSH_TABLES's of one table. samples int32 [n_head_kv, 1 + n_sample]: how many of the indexed
# positions are drawn, and these, ascending, by seed, KV head and the call's first position.
HYPER_SORT = op(
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
HYPER_SELECT = op(
    "select.hyperattention",
    "hyper_select",
    "n_bit",
    "step begin codes ranked ranks samples indptr indices log_weight votes bits n_head_kv"
    " heads_per_kv capacity q_block n_sink n_block size n_sample",
)
