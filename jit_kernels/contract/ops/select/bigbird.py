"""Ops of `bigbird`."""

from tamis.jit_kernels.contract.op import op

# BigBird (Zaheer et al. 2020, arXiv 2007.14062). The Selection of the first n_sink blocks, those of
# the last n_recent positions before each query of a row's block, and n_random of the blocks
# between, drawn without replacement (Knuth's algorithm S) by seed, row and the block of the row's
# first query.
BIGBIRD_SELECT = op(
    "select.bigbird",
    "bigbird_select",
    "",
    "step indptr indices n_row q_block block n_sink n_recent n_random seed",
)
