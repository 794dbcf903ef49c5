"""Ops of a GPU's copy of keys in 4 or 8 bits: scores by it, and exact scores of the best of them.

Element d of a key is centre[d] + spread[d] * step * code[d]. Centre and spread are the mean and the
standard deviation of an element over some keys, the step is the key's own, and codes are -7 to 7 or
-127 to 127. The rounding error of an element is at most spread[d] * step / 2. What a CPU has in its
place is in key_codes.py: there a row is one thread's, and needs no list of candidates.
"""

from tamis.jit_kernels.contract.arrays import F16, F32, I32, I64, U8
from tamis.jit_kernels.contract.op import READS_ALL, Address, InOut, Out, Step, op
from tamis.jit_kernels.contract.ops.select.key_codes import UNCODED

COPY_SAMPLE = 256  # keys of which centre and spread are taken
BAR_PARTS = 2047  # of the range of a row's maxima: how far a bar may be below the best
COPY_TIMES = 2  # how many times n_top positions become candidates


def copy_bytes(head_dim: int, bits: int) -> int:
    """Bytes of a key's codes: elements are filled up to whole 32."""
    return -(-head_dim // 32) * 4 * bits


class ScoreCopy:
    """Copy the keys from `filled` to the middle's end; then do what SCORE_KEYS does by the copy.

    This is for KV heads with queries to score, whose rows are of one head or of all. If no key was
    copied, centre and spread are taken first, of COPY_SAMPLE keys: of n positions, number i of m is
    floor(i * n / m). Of 4 bits, byte i of a word has element i of eight in its low half and element
    i + 4 in its high half, as code plus 8.
    Queries times spread are rounded to 127ths of their largest element.
    """

    step: Step
    q: F32["n_head", "head_dim"]
    counts: I32["n_head_kv"] | None  # query heads to score; None: all
    k_pages: Address
    k_table: Address
    filled: I64["n_head_kv"]  # positions that are copied; COPY_CANDIDATES counts the new ones
    centre: InOut[F32["n_head_kv", "head_dim"]]
    spread: InOut[F32["n_head_kv", "head_dim"]]
    codes: InOut[U8["n_head_kv", "capacity", "n_byte"]]
    steps: InOut[F16["n_head_kv", "capacity"]]
    scores: Out[F32["n_head", "capacity"]]  # as for SCORE_KEYS
    maxima: Out[F32["n_head", "capacity // 16"]]
    n_found: Out[I32["n_row"]]  # zeros
    n_sink: int
    n_local: int
    drop: int


SCORE_COPY = op("select.key_copy", ScoreCopy, "head_dim heads group type_k bits", reads=UNCODED)


class CopyCandidates:
    """The positions of each row whose scores reach a bar, which COPY_TIMES * n_top maxima reach.

    So the best COPY_TIMES * n_top positions are among them. The bar is the least that shares a
    counter with the (COPY_TIMES * n_top)-th best of the maxima, whose range is cut into
    BAR_PARTS. If there are no more maxima than that, all positions reach it. The positions get
    exact scores, in `scores` too.
    """

    step: Step
    q: F32["n_head", "head_dim"]
    counts: I32["n_head_kv"] | None
    k_pages: Address
    k_table: Address
    filled: InOut[I64["n_head_kv"]]
    scores: InOut[F32["n_head", "capacity"]]
    maxima: F32["n_head", "capacity // 16"]
    found: Out[I32["n_row", "capacity"]]  # positions, in any order
    exact: Out[F32["n_row", "capacity"]]  # their scores
    n_found: InOut[I32["n_row"]]
    n_top: int
    n_sink: int
    n_local: int
    drop: int


COPY_CANDIDATES = op(
    "select.key_copy", CopyCandidates, "head_dim heads group type_k", reads=READS_ALL
)
