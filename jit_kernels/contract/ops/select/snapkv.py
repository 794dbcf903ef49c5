"""Ops of `snapkv`: Li et al. 2024, arXiv 2404.14469."""

from tamis.jit_kernels.contract.op import Address, op


class SnapkvKeep:
    """Positions before the last n_local by their sums after 1-D pooling, n_top per row.

    The share `ada` of these is distributed over the rows by how many of their pooled sums are among
    the n_top * n_row best (Feng et al. 2024, arXiv 2407.11550, Alg. 1).
    """

    step: Address
    sums: Address  # f32 [n_row, capacity]
    pooled: Address  # f32 [n_row, capacity], scratch
    kept: Address  # as for KEPT_SETS
    begin: Address
    n_row: int
    capacity: int
    n_keep: int
    n_sink: int
    n_local: int
    n_top: int
    pool: int  # neighbours that are pooled
    average: int  # 1: their sum, which has the order of the mean; 0: the largest
    ada: float


SNAPKV_KEEP = op("select.kept_sets", SnapkvKeep)
