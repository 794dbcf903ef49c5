"""Fused ops that only a GPU launches, chosen by backends/fusion.py."""

from tamis.jit_kernels.contract.op import READS_NOTHING, READS_SELECTION, op
from tamis.jit_kernels.contract.ops.attention import ATTEND

# What a GPU runs in one launch instead of several other ops, for few rows (fusion.py): no
# Program names them, and no CPU has kernels of them. packed: rows as PACK_ROWS left them (normed
# 0), or as one of these did for a norm (normed 1): then products are divided by the root of the
# mean square, which it left there too, and eps. A matrix has a multiple of 16 rows; w2, w3: more
# matrices, of n2 and n3 rows. The row of `step` is 0.
_X = "step packed normed eps_f n_in"

# y, y2, y3 (+)= rows of w @ x, of w2 @ x and of w3 @ x; n2 and n3 may be 0.
PRODUCTS = op(
    "linear.gemv_epilogue", "products", "type", f"{_X} w w2 w3 bias bias2 bias3 y y2 y3 n n2 n3 add"
)

# y (+)= rows of w @ x, and `to` is y packed for its norm, whose weights these are.
PRODUCT_NORM = op("linear.gemv_epilogue", "product_norm", "type", f"{_X} w bias y n add weight to")

# `to` is activation(w @ x) * (w2 @ x), packed.
PRODUCT_GATE = op("linear.gemv_epilogue", "product_gate", "type activation", f"{_X} w w2 n to")

# Queries (n of them), keys and values (n2 of each) as ROPE_APPEND leaves them; pages are float16.
# Of these n + 2 * n2 rows, n_row from `first` on, which are whole queries, keys or values; a matrix
# of others may be 0.
PRODUCT_KEEP = op(
    "linear.gemv_epilogue", "product_keep", "type neox",
    f"{_X} w w2 w3 bias bias2 bias3 q n n2 first n_row cos sin n_half k_pages v_pages k_table"
    " v_table",
    reads=READS_NOTHING,
)  # fmt: skip

# ATTEND of one query a row, whose rows of out are also packed as by PACK_ROWS of source "rows",
# for quantised weights: see PRODUCTS; packed 0: they are not. early: the launch before it writes no
# Selection and no table.
ATTEND_PACK = op(
    "attention.attend",
    "attend_pack",
    "head_dim group type_k type_v",
    " ".join((*ATTEND.fields, "packed", "early")),
    reads=READS_SELECTION,
)

LAUNCHED = PRODUCTS, PRODUCT_NORM, PRODUCT_GATE, PRODUCT_KEEP, ATTEND_PACK  # a GPU's only
