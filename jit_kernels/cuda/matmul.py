"""Products with weights in their ggml encoding.

Few rows of x are numbers of 15 bits, two signed bytes each and one scale for 16 neighbours, as
PACK_ROWS leaves them; warps read each weight once and multiply its bytes.
Many rows: weights and activations become float16, which matrix units then multiply (gemm.py).
"""

from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint8, uint32

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.cuda.decode import (
    element_of,
    halves_of,
    is_quantised,
    is_signed,
    row_bytes_of,
)
from tamis.jit_kernels.cuda.gemm import gemm, narrowing
from tamis.jit_kernels.cuda.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    lane,
    sync_block,
    thread,
    warp,
    warp_sum,
)
from tamis.jit_kernels.cuda.intrinsic import (
    const_f32,
    device,
    load_f32,
    load_i64,
    quotient,
    remainder,
    store_f32,
)
from tamis.jit_kernels.cuda.ptx import (
    copy_async,
    copy_commit,
    copy_wait,
    dot_s8,
    dot_u8,
    shared_address,
    shuffle_xor,
    sync_warp,
)
from tamis.jit_kernels.cuda.readers import const_u128
from tamis.jit_kernels.cuda.scratch import FEW_ROW
from tamis.jit_kernels.ops import STEP

AT_ONCE = 4  # rows of weights that a warp multiplies at a time: they share what is read of x
CHUNK = 32 * WARP  # elements of each of them
ROOM = 72 << 10  # bytes for weights on their way to a block
MOST = 256  # rows whose sums lie in shared memory


@device
def x_unit(row, n, at):
    """Sixteen elements of a packed row: high bytes, low bytes, their scale and their sum."""
    quarter = n // 4
    return (
        const_u128(row + at),
        const_u128(row + FEW_ROW.low * quarter + at),
        const_f32(row + FEW_ROW.scale * quarter + at // 4),
        const_f32(row + FEW_ROW.sum * quarter + at // 4),
    )


def _multiplying(type: str) -> Any:
    """The function (weights of two units, units x and y) -> the product of 32 elements."""
    dot = dot_s8 if is_signed(type) else dot_u8

    @device
    def unit(weights, x):
        (q, d, m), (high, low, scale, total), h, s = weights, x, int32(0), int32(0)
        for j in range(4):
            h, s = dot(q[j], high[j], h), dot(q[j], low[j], s)
        return d * scale * (float32(128) * float32(h) + float32(s)) + m * total

    @device
    def both(weights, x, y):
        _, one, other = weights
        return unit(one, x) + unit(other, y)

    return both


@device
def four_sums(sums):
    """The sums over a warp of four numbers a lane: lane 8 i has the i-th, and lanes beside it."""
    late = lane() & 16 != 0
    a, b = (sums[2], sums[3]) if late else (sums[0], sums[1])
    c, d = (sums[0], sums[1]) if late else (sums[2], sums[3])
    a, b = a + shuffle_xor(c, 16), b + shuffle_xor(d, 16)
    x, y = (b, a) if lane() & 8 != 0 else (a, b)
    x += shuffle_xor(y, 8)
    for i in range(3):
        x += shuffle_xor(x, 4 >> i)
    return x


@device
def put(y, bias, add, value):
    """Write value + bias (0: none) over, or onto, what is at y."""
    if bias != 0:
        value += load_f32(bias)
    store_f32(y, value + load_f32(y) if add else value)


@device
def rows_of(tid, n_thread, n_out):
    """The first and last of a block's rows of weights."""
    return quotient(n_out * tid, n_thread), quotient(n_out * (tid + 1), n_thread)


class Ring(NamedTuple):
    """A warp's places in shared memory for what is on its way: `stages` times AT_ONCE rows' parts.

    part: bytes of CHUNK elements; place: of one, which begins at any address.
    """

    part: int
    place: int
    stages: int

    @property
    def size(self) -> int:
        """Bytes of all warps' places."""
        return WARPS * self.stages * AT_ONCE * self.place


def ring_of(type: str) -> Ring:
    """The places for a type's blocks."""
    kind = GGMLType[type]
    part = CHUNK // kind.block_size * kind.type_size
    place = (part + 30) // 16 * 16
    return Ring(part, place, max(2, min(4, ROOM // (WARPS * AT_ONCE * place))))


def _bringing(type: str, ring: Ring) -> Any:
    """The function that starts the copy of an item to a warp's places; a warp's work.

    An item is a part of AT_ONCE rows; `rows`: the block's first, how many, bytes of each. Of items
    from `last` on there is no copy.
    """
    part, place = ring.part, ring.place

    @device
    def bring(to, rows, n_chunk, item, last):
        first, n_row, size = rows
        if item < last:
            quad, chunk = quotient(item, n_chunk), remainder(item, n_chunk)
            for r in range(AT_ONCE):
                at = first + size * min(AT_ONCE * quad + r, n_row - 1) + part * chunk
                skip = at & 15
                n, at = skip + min(part, size - part * chunk), at - skip
                for p in range(16 * lane(), n, 16 * WARP):
                    copy_async(uint32(to + place * r + p), at + p, uint32(min(16, n - p)))
        copy_commit()

    return bring


def _few(type: str) -> Launch:
    """The kernel for at most FEW_ROWS rows: a block takes neighbouring rows of weights.

    Its warps share items, CHUNK elements of four rows each, and copy them to shared memory some
    items ahead; the first of them while the kernel before still runs.
    """
    row_bytes, product, halves, ring = (
        row_bytes_of(type), _multiplying(type), halves_of(type), ring_of(type),
    )  # fmt: skip
    bring, stages, place, part = _bringing(type, ring), ring.stages, ring.place, ring.part
    stage_bytes, wait = AT_ONCE * ring.place, copy_wait(stages - 2)

    @device
    def items_of(w, n_row, n_chunk):
        """The first and last of a warp's items."""
        n = (n_row + AT_ONCE - 1) // AT_ONCE * n_chunk
        return n * w // WARPS, n * (w + 1) // WARPS

    @device
    def ring_at(shared):
        return shared + warp() * stages * stage_bytes

    @device
    def begin(to, rows, n_chunk):
        item, last = items_of(warp(), rows[1], n_chunk)
        for stage in range(stages - 1):
            bring(to + stage_bytes * stage, rows, n_chunk, item + stage, last)

    def start(
        tid, n_thread, step, packed, w, bias, y, n_in, n_out, y_stride, add, scratch,
    ):  # fmt: skip
        shared = int64(shared_address(cuda.shared.array(0, uint8)))
        size, (first, last) = row_bytes(n_in), rows_of(tid, n_thread, n_out)
        rows = w + size * first, min(MOST, last - first), size
        begin(ring_at(shared), rows, (n_in + CHUNK - 1) // CHUNK)

    @device
    def multiply(at, rows, chunk, quad, x_row, n):
        """A lane's part of an item at `at`: four products."""
        first, n_row, size = rows
        u, a, b, c, d = lane(), float32(0), float32(0), float32(0), float32(0)
        if CHUNK * chunk + 32 * u < n:
            row, row_part = AT_ONCE * quad, first + part * chunk
            one = halves(at + ((row_part + size * row) & 15), u)
            second, third = min(row + 1, n_row - 1), min(row + 2, n_row - 1)
            other = halves(at + place + ((row_part + size * second) & 15), u)
            more = halves(at + 2 * place + ((row_part + size * third) & 15), u)
            fourth = min(row + 3, n_row - 1)
            most = halves(at + 3 * place + ((row_part + size * fourth) & 15), u)
            x = x_unit(x_row, n, CHUNK * chunk + one[0][0])
            y = x_unit(x_row, n, CHUNK * chunk + one[0][1])
            a, b, c, d = (
                product(one, x, y),
                product(other, x, y),
                product(more, x, y),
                product(most, x, y),
            )
        return a, b, c, d

    @device
    def work(to, sums, rows, n_chunk, x_row, n):
        """All of a warp's items."""
        item, last = items_of(warp(), rows[1], n_chunk)
        quad, chunk = quotient(item, n_chunk), remainder(item, n_chunk)
        total, stage = (float32(0), float32(0), float32(0), float32(0)), 0
        while item < last:
            wait()
            sync_warp()
            ahead = stage - 1 if stage > 0 else stages - 1
            bring(to + stage_bytes * ahead, rows, n_chunk, item + stages - 1, last)
            four = multiply(to + stage_bytes * stage, rows, chunk, quad, x_row, n)
            total = total[0] + four[0], total[1] + four[1], total[2] + four[2], total[3] + four[3]
            item, chunk, stage = item + 1, chunk + 1, stage + 1 if stage + 1 < stages else 0
            if chunk == n_chunk or item == last:
                value = four_sums(total)
                if lane() % 8 == 0:
                    sums[warp(), AT_ONCE * quad + lane() // 8] = value
                total = float32(0), float32(0), float32(0), float32(0)
                quad, chunk = quad + 1, 0

    @device
    def joined(sums, r, n_row, n_chunk):
        """The sum of a row, of the warps that had items of it."""
        value, first = float32(0), r // AT_ONCE * n_chunk
        for p in range(WARPS):
            begin_, end = items_of(p, n_row, n_chunk)
            value += sums[p, r] if begin_ < min(end, first + n_chunk) and end > first else 0
        return value

    def kernel(
        tid, n_thread, step, packed, w, bias, y, n_in, n_out, y_stride, add, scratch,
    ):  # fmt: skip
        sums = cuda.shared.array((WARPS, MOST), float32)
        to = ring_at(int64(shared_address(cuda.shared.array(0, uint8))))
        n_tok, size, n_chunk = (
            load_i64(step + STEP.n_tok),
            row_bytes(n_in),
            (n_in + CHUNK - 1) // CHUNK,
        )
        first, last = rows_of(tid, n_thread, n_out)
        for t in range(n_tok):
            x = packed + FEW_ROW.size * n_in // 4 * t
            for row in range(first, last, MOST):
                rows = w + size * row, min(MOST, last - row), size
                if t > 0 or row > first:  # else it is what `start` did
                    begin(to, rows, n_chunk)
                work(to, sums, rows, n_chunk, x, n_in)
                sync_block()
                for r in range(thread(), rows[1], THREADS):
                    value, c = joined(sums, r, rows[1], n_chunk), row + r
                    put(y + 4 * (y_stride * t + c), bias + 4 * c if bias != 0 else 0, add, value)
                sync_block()  # before the next sums overwrite what is read here

    return Launch(kernel, blocks=2, shared=ring.size, rows="few", start=start)


def _few_floats(type: str) -> Launch:
    """The same for weights of floats, whose rows may have any length: one row at a time."""
    row_bytes, element = row_bytes_of(type), element_of(type)

    def kernel(
        tid, n_thread, step, packed, w, bias, y, n_in, n_out, y_stride, add, scratch,
    ):  # fmt: skip
        n_tok, size = load_i64(step + STEP.n_tok), row_bytes(n_in)
        for r in range(tid * WARPS + warp(), n_out, n_thread * WARPS):
            for t in range(n_tok):
                a, row, values = float32(0), w + size * r, packed + 4 * n_in * t
                for i in range(lane(), n_in, WARP):
                    a += load_f32(values + 4 * i) * element(row, i)
                a = warp_sum(a)
                if lane() == 0:
                    put(y + 4 * (y_stride * t + r), bias + 4 * r if bias != 0 else 0, add, a)

    return Launch(kernel, blocks=4, rows="few")


def matmul(type: str) -> list[Launch]:
    """Kernels of MATMUL."""
    few = _few(type) if is_quantised(type) else _few_floats(type)
    return [few, narrowing(type), gemm()]
