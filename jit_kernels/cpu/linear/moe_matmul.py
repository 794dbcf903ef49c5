"""Products of rows with their experts' matrices; a slot is a (token, expert) pair.

Slots are sorted by expert by counting. An expert's rows, EXPERT_ROWS at a time, are gathered while
they are packed, multiplied as one matrix, and their sums are scattered. For few tokens each chosen
expert's weights are read once, without unpacking. For many, weights are decoded once for the rows,
by tiles as in gemm.py; experts are not padded with rows.
"""

from typing import Any

from numba import njit

from tamis.jit_kernels.contract.ops import (
    EXPERT_ROWS,
    EXPERT_TILE,
    FEW_ROWS,
    STEP,
    STRIP_TYPES,
    expert_scratch,
    packed_bytes,
    packed_form,
    strip_block,
)
from tamis.jit_kernels.cpu.lang.intrinsic import load_f32, load_i32, load_i64, store_f32, store_i32
from tamis.jit_kernels.cpu.lang.work_sharing import take
from tamis.jit_kernels.cpu.linear.dequant import row_bytes_of
from tamis.jit_kernels.cpu.linear.gemm import GROUP, Operands, gemm_of
from tamis.jit_kernels.cpu.linear.interleaved import OF_TYPE
from tamis.jit_kernels.cpu.linear.matmul import few_of_pairs, few_of_strips
from tamis.jit_kernels.cpu.linear.pack import pack_gathered, pack_row, scratch_of
from tamis.jit_kernels.cpu.linear.panel import NR

COLUMNS = GROUP * NR  # columns of an expert that are multiplied at a time
DECODING = 16  # the cost of decoding an expert's weights, in rows
assert 4 * EXPERT_ROWS * COLUMNS <= EXPERT_TILE

bytes_of_thread, bytes_of_rows = njit(expert_scratch), njit(packed_bytes)


@njit(error_model="numpy")
def sort_slots(ids, n_slot, n_expert, ends, order):
    """Sort slots by expert: order int32 [n_slot].

    Ends [n_expert]: the end of each expert's slots.
    """
    for e in range(n_expert + 1):
        store_i32(ends + 4 * e, 0)
    for slot in range(n_slot):
        at = ends + 4 * (load_i32(ids + 4 * slot) + 1)
        store_i32(at, load_i32(at) + 1)
    for e in range(n_expert):
        store_i32(ends + 4 * (e + 1), load_i32(ends + 4 * (e + 1)) + load_i32(ends + 4 * e))
    for slot in range(n_slot):
        at = ends + 4 * load_i32(ids + 4 * slot)  # the position of its expert's next one
        place = load_i32(at)
        store_i32(order + 4 * place, slot)
        store_i32(at, place + 1)


@njit(error_model="numpy")
def scatter(tile, columns, slots, n_row, y, n_out):
    """Write n_row rows of sums, COLUMNS apart, to the rows of y of their slots."""
    first, last = columns
    for i in range(n_row):
        to, row = y + 4 * n_out * load_i32(slots + 4 * i), tile + 4 * COLUMNS * i
        for j in range(first, last):
            store_f32(to + 4 * j, load_f32(row + 4 * (j - first)))


def matrix_bytes_of(type: str) -> Any:
    """The function matrix_bytes(n_out, n_in) of a ggml type or one in strips."""
    in_strips, row_bytes = STRIP_TYPES.get(type), row_bytes_of(STRIP_TYPES.get(type, type))
    if not in_strips:
        return njit(lambda n_out, n_in: n_out * row_bytes(n_in))
    block, size = OF_TYPE[in_strips].block, strip_block(in_strips)
    return njit(lambda n_out, n_in: n_out * (n_in // block) * size)


def multiplier_of(type: str, *, many: bool) -> Any:
    """The function multiply(a, slots, n_row, columns, given, tile, mine) of packed rows.

    a: MOE_MATMUL's record; slots: of the rows, int32 [n_row]; columns: first and last of the
    expert's, COLUMNS to a unit; given: (its weights, the packed rows).
    """
    in_strips, gemm = STRIP_TYPES.get(type), gemm_of(type)
    unit, few = few_of_strips(in_strips) if in_strips else few_of_pairs(type)
    assert COLUMNS % unit == 0

    @njit(error_model="numpy")
    def multiply(a, slots, n_row, columns, given, tile, mine):
        w, packed = given
        first, last = columns
        if n_row == 1 and not many:
            y = a.y + 4 * a.n_out * load_i32(slots)
            row = Operands(packed, 1, w, 0, y, a.n_in, a.n_out, a.n_out, 0)
            few(row, (first // unit, (last + unit - 1) // unit), mine)
            return
        for c in range(first, last, COLUMNS):
            end = min(c + COLUMNS, last)
            rows = Operands(packed, n_row, w, 0, tile - 4 * c, a.n_in, end, COLUMNS, 0)
            if many:
                gemm(rows, (c, end), (0, n_row), mine)
            else:
                few(rows, (c // unit, (end + unit - 1) // unit), mine)
            scatter(tile, (c, end), slots, n_row, a.y, a.n_out)

    return multiply


def moe_matmul(type: str) -> Any:
    """Kernel of MOE_MATMUL: threads share (rows of an expert, COLUMNS of its matrix) by load."""
    matrix_bytes, form = matrix_bytes_of(type), packed_form(type)
    pack_few, pack_many = pack_row(form), pack_gathered(form)
    multiply_few, multiply_many = multiplier_of(type, many=False), multiplier_of(type, many=True)

    @njit(error_model="numpy")
    def pack_some(a, slots, n_row, packed, mine):
        divisor = 1 if a.x_per_slot != 0 else a.n_used
        for i in range(n_row):
            row = load_i32(slots + 4 * i) // divisor
            pack_few(a.x + 4 * a.n_in * row, a.n_in, packed + 8 * a.n_in * i)

    @njit(error_model="numpy")
    def sweep(a, is_many, begin, end, held, parts):
        """Multiply the work in begin .. end; returns which rows are packed.

        held: the first of their slots; for a single row, which experts may share, -2 - the row.
        """
        order, ends, packed, tile, mine = parts
        most, at, first_slot = EXPERT_ROWS if is_many else FEW_ROWS, 0, 0
        n_unit = (a.n_out + COLUMNS - 1) // COLUMNS
        for e in range(a.n_expert):
            last_slot = load_i32(ends + 4 * e)
            for slot in range(first_slot, last_slot, most):
                n_row = min(most, last_slot - slot)
                cost = DECODING + n_row
                # A unit belongs to the range in which it begins.
                first = min(n_unit, max(0, (begin - at + cost - 1) // cost))
                last = min(n_unit, max(0, (end - at + cost - 1) // cost))
                at += n_unit * cost
                if first >= last:
                    continue
                slots, w = order + 4 * slot, a.w + matrix_bytes(a.n_out, a.n_in) * e
                columns = COLUMNS * first, min(a.n_out, COLUMNS * last)
                wanted = slot
                if n_row == 1 and a.x_per_slot == 0:
                    wanted = -2 - load_i32(slots) // a.n_used
                if is_many:
                    if held != wanted:
                        rows = slots, 1 if a.x_per_slot != 0 else a.n_used
                        pack_many(a.x, a.n_in, rows, n_row, packed, mine)
                    multiply_many(a, slots, n_row, columns, (w, packed), tile, mine)
                else:
                    if held != wanted:
                        pack_some(a, slots, n_row, packed, mine)
                    multiply_few(a, slots, n_row, columns, (w, packed), tile, mine)
                held = wanted
            first_slot = last_slot
        return held

    @njit(error_model="numpy")
    def work_of(a, ends, most):
        rows, first_slot = 0, 0
        for e in range(a.n_expert):
            n = load_i32(ends + 4 * e) - first_slot
            rows += n + DECODING * ((n + most - 1) // most)
            first_slot += n
        return rows * ((a.n_out + COLUMNS - 1) // COLUMNS)

    def kernel(tid, n_thread, turns, a):
        n_tok = load_i64(a.step + STEP.n_tok)
        is_many, n_slot = n_tok > FEW_ROWS, n_tok * a.n_used
        mine = a.scratch + tid * bytes_of_thread(a.n_in, n_slot, a.n_expert)
        packed = (mine + scratch_of(a.n_in) + 63) // 64 * 64
        tile = packed + bytes_of_rows(EXPERT_ROWS, a.n_in)
        ends = tile + EXPERT_TILE
        order = ends + 4 * (a.n_expert + 1)
        sort_slots(a.ids, n_slot, a.n_expert, ends, order)
        work = work_of(a, ends, EXPERT_ROWS if is_many else FEW_ROWS)
        turn, held = 0, -1
        begin, end = take(turn, tid, n_thread, work, turns)
        while begin < work:
            held = sweep(a, is_many, begin, end, held, (order, ends, packed, tile, mine))
            turn += 1
            begin, end = take(turn, tid, n_thread, work, turns)

    return kernel
