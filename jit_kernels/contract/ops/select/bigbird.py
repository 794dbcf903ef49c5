"""Ops of `bigbird`: Zaheer et al. 2020, arXiv 2007.14062."""

from tamis.jit_kernels.contract.op import Address, op


class BigbirdSelect:
    """The Selection of the first n_sink blocks, the last n_recent positions and n_random blocks.

    n_recent counts back from each query of a row's block. Random blocks are drawn from those
    between without replacement (Knuth's algorithm S) by seed, row and the block of the row's first
    query.
    """

    step: Address
    indptr: Address
    indices: Address
    n_row: int
    q_block: int
    block: int
    n_sink: int
    n_recent: int
    n_random: int
    seed: int


BIGBIRD_SELECT = op("select.bigbird", BigbirdSelect)
