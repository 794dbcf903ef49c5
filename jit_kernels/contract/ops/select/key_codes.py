"""Ops of the int8 copy of keys: coding, scores by it, and exact scores of borderline keys.

A key is stored without the centre, a mean of some keys: element d is step * (code[d] - 128), code a
byte from 1 to 255. The rounding error is at most step / 2, so a product with a query errs by at
most |q|_1 * step / 2. Without the centre the step would be that of the few elements that are large
in every key, as the biases of some models make them.
"""

from tamis.jit_kernels.contract.op import Address, Ranges, Reads, op
from tamis.jit_kernels.contract.ops.select.common import LIST_PAD, SCORE_KEYS, TILE, ScoreKeys

KEYS = 16  # positions whose codes are interleaved
CODE_WORKERS = 64  # most threads that code keys
LEAST_EXTRA = 64  # scores on either side of the threshold that are made exact
N_CENTRE = 64  # number of keys in the centre's mean


def _uncoded(low: int, _high: int, _block: int, _x: int, _y: int, n_tok: int, pos: int) -> Ranges:
    return min(low, pos), pos + n_tok, 0, 0


UNCODED = Reads("key_codes", _uncoded, found="filled")


class KeyCentre:
    """If no key is coded, the mean of N_CENTRE evenly spaced keys, or of all.

    Of n positions, number i of m is floor(i * n / m).
    """

    step: Address
    k_pages: Address
    k_table: Address
    centre: Address  # f32 [n_head_kv, head_dim]
    filled: Address  # int64 [n_head_kv]: positions that are coded
    n_head_kv: int


KEY_CENTRE = op("attention.key_codes", KeyCentre, "head_dim type_k", reads=UNCODED)


class KeyCodes:
    """Code the keys from `filled` on, and the queries that SCORE_CODES multiplies them by.

    A query's codes are its elements in 127ths of the largest, rounded; on x86-64 without VNNI in
    64ths. A key's are in 127ths, plus 128 except on AArch64, which multiplies signed bytes.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    k_pages: Address
    k_table: Address
    centre: Address
    codes: Address  # uint8 [n_head_kv, capacity / 16, head_dim / 4, 16, 4]
    steps: Address  # f32 [n_head_kv, capacity]
    filled: Address
    q_codes: Address  # int8 [n_head, head_dim]
    q_sums: Address  # int32 [n_head]: of a head's codes
    q_steps: Address  # f32 [n_head]
    q_centre: Address  # f32 [n_head]: q . centre
    line: Address  # f32 [CODE_WORKERS, head_dim], scratch
    n_head: int
    n_head_kv: int
    capacity: int  # a multiple of 256


KEY_CODES = op("attention.key_codes", KeyCodes, "head_dim type_k", reads=UNCODED)


class ScoreCodes:
    """Do what SCORE_KEYS does by the codes of KEY_CODES; all keys must be coded."""

    step: Address
    q_codes: Address
    q_sums: Address
    q_steps: Address
    q_centre: Address
    counts: Address  # int32 [n_head_kv]: query heads to score; 0: all
    codes: Address
    steps: Address
    # int64 [n_head_kv]: becomes the step's position, which the next step codes once more: if a step
    # fails after this op, another key follows there.
    filled: Address
    scores: Address  # as for SCORE_KEYS
    maxima: Address
    n_head_kv: int
    capacity: int
    n_sink: int
    n_local: int
    drop: int


SCORE_CODES = op("select.common", ScoreCodes, "head_dim heads group")


class RescoreKeys(ScoreKeys):
    """Exact scores for those that SCORE_CODES's errors could move in or out of the best n_top.

    In each row these are the ones that rank from n_top - n_extra to n_top + n_extra; n_extra is a
    fourth of n_top, rounded up, and at least LEAST_EXTRA. maxima are updated.
    """

    work: Address  # int32 [n_head_kv * heads / group, rescore_work(capacity, group)], scratch
    n_top: int


RESCORE_KEYS = op(
    "select.common", RescoreKeys, "head_dim heads group type_k", reads=SCORE_KEYS.reads
)


def rescore_work(capacity: int, group: int) -> int:
    """Words of scratch that RESCORE_KEYS needs per row: lists and a tile of products."""
    return 3 * capacity + LIST_PAD + group * TILE


class MassBracket:
    """Bounds of the mass that a Selection leaves out, from coded keys alone.

    A logit of float queries and coded keys errs by at most scale * |q|_1 * step / 2. The lower
    bound assumes the least weight of what is left out and the most of what is kept; the upper bound
    the opposite.
    """

    step: Address
    q: Address  # f32 [n_head, head_dim]
    codes: Address
    steps: Address
    centre: Address
    indptr: Address
    indices: Address
    found: Address  # f64 [n_head, 2]: the lower and the upper bound
    work: Address  # f32 [n_head, 2 * capacity], scratch
    block: int
    n_row: int
    heads_per_kv: int
    n_head: int
    capacity: int
    scale: float


MASS_BRACKET = op("select.audit", MassBracket, "head_dim")
