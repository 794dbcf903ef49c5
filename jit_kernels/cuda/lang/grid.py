"""Thread indices, warp and block reductions, and launches of kernels.

A kernel's tid and n_thread are its block and the number of blocks; a block has THREADS threads
unless its Launch says otherwise.
"""

from typing import Any, NamedTuple

from numba import cuda, float32, float64, int32, types, uint32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.intrinsic import const_i64, device, load_f32, store_i32
from tamis.jit_kernels.cuda.lang.ptx import (
    count_one,
    fence,
    keep,
    lowest_of_warp,
    shuffle_i32,
    shuffle_xor,
)

THREADS, WARP = 256, 32
WARPS = THREADS // WARP
MOST_THREADS = 1024  # of a block
MOST_WARPS = MOST_THREADS // WARP


sync_block: Any = cuda.syncthreads


MORE = "some many"  # see Launch


class Launch(NamedTuple):
    """One kernel of an op. An op is a list of them, launched in order.

    blocks: per multiprocessor, of `threads` threads. rows: the kernel is for calls of "few" rows
    (at most FEW_ROWS), of "some" (at most SOME_ROWS), of "many", of two of these, or of "any".
    start: the prologue, which may run while the kernel before is still running and reads nothing
    that other kernels write. hands_on: whether start's result is the kernel's last argument.
    """

    kernel: Any
    blocks: int = 1
    shared: int = 0  # bytes of dynamic shared memory
    threads: int = THREADS
    rows: str = "any"
    start: Any = None
    hands_on: bool = False
    cluster: int = 1  # blocks that run at the same time; n_thread is a multiple of it
    # whether blocks of any power of two of threads, from a warp on, give the same results
    any_size: bool = False


@device
def step_of(step):
    """Rows, position and first row of a step record that no kernel writes, read once."""
    return const_i64(step + STEP.n_tok), const_i64(step + STEP.pos), const_i64(step + STEP.row)


def look_ahead(tid, n_thread, a):
    """The prologue of a kernel of few rows: loads the step record while the previous one runs."""
    for value in step_of(a.step):
        keep(value)


@device
def thread():
    """Number of the thread in its block."""
    return cuda.threadIdx.x


@device
def threads():
    """Threads of this block, for functions that blocks of any size call; a power of two."""
    return cuda.blockDim.x


@device
def lane():
    """Number of the thread in its warp."""
    return thread() % WARP


@device
def warp():
    """Number of the warp in its block."""
    return thread() // WARP


@device
def warp_sum(x):
    """The sum over a warp, in every lane."""
    for i in range(5):
        x += shuffle_xor(x, 16 >> i)
    return x


@device
def warp_max(x):
    """The maximum over a warp, in every lane."""
    for i in range(5):
        x = max(x, shuffle_xor(x, 16 >> i))
    return x


@device
def block_sum(x):
    """The sum over a block, in every thread; all threads must call it."""
    parts = cuda.shared.array(WARPS, float32)
    x = warp_sum(x)
    sync_block()  # results of an earlier call may still be read
    if lane() == 0:
        parts[warp()] = x
    sync_block()
    total = parts[0]
    for i in range(1, WARPS):
        total += parts[i]
    return total


@device
def block_max(x):
    """The maximum over a block, in every thread; all threads must call it."""
    parts = cuda.shared.array(WARPS, float32)
    x = warp_max(x)
    sync_block()  # results of an earlier call may still be read
    if lane() == 0:
        parts[warp()] = x
    sync_block()
    top = parts[0]
    for i in range(1, WARPS):
        top = max(top, parts[i])
    return top


@device
def warp_through(x):
    """The sum of an int32 over this lane and those before it."""
    for i in range(5):
        other = shuffle_i32(int32(x), (lane() - (1 << i)) % WARP)
        x += other if lane() >= 1 << i else 0
    return x


@device
def block_before(x, parts):
    """The exclusive prefix sum of x, an int32, over the block, and the total; all must call it.

    parts: a shared array, an int32 a warp. The caller makes it, since a function with a shared
    array can have one caller only: each inlined copy would define the same symbol.
    """
    through, n_warp = warp_through(x), threads() // WARP
    sync_block()  # results of an earlier call may still be read
    if lane() == WARP - 1:
        parts[warp()] = through
    sync_block()
    sums = warp_through(parts[lane()] if lane() < n_warp else int32(0))
    total = shuffle_i32(int32(sums), n_warp - 1)
    before = shuffle_i32(int32(sums), max(warp() - 1, 0))
    return (before if warp() > 0 else 0) + through - x, total


@device
def most_of(x, parts):
    """The largest of the threads' float32s; parts: a shared array, a float32 a warp."""
    x = warp_max(x)
    sync_block()  # results of an earlier call may still be read
    if lane() == 0:
        parts[warp()] = x
    sync_block()
    top = parts[0]
    for i in range(1, threads() // WARP):
        top = max(top, parts[i])
    return top


@device
def total_of(x, parts):
    """The sum of the threads' float32s; parts: as for most_of."""
    x = warp_sum(x)
    sync_block()  # results of an earlier call may still be read
    if lane() == 0:
        parts[warp()] = x
    sync_block()
    total = parts[0]
    for i in range(1, threads() // WARP):
        total += parts[i]
    return total


@device
def least_of(x, parts):
    """The least of the threads' int32s; parts: a shared array, an int32 a warp."""
    x = lowest_of_warp(int32(x))
    sync_block()  # results of an earlier call may still be read
    if lane() == 0:
        parts[warp()] = x
    sync_block()
    least = parts[lane()] if lane() < threads() // WARP else x
    return lowest_of_warp(int32(least))


@device
def is_last(counter, n):
    """Whether this block is the last of n to arrive; it then sees what the others wrote.

    counter: a counter that is 0 before and after. All threads must call it.
    """
    found = cuda.shared.array(1, types.boolean)
    fence()
    sync_block()
    if thread() == 0:
        found[0] = count_one(counter) == uint32(n - 1)
        if found[0]:
            store_i32(counter, 0)
    sync_block()
    fence()
    return found[0]


# ---- of float64, by a shared array of THREADS float64, `sums`, of the kernel -------------------
@device
def sums_before(x, sums):
    """The exclusive prefix sum of x, a float64, over the block, and the total; all must call it."""
    total = x
    sums[thread()] = total
    sync_block()
    for i in range(8):
        other = sums[thread() - (1 << i)] if thread() >= 1 << i else 0.0
        sync_block()
        total += other
        sums[thread()] = total
        sync_block()
    whole = sums[THREADS - 1]
    sync_block()  # before the next sum overwrites what is read here
    return total - x, whole


@device
def sum_of(floats, first, end, sums):
    """The sum of float32s first .. end - 1."""
    mine = 0.0
    for i in range(first + thread(), end, THREADS):
        mine += float64(load_f32(floats + 4 * i))
    return sums_before(mine, sums)[1]


@device
def largest(x, sums):
    """The largest of the threads' float64s; all must call it."""
    sums[thread()] = x
    sync_block()
    for i in range(8):
        if thread() < 128 >> i:
            sums[thread()] = max(sums[thread()], sums[thread() + (128 >> i)])
        sync_block()
    found = sums[0]
    sync_block()
    return found
