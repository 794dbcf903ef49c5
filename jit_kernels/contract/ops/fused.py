"""Fused ops that only a GPU launches, for few rows, chosen by backends/fusion.py.

No Program names them, and there are no CPU kernels. A matrix has a multiple of 16 rows; w2 and w3
are further matrices, of n2 and n3 rows. The row of `step` is 0.
"""

from tamis.jit_kernels.contract.op import READS_NOTHING, READS_SELECTION, Address, InOut, Out, op
from tamis.jit_kernels.contract.ops.attention import Attend


class _PackedInput:
    """The input x: as PACK_ROWS left it (normed 0), or as one of these ops did for a norm.

    In the latter case (normed 1) products are divided by sqrt(mean square + eps); the mean square
    is packed with x.
    """

    step: Address
    packed: Address
    normed: int
    eps: float
    n_in: int


class Products(_PackedInput):
    """y, y2, y3 (+)= rows of w @ x, of w2 @ x and of w3 @ x."""

    w: Address
    w2: Address
    w3: Address
    bias: Address  # f32 [n], or 0; bias2 and bias3 likewise
    bias2: Address
    bias3: Address
    y: InOut[Address]  # f32 [n_tok, n]
    y2: InOut[Address]
    y3: InOut[Address]
    n: int
    n2: int  # may be 0
    n3: int  # may be 0
    add: int  # 1: adds to y, y2, y3
    scratch: Out[Address]  # as for MATMUL


PRODUCTS = op("linear.gemv_epilogue", Products, "type")


class ProductNorm(_PackedInput):
    """y (+)= w @ x, and `to` receives y packed for its norm."""

    w: Address
    bias: Address  # f32 [n], or 0
    y: InOut[Address]  # f32 [n_tok, n]
    n: int
    add: int  # 1: adds to y
    weight: Address  # f32 [n], the norm's
    to: Out[Address]


PRODUCT_NORM = op("linear.gemv_epilogue", ProductNorm, "type")


class ProductGate(_PackedInput):
    """`to` receives activation(w @ x) * (w2 @ x), packed."""

    w: Address
    w2: Address
    n: int  # rows of each
    to: Out[Address]
    scratch: Out[Address]  # as for MATMUL


PRODUCT_GATE = op("linear.gemv_epilogue", ProductGate, "type activation")


class ProductRopeAppend(_PackedInput):
    """Fused QKV projection, RoPE and KV append, with ROPE_APPEND's results; pages are float16.

    It covers n_row of these n + 2 * n2 rows, from `first` on, which are whole queries, keys or
    values; an unused matrix may be 0.
    """

    w: Address
    w2: Address
    w3: Address
    bias: Address  # f32, or 0; bias2 and bias3 likewise
    bias2: Address
    bias3: Address
    q: Out[Address]  # f32 [n_tok, n]
    n: int  # rows of w: queries
    n2: int  # rows of w2 and of w3: keys, values
    first: int
    n_row: int
    cos: Address  # f32 [n_tok, n_half]
    sin: Address
    n_half: int
    k_pages: Out[Address]  # see KVView
    v_pages: Out[Address]
    k_table: Address
    v_table: Address


PRODUCT_ROPE_APPEND = op(
    "linear.gemv_epilogue", ProductRopeAppend, "type neox", reads=READS_NOTHING
)


class AttendPack(Attend):
    """ATTEND of one query per row, whose rows of out are also packed as by PACK_ROWS of "rows"."""

    packed: Out[Address]  # for quantised weights, see _PackedInput; 0: not packed
    early: int  # 1: the launch before it writes no Selection and no table


ATTEND_PACK = op(
    "attention.attend", AttendPack, "head_dim group type_k type_v", reads=READS_SELECTION
)


class _StagedInput:
    """The input x of source "packed" as PACK_ROWS left it for some rows.

    Else f32, see PACK_ROWS.
    """

    step: Address
    x: Address  # f32 [n_tok, n_in], or packed
    other: Address  # f32 [n_in], the weights of "norm"; else 0
    eps: float
    n_in: int
    n_shared: int  # bytes of a block's shared memory


class StagedProducts(_StagedInput):
    """PRODUCTS for some rows, and matrices that fit into shared memory."""

    w: Address
    w2: Address
    w3: Address
    bias: Address  # f32 [n], or 0; bias2 and bias3 likewise
    bias2: Address
    bias3: Address
    y: InOut[Address]  # f32 [n_tok, n]
    y2: InOut[Address]
    y3: InOut[Address]
    n: int
    n2: int  # may be 0
    n3: int  # may be 0
    add: int  # 1: adds to y, y2, y3


STAGED_PRODUCTS = op("linear.matmul_staged", StagedProducts, "type source")


class StagedGate(_StagedInput):
    """PRODUCT_GATE for some rows, and matrices that fit into shared memory."""

    w: Address
    w2: Address
    n: int  # rows of each
    to: Out[Address]


STAGED_GATE = op("linear.matmul_staged", StagedGate, "type activation source")

# A GPU's only.
LAUNCHED = (
    PRODUCTS, PRODUCT_NORM, PRODUCT_GATE, PRODUCT_ROPE_APPEND, ATTEND_PACK, STAGED_PRODUCTS,
    STAGED_GATE,
)  # fmt: skip
