"""Ops of `hshare`: Wu et al. 2025, ICLR. Rows of all layers are numbered together."""

from tamis.jit_kernels.contract.op import Address, op


class HshareGate:
    """The queries of the rows that own their set: they retrieve, and SCORE_KEYS reads them."""

    step: Address
    q: Address  # f32 [n_head, head_dim]
    owners: Address  # int32 [n_row], of one layer: the owner of each row's set
    asking: Address  # f32 [n_head_kv, heads, head_dim]
    n_asking: Address  # int32 [n_head_kv]: heads
    n_head_kv: int
    first: int  # number of the layer's first row
    fresh: int  # 1 makes every row its own owner


HSHARE_GATE = op("select.hshare", HshareGate, "head_dim heads group")


class HshareKeep:
    """The sets of owners in kept: the n_keep best scores before the last n_local."""

    step: Address
    owners: Address
    scores: Address  # SCORE_KEYS's; overwritten like maxima
    maxima: Address
    order: Address  # int32 [n_row, capacity], scratch
    kept: Address  # as for KEPT_SETS, of this layer
    begin: Address
    n_row: int
    rows_per_kv: int
    group: int
    capacity: int
    n_keep: int
    n_sink: int
    n_local: int
    first: int


HSHARE_KEEP = op("select.hshare", HshareKeep)


class HshareMap:
    """The owners of n_layer layers' rows, from kept of all layers; n_layer_own layers retrieve.

    Each retrieves in n_row_own of its rows. Pairs share greedily, most alike first: the later of
    two takes the set of the earlier one, if that is an owner and the later one has no sharers. The
    similarity of rows is the number of positions in common, that of layers the sum over rows of the
    same number.
    """

    kept: Address  # of all layers
    layers: Address  # int32 [n_layer]
    owners: Address  # int32 [all layers, n_row]
    alike: Address  # f32 [n, n], n the larger of n_layer and n_row, scratch
    chosen: Address  # int32 [n], scratch
    n_layer: int
    n_row: int
    n_keep: int
    n_layer_own: int
    n_row_own: int


HSHARE_MAP = op("select.hshare", HshareMap)
