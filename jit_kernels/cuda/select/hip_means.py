"""HiP's search over means: bytes that stand for the keys of a block, or of 4 or 16 blocks.

Numbers of lanes and threads are kept (`keep`) within loops. Otherwise what each loop computes from
them would be computed ahead of all loops, in more registers than two blocks of threads have.
"""

import math
from typing import Any

from llvmlite import ir
from numba import cuda, float32, int32, int64, types, uint8, uint32

from tamis.jit_kernels.contract.ops import SIBLINGS, STEP, hip_work
from tamis.jit_kernels.cuda.attention.attend_epilogue import LOG2_E, LOWEST
from tamis.jit_kernels.cuda.attention.score import ROW, SPAN, staging
from tamis.jit_kernels.cuda.kv.kv_rows import key_row, reading_one, row_bytes
from tamis.jit_kernels.cuda.lang.grid import (
    THREADS,
    WARP,
    WARPS,
    Launch,
    lane,
    sync_block,
    thread,
    threads,
    warp,
    warp_max,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    I32,
    I64,
    bits_f32,
    device,
    load_constant,
    load_device,
    load_f32,
    load_i32,
    load_i64,
    op,
    rounded,
    store_f32,
    store_i8,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    MMA_S8,
    ballot,
    cluster_arrive,
    cluster_wait,
    count_bits,
    emit,
    exp2,
    keep,
    load_shared,
    shared_address,
    shuffle_xor,
    store_shared_f32,
)
from tamis.jit_kernels.cuda.lang.radix_topk import (
    HELD,
    hold,
    write_best,
    write_best_weights,
    write_range,
)
from tamis.jit_kernels.cuda.lang.target import current

SIZE = 127.0  # steps of a byte
FEW_THREADS, CLUSTER = 512, 8  # of a block that searches one of few rows; blocks a row
QUAD = 4  # heads whose bytes lie together and are multiplied together
row_work = device(hip_work)


@device
def level_start(room, level):
    """The first row of a level's means: level 0 has `room` of them, each level a fourth."""
    return (room - (room >> 2 * level)) // 3 * 4


def hip_means(head_dim: int, type_k: str) -> list[Launch]:
    """Kernels of HIP_MEANS: warps stride over the means.

    A last kernel notes that they are there.
    """
    size, read = row_bytes(type_k, head_dim), reading_one(type_k, head_dim)

    @device
    def add_up(mine, keys, first, n):
        """The sum of n keys to the warp's floats in shared memory; its least and largest part."""
        k_pages, k_table, n_head_kv, h = keys
        part, least, most = float32(1.0 / n), float32(-LOWEST), float32(LOWEST)
        for d in range(lane(), head_dim, WARP):
            total = float32(0)
            for j in range(first, first + n):
                total += read(k_pages + size * key_row(k_table, n_head_kv, h, j), d)
            total *= part
            store_shared_f32(uint32(mine + 4 * d), total)
            least, most = min(least, total), max(most, total)
        return -warp_max(-least), warp_max(most)

    def kernel(tid, n_thread, a):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        n_row, end = level_start(a.room, a.top + 1), (pos + n_tok) // a.block
        mine = shared_address(cuda.shared.array(0, uint8)) + 4 * head_dim * warp()
        item, n_warp = tid + n_thread * warp(), n_thread * WARPS
        for h in range(a.n_head_kv):
            # Keys from pos on are new, whatever was there before.
            first = min(load_i64(a.filled + 8 * h), pos // a.block)
            keys = (a.k_pages, a.k_table, a.n_head_kv, h)
            for level in range(a.top + 1):
                n, begin = a.block << 2 * level, first >> 2 * level
                n_mean = (end >> 2 * level) - begin
                while item < n_mean:
                    row = n_row * h + level_start(a.room, level) + begin + item
                    place = (begin + item) % SIBLINGS
                    low, high = add_up(mine, keys, (begin + item) * n, n)
                    width = high - low
                    per = float32(SIZE) / width if width > float32(0) else float32(0)
                    to = a.means + head_dim * (row - place) + 4 * place
                    for d in range(lane(), head_dim, WARP):
                        x = (load_shared(uint32(mine + 4 * d)) - low) * per
                        store_i8(to + 16 * (d // 4) + d % 4, rounded(x))
                    if lane() == 0:
                        at = a.extents + 8 * (row - place) + 4 * place
                        store_f32(at, width / float32(SIZE))
                        store_f32(at + 4 * SIBLINGS, low)
                    item += n_warp
                item -= n_mean  # which warp is next, whatever level or head it comes to

    def note(tid, n_thread, a):
        if tid == 0 and thread() < a.n_head_kv:
            end = (load_i64(a.step + STEP.pos) + load_i64(a.step + STEP.n_tok)) // a.block
            store_i64(a.filled + 8 * thread(), end)

    return [Launch(kernel, shared=4 * head_dim * WARPS), Launch(note)]


@device
def power_of_two(x):
    """About 2^x: exact where x is whole, straight lines between; x is taken within +-120."""
    x = max(min(x, float32(120)), float32(-120))
    # Floats of this size are whole.
    return bits_f32(uint32(int32(x * float32(8388608) + float32(1065353216))))


@device
def with_weights(totals, sums, extents, head):
    """Totals and the weights of four means for a head, whose three numbers are at `head`."""
    factor, of_low, offset = load_f32(head), load_f32(head + 4), load_f32(head + 8)
    x = (
        float32(sums[0]) * extents[0], float32(sums[1]) * extents[1],
        float32(sums[2]) * extents[2], float32(sums[3]) * extents[3],
    )  # fmt: skip
    return (
        totals[0] + power_of_two(x[0] * factor + (extents[4] * of_low + offset)),
        totals[1] + power_of_two(x[1] * factor + (extents[5] * of_low + offset)),
        totals[2] + power_of_two(x[2] * factor + (extents[6] * of_low + offset)),
        totals[3] + power_of_two(x[3] * factor + (extents[7] * of_low + offset)),
    )  # fmt: skip


def _preparing(head_dim: int, group: int, type_k: str) -> tuple[Any, Any]:
    """Functions normalise and shorten, of the heads of several queries; a block's work.

    A head's three numbers, at numbers + 12 * head: the factor of its products, that of its bytes'
    sum, and minus the logarithm to base 2 of the sum that its weights are divided by.
    """
    n_word, size = head_dim // 4, row_bytes(type_k, head_dim)

    @device
    def near_key(near, i):
        (k_pages, k_table, n_head_kv, h), (sinks, low, n) = near
        j = i if i < sinks else low + i - sinks
        row = key_row(k_table, n_head_kv, h, j) if i < n else 0
        return k_pages + size * row if i < n else 0

    stage = staging(head_dim, group, near_key, type_k)

    @device
    def add_span(shared, head, g, n, factor):
        """Update head g's running maximum and sum with n scores."""
        top, total, mine = load_f32(head), float32(0), float32(LOWEST)
        at = keep(lane())
        for i in range(at, n, WARP):
            mine = max(mine, load_shared(uint32(shared + ROW * g + 4 * i)) * factor)
        new = max(top, warp_max(mine))
        for i in range(at, n, WARP):
            total += exp2(load_shared(uint32(shared + ROW * g + 4 * i)) * factor - new)
        total = warp_sum(total) + load_f32(head + 4) * exp2(top - new)
        cuda.syncwarp()
        if lane() == 0:
            store_f32(head, new)
            store_f32(head + 4, total)

    @device
    def normalise(shared, numbers, queries, near, factor):
        first, n_query, apart = queries
        n = near[1][2]
        for i in range(keep(thread()), n_query * group, THREADS):
            store_f32(numbers + 12 * i, float32(LOWEST))
            store_f32(numbers + 12 * i + 4, float32(0))
        sync_block()
        for t in range(n_query):
            for start in range(0, n, SPAN):
                stage(keep(shared), first + apart * t, group, near, start)
                for g in range(warp(), group, WARPS):
                    head = numbers + 12 * (group * t + g)
                    add_span(shared, head, g, min(SPAN, n - start), factor)
                sync_block()  # before the next span's products overwrite what is read here
        for i in range(keep(thread()), n_query * group, THREADS):
            top, total = load_f32(numbers + 12 * i), load_f32(numbers + 12 * i + 4)
            store_f32(numbers + 12 * i + 8, -(top + math.log(total) * float32(LOG2_E)))
        sync_block()

    @device
    def shorten(numbers, words, queries, factor):
        """Write heads as signed bytes: words [quad, word, head of the quad]."""
        first, n_query, apart = queries
        for t in range(warp(), n_query * group, WARPS):
            mine = keep(lane())
            head = first + t // group * apart + 4 * head_dim * (t % group)
            most = float32(0)
            total = 0
            for d in range(mine, head_dim, WARP):
                most = max(most, abs(load_f32(head + 4 * d)))
            most = warp_max(most)
            per = float32(SIZE) / most if most > float32(0) else float32(0)
            for w in range(mine, n_word, WARP):
                word = 0
                for i in range(4):
                    x = rounded(load_f32(head + 16 * w + 4 * i) * per)
                    word |= (x & 255) << 8 * i
                    total += x
                store_i32(words + 16 * (t // QUAD * n_word + w) + 4 * (t % QUAD), word)
            scale = most / float32(SIZE) * factor
            of_low = warp_sum(float32(total)) * scale
            if lane() == 0:
                store_f32(numbers + 12 * t, scale)
                store_f32(numbers + 12 * t + 4, of_low)
        sync_block()

    return normalise, shorten


def _multiplying(head_dim: int) -> tuple[Any, Any, Any]:
    """A warp's products of bytes: 16 means and 8 heads, of which a lane has every fourth word.

    Functions that read a lane's words of a mean and of a head, 64 bytes apart, and that multiply
    the words of two means (rows g and g + 8 of MMA_S8) and of a head (its column g).
    """
    n = head_dim // 16
    kind = types.UniTuple(uint32, n)

    def reading(load: Any) -> Any:
        @op(kind, int64)
        def read(b: Any, p: Any) -> list[Any]:
            return [load(b, b.add(p, ir.Constant(I64, 64 * i)), I32, 4) for i in range(n)]

        return read

    @op(types.UniTuple(int32, 4), kind, kind, kind)
    def multiply(b: Any, one: Any, other: Any, head: Any) -> list[Any]:
        none, sums = ir.Constant(I32, 0), [ir.Constant(I32, 0)] * 4
        one, other, head = ([*words, none] for words in (one, other, head))
        for i in range(0, n, 2):
            pairs = one[i], other[i], one[i + 1], other[i + 1], head[i], head[i + 1]
            sums = emit(b, MMA_S8, [*pairs, *sums])
        return sums

    return reading(load_constant), reading(load_device), multiply


def _rating(head_dim: int, n_warp: int) -> Any:
    """The function that scores the children of listed parents, or of the first ones.

    The work of some blocks of n_warp warps. A warp takes eight parents: of every other one a lane
    has the g-th of SIBLINGS children, and of eight heads two. block: its number, and how many.
    """
    read_mean, read_head, multiply = _multiplying(head_dim)
    size = SIBLINGS * head_dim

    @device
    def over_quad(x):
        x += shuffle_xor(x, uint32(1))
        return x + shuffle_xor(x, uint32(2))

    @device
    def parent(parents, i):
        return load_i32(parents + 4 * i) if parents != 0 else int64(i)

    @device
    def rate(block, scores, heads, level, parents, n_parent):
        (numbers, words, n_head), (means, extents) = heads, level
        last, mine = n_parent - 1, warp() + n_warp * block[0]
        for first in range(8 * mine, n_parent, 8 * n_warp * block[1]):
            here = keep(lane())
            g, t = here // 4, here % 4
            sibling, p = g % SIBLINGS, first + g // SIBLINGS
            a, b = parent(parents, min(p, last)), parent(parents, min(p + 2, last))
            c, d = parent(parents, min(p + 4, last)), parent(parents, min(p + 6, last))
            mine, at = means + 16 * t + 4 * sibling, extents + 4 * sibling
            early = read_mean(mine + size * a), read_mean(mine + size * b)
            late = read_mean(mine + size * c), read_mean(mine + size * d)
            extent = (
                load_f32(at + 32 * a), load_f32(at + 32 * b), load_f32(at + 32 * c),
                load_f32(at + 32 * d), load_f32(at + 32 * a + 16), load_f32(at + 32 * b + 16),
                load_f32(at + 32 * c + 16), load_f32(at + 32 * d + 16),
            )  # fmt: skip
            totals = float32(0), float32(0), float32(0), float32(0)
            for h in range(0, n_head, 2 * QUAD):
                quad = min(h + g, n_head - 1) // QUAD  # there is a whole one
                head = read_head(words + 4 * head_dim * quad + 16 * t + 4 * (g % QUAD))
                x, y = multiply(early[0], early[1], head), multiply(late[0], late[1], head)
                own = numbers + 12 * (h + 2 * t)
                if h + 2 * t < n_head:
                    totals = with_weights(totals, (x[0], x[2], y[0], y[2]), extent, own)
                if h + 2 * t + 1 < n_head:
                    totals = with_weights(totals, (x[1], x[3], y[1], y[3]), extent, own + 12)
            one, two = over_quad(totals[0]), over_quad(totals[1])
            three, four = over_quad(totals[2]), over_quad(totals[3])
            total = (one if t == 0 else two) if t < 2 else (three if t == 2 else four)
            if p + 2 * t <= last:
                i = SIBLINGS * (p + 2 * t) + sibling
                store_f32(scores + 4 * i, total)
        sync_block()

    return rate


@device
def child(parents, i):
    """The i-th child of listed parents, or of the first ones."""
    parent = load_i32(parents + 4 * (i // SIBLINGS)) if parents != 0 else i // SIBLINGS
    return SIBLINGS * parent + i % SIBLINGS


@device
def first_level(searched, n_flat):
    """The level that is scored whole."""
    level = 0
    while searched >> 2 * level > n_flat:
        level += 1
    return level


@device
def n_below(parents, n, n_sink):
    """How many of the n children are before block n_sink; these are the first ones."""
    found, start, more = 0, 0, True
    while more:
        i = start + lane()
        inside = child(parents, min(i, n - 1)) < n_sink if i < n else False
        some = int32(count_bits(ballot(uint32(1 if inside else 0))))
        found, start, more = found + some, start + WARP, some == WARP
    return found


def _searching(head_dim: int, n_warp: int, cluster: int, scanned: bool) -> Any:
    """The function that writes the n_chunk best of the searched blocks; a block's work.

    scanned: the scores of the first level are there, and the blocks of a cluster share those of the
    others; each chooses from all of them and writes what it lists.
    """
    rate = _rating(head_dim, n_warp)

    @device
    def meet():
        if cluster > 1:
            cluster_arrive()
            cluster_wait()
        else:
            sync_block()

    @device
    def pick(shared, scores, low, n, n_chunk, picked):
        if n - low <= n_chunk:
            write_range(picked, low, n)
        elif scanned:
            hold(shared, scores, 0, n)
            write_best_weights((shared, scores, 0), low, n, n_chunk, picked)
        else:
            write_best(scores, low, n, n_chunk, picked)
        sync_block()

    @device
    def search(shared, rank, lists, heads, own, sizes, mask):
        searched, n_chunk, n_flat, n_sink, room = sizes
        one, other = lists, lists + 4 * (n_chunk + 1)
        picked = other + 4 * (n_chunk + 1)
        scores, level, count = picked + 4 * n_chunk, first_level(searched, n_flat), 0
        n, parents, there = searched >> 2 * level, int64(0), scanned
        while n > 0:
            if not there:
                start = level_start(room, level)
                means = own[0] + head_dim * start, own[1] + 8 * start
                rate((rank, cluster), scores, heads, means, parents, (n + SIBLINGS - 1) // SIBLINGS)
                meet()
            there = False
            low = n_below(parents, n, n_sink) if level == 0 else 0  # sinks are read anyway
            count = min(n - low, n_chunk)
            pick(shared, scores, low, n, n_chunk, picked)
            to = mask + 4 if level == 0 else other
            for i in range(keep(thread()), count, threads()):
                store_i32(to + 4 * i, child(parents, load_i32(picked + 4 * i)))
            if level == 0:
                break
            above, level = searched >> 2 * level, level - 1
            # What is whole below but has no whole parent joins as children of the next one.
            if thread() == 0:
                store_i32(other + 4 * count, above)
            n = SIBLINGS * count + (searched >> 2 * level) - SIBLINGS * above
            parents, other, one = other, one, other
            meet()  # before the picks and the next scores are written
        if thread() == 0:
            store_i32(mask, count)

    return search


def _tasks(head_dim: int, group: int) -> Any:
    """The function (a, item) -> what a row of masks is searched with, and what it is read from."""

    @device
    def task(a, item):
        n_tok, pos = load_i64(a.step + STEP.n_tok), load_i64(a.step + STEP.pos)
        n_sample = (a.mask_block + a.q_stride - 1) // a.q_stride
        work_size = 4 * row_work(head_dim, group, n_sample, a.n_flat, a.n_near)
        apart, n_mean = 4 * head_dim * a.n_row * group, level_start(a.room, a.top + 1)
        r, first = item % a.n_row, item // a.n_row * a.mask_block
        h, n_query = r * group // a.heads_per_kv, min(n_tok - first, a.mask_block)
        n_query = (n_query + a.q_stride - 1) // a.q_stride
        queries = a.q + apart * first + 4 * head_dim * group * r, n_query, apart * a.q_stride
        words = (a.work + work_size * item + 15) // 16 * 16
        numbers = words + head_dim * ((n_query * group + QUAD - 1) // QUAD * QUAD)
        searched = max(0, pos + first + 1 - a.n_local) // a.block
        sinks = min(a.n_sink, searched) * a.block
        ends = sinks, searched * a.block, sinks + pos + first + 1 - searched * a.block
        near = (a.k_pages, a.k_table, a.n_head_kv, h), ends
        own = a.means + head_dim * n_mean * h, a.extents + 8 * n_mean * h
        return queries, near, (numbers, words, n_query * group), own, searched

    return task


@device
def n_task(a):
    """The number of rows of masks."""
    return (load_i64(a.step + STEP.n_tok) + a.mask_block - 1) // a.mask_block * a.n_row


@device
def sizes_of(a, searched):
    """The sizes of a search: blocks searched, chunks, flat blocks, sinks, and room."""
    return searched, a.n_chunk, a.n_flat, a.n_sink, a.room


@device
def lists_of(heads):
    """The address of a search's lists in its scratch, behind the heads' words and numbers."""
    return heads[0] + 12 * heads[2]


def hip_search(head_dim: int, group: int, type_k: str) -> list[Launch]:
    """Kernels of HIP_SEARCH: blocks stride over rows of masks.

    Few rows have three launches: their heads; all blocks score the first level; a cluster of blocks
    a row chooses, and scores the levels below. There are less rows than multiprocessors.
    """
    assert head_dim % 16 == 0
    normalise, shorten = _preparing(head_dim, group, type_k)
    task, rate = _tasks(head_dim, group), _rating(head_dim, WARPS)
    cluster = CLUSTER if current().has_clusters else 1
    search = _searching(head_dim, WARPS, 1, scanned=False)
    search_few = _searching(head_dim, FEW_THREADS // WARP, cluster, scanned=True)

    @device
    def ready(a, shared, item):
        queries, near, (numbers, words, _), _, _ = task(a, item)
        factor = a.scale * float32(LOG2_E)
        normalise(shared, numbers, queries, near, factor)
        shorten(numbers, words, queries, factor)

    def prepare(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        for item in range(tid, n_task(a), n_thread):
            ready(a, shared, item)

    def scan(tid, n_thread, a):
        n_part = max(1, n_thread // n_task(a))
        for item in range(tid, n_task(a) * n_part, n_thread):
            _, _, heads, own, searched = task(a, item // n_part)
            level = first_level(searched, a.n_flat)
            start = level_start(a.room, level)
            means, n = (own[0] + head_dim * start, own[1] + 8 * start), searched >> 2 * level
            scores = lists_of(heads) + 4 * (3 * a.n_chunk + 2)
            part = item % n_part, n_part
            rate(part, scores, heads, means, int64(0), (n + SIBLINGS - 1) // SIBLINGS)

    def find(tid, n_thread, a):
        shared, rank = shared_address(cuda.shared.array(0, uint8)), tid % cluster
        for item in range(tid // cluster, n_task(a), n_thread // cluster):
            _, _, heads, own, searched = task(a, item)
            mask = a.mask + 4 * (1 + a.n_chunk) * item
            lists, sizes = lists_of(heads), sizes_of(a, searched)
            search_few(shared, rank, lists, heads, own, sizes, mask)
            sync_block()  # before the next row's lists overwrite what is read here

    def both(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        for item in range(tid, n_task(a), n_thread):
            ready(a, shared, item)
            _, _, heads, own, searched = task(a, item)
            mask = a.mask + 4 * (1 + a.n_chunk) * item
            lists, sizes = lists_of(heads), sizes_of(a, searched)
            search(shared, 0, lists, heads, own, sizes, mask)
            sync_block()  # before the next row's lists overwrite what is read here

    blocks = 2 if head_dim <= 128 else 1
    return [
        Launch(prepare, shared=ROW * group, rows="few"),
        Launch(scan, blocks=blocks, rows="few"),
        Launch(find, shared=4 * HELD, threads=FEW_THREADS, rows="few", cluster=cluster),
        Launch(both, blocks=blocks, shared=ROW * group, rows="some many"),
    ]
