"""Ops of `h2o`: Zhang et al. 2023, arXiv 2306.14048."""

from tamis.jit_kernels.contract.op import Address, op


class H2oKeep:
    """Alg. 1: the n_keep largest sums before the last n_local positions.

    They are selected anew if `fresh` is 1, else by evicting the smallest when the position that has
    just left the last n_local joins them.
    """

    step: Address
    sums: Address  # f32 [n_row, capacity], as COLUMN_SUMS left them
    kept: Address  # as for KEPT_SETS
    begin: Address
    n_row: int
    capacity: int
    n_keep: int
    n_sink: int
    n_local: int
    fresh: int


H2O_KEEP = op("select.kept_sets", H2oKeep)
