"""RoPE, the KV append and attention over a Selection."""

from tamis.jit_kernels.contract.op import READS_NOTHING, READS_SELECTION, op
from tamis.jit_kernels.contract.types import KV_BLOCK, PAGE

MAX_Q_BLOCK = 16  # queries that a row of ATTEND's Selection stands for, at most

# Rotary positions (Su et al. 2021, arXiv 2104.09864, Eq. 34). inv_freq f64 [n_half];
# cos, sin f32 [n_tok, n_half] of (pos + i) * inv_freq, times scale.
ROPE_TABLE = op("attention.rope", "rope_table", "", "step inv_freq cos sin n_half scale_f")

# The heads of new tokens made ready, in place, and kept. q f32 [n_tok, n_head, head_dim] and
# k f32 [n_tok, n_head_kv, head_dim]: rms norm by q_norm and k_norm f32 [head_dim] (both may be 0:
# none), then turned by cos and sin; pairs (i, i + n_half) where neox, else (2i, 2i + 1); elements
# from 2 * n_half on stay. k and v go to positions pos.. of the pages (see KVView): as float16,
# as q8_0 (ggml's: d = largest / 127, each element to the nearest multiple, ties away from 0) or as
# q4_0 (ggml's: d = the element of largest magnitude / -8, x / d + 8.5 cut off, at most 15).
# type_k, type_v: of the pages, one of KV_TYPES; an op that has no such constant reads float16.
ROPE_APPEND = op(
    "attention.rope",
    "rope_append",
    "head_dim neox type_k type_v",
    "step q k v q_norm k_norm cos sin k_pages v_pages k_table v_table n_head n_head_kv n_half"
    " eps_f",
    reads=READS_NOTHING,
)

# Attention of q f32 [n_tok, n_head, head_dim] over the selected blocks of a layer's pages;
# out f32 like q, lse f32 [n_tok, n_head] or 0. Row r of the Selection holds query heads
# [r * group, (r + 1) * group), all of KV head r * group // heads_per_kv. Position j takes part for
# a query at p where p - window < j <= p (window 0: no lower end). The work of one row is cut in
# n_split parts; where n_split > 1, out and lse are left to ATTEND_MERGE and partial f32
# [n_tok, n_head, n_split, head_dim + 2] holds each part's sum, maximum and normaliser. Where a
# GPU's row is one query and has an out, the block that ends it joins the parts at once.
# A head that no position is left for gets 0, and an lse below -1e29 (it weighs nothing in a merge).
# Query t is row step.row + stride * t of q, at position pos + stride * t; out and lse have row t.
# scratch: n_thread * attend_scratch(group, head_dim) bytes; q_block is at most MAX_Q_BLOCK.
# Where q_block is 1 and keys are quantised, queries are rounded to 15 bits, one scale a KV_BLOCK.
ATTEND = op(
    "attention.attend",
    "attend",
    "head_dim group q_block type_k type_v",
    "step q k_pages v_pages k_table v_table indptr indices log_weight block n_row heads_per_kv"
    " n_head_kv window n_split stride partial out lse scratch scale_f",
    reads=READS_SELECTION,
)

# Join the n_split parts of each head: out f32 [n_tok, n_head, head_dim], lse as above. q_block is
# ATTEND's: for 1, a GPU has nothing left to do.
ATTEND_MERGE = op(
    "attention.attend", "attend_merge", "head_dim q_block", "step partial out lse n_head n_split"
)


def attend_scratch(group: int, head_dim: int) -> int:
    """Bytes of scratch that ATTEND needs a thread: queries, sums and scores, a page in float32.

    And of one token's queries what q8_0 and q4_0 need: 16-bit copies, and weights a KV_BLOCK.
    """
    n_query, n_block = MAX_Q_BLOCK * group, -(-head_dim // KV_BLOCK)
    a_query, a_key = 2 * head_dim + PAGE + 4, 2 * head_dim + 10 + n_block
    quantised = group * (head_dim // 2 + n_block * (PAGE + 1))
    return 4 * (n_query * a_query + PAGE * a_key + quantised) + 64 * 5
