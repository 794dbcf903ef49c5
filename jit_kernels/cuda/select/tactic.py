"""Tactic's ops: K-means over keys, ranks of clusters, marks, the Selection."""

from numba import cuda, float32, int32, uint8, uint32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.attention.score import ROW, SPAN, staging
from tamis.jit_kernels.cuda.kv.kv_rows import key_row
from tamis.jit_kernels.cuda.lang.grid import (
    MOST_THREADS,
    MOST_WARPS,
    THREADS,
    WARP,
    WARPS,
    Launch,
    block_before,
    lane,
    sync_block,
    thread,
    threads,
    warp,
    warp_sum,
)
from tamis.jit_kernels.cuda.lang.intrinsic import (
    device,
    int64,
    load_f32,
    load_i32,
    load_i64,
    quotient,
    remainder,
    store_f16,
    store_f32,
    store_i32,
    store_i64,
)
from tamis.jit_kernels.cuda.lang.ptx import (
    ballot,
    count_bits,
    load_shared,
    load_shared_i32,
    shared_address,
    shuffle_i32,
    store_shared_i32,
)
from tamis.jit_kernels.cuda.lang.radix_topk import HELD, size_of, write_range
from tamis.jit_kernels.cuda.lang.readers import const_f16
from tamis.jit_kernels.cuda.select.common import LOWEST
from tamis.jit_kernels.cuda.select.tactic_budget import tactic_budget, tactic_rank

__all__ = [
    "tactic_assign", "tactic_budget", "tactic_mark", "tactic_mean", "tactic_rank", "tactic_score",
    "tactic_seed", "tactic_select",
]  # fmt: skip
CENTROIDS = 32  # that are compared with a span of keys at a time


@device
def segment_at(extent, s, segment, per_cluster, n_sink):
    """Segment s: first position, end, first cluster, number of clusters (0: no such segment)."""
    first = n_sink + s * segment
    n = max(0, min(load_i64(extent + 8), first + segment) - first)
    return first, first + n, s * (segment // per_cluster), n // per_cluster


@device
def first_segment(extent, segment, n_sink):
    """The first segment whose clusters are not made yet."""
    return (load_i64(extent) - n_sink) // segment


def tactic_seed(head_dim: int) -> list[Launch]:
    """Kernel of TACTIC_SEED: warps stride over segments of KV heads."""

    @device
    def place(centroid, mean, norm, key):
        """Initialise a centroid to a key, by one warp."""
        total = float32(0)
        for d in range(lane(), head_dim, WARP):
            x = const_f16(key + 2 * d)
            store_f32(centroid + 4 * d, x)
            store_f16(mean + 2 * d, x)
            total += x * x
        total = warp_sum(total)
        if lane() == 0:
            store_f32(norm, -total / float32(2))

    def kernel(tid, n_thread, a):
        begin = first_segment(a.extent, a.segment, a.n_sink)
        first_item = begin * a.n_head_kv + tid + n_thread * warp()
        for item in range(first_item, a.n_segment * a.n_head_kv, n_thread * WARPS):
            h, s = item % a.n_head_kv, item // a.n_head_kv
            first, end, cluster, n_cluster = segment_at(
                a.extent, s, a.segment, a.per_cluster, a.n_sink
            )
            if lane() == 0:
                store_i64(a.moving + 8 * (a.n_segment * h + s), 1)
            # Knuth's Algorithm S: each set of n_cluster positions is equally likely.
            state, taken = (a.seed * a.n_head_kv + h) * 1000003 + s, 0
            for j in range(first, end):
                state = state * 6364136223846793005 + 1442695040888963407
                if ((state >> 33) & 0x7FFFFFFF) * (end - j) >> 31 < n_cluster - taken:
                    at = a.n_slot * h + cluster + taken
                    key = a.k_pages + 2 * head_dim * key_row(a.k_table, a.n_head_kv, h, j)
                    mean = a.means + 2 * head_dim * at
                    place(a.centroids + 4 * head_dim * at, mean, a.norms + 4 * at, key)
                    taken += 1

    return [Launch(kernel)]


def tactic_assign(head_dim: int) -> list[Launch]:
    """Kernel of TACTIC_ASSIGN: blocks stride over spans of a segment's keys.

    The nearest centroid is the one with the largest k . c - |c|^2 / 2.
    """

    @device
    def key_at(keys, j):
        k_pages, k_table, n_head_kv, h, end = keys
        row = key_row(k_table, n_head_kv, h, j) if j < end else 0
        return k_pages + 2 * head_dim * row if j < end else 0

    stage = staging(head_dim, CENTROIDS, key_at)

    def kernel(tid, n_thread, a):
        shared = shared_address(cuda.shared.array(0, uint8))
        begin, n_span = first_segment(a.extent, a.segment, a.n_sink), (a.segment + SPAN - 1) // SPAN
        for item in range(tid, (a.n_segment - begin) * a.n_head_kv * n_span, n_thread):
            h, s = item // n_span % a.n_head_kv, begin + item // n_span // a.n_head_kv
            first, end, cluster, n_cluster = segment_at(
                a.extent, s, a.segment, a.per_cluster, a.n_sink
            )
            start = first + item % n_span * SPAN
            if start >= end or load_i64(a.moving + 8 * (a.n_segment * h + s)) == 0:
                continue
            best, label = float32(LOWEST), cluster  # of a key of NaN
            for c in range(0, n_cluster, CENTROIDS):
                n, at = min(CENTROIDS, n_cluster - c), a.n_slot * h + cluster + c
                keys = a.k_pages, a.k_table, a.n_head_kv, h, end
                stage(shared, a.centroids + 4 * head_dim * at, n, keys, start)
                for i in range(n):
                    x = load_shared(uint32(shared + ROW * i + 4 * thread()))
                    x += load_f32(a.norms + 4 * (at + i))
                    if x > best:
                        best, label = x, cluster + c + i
                sync_block()  # before the next products overwrite what is read here
            if start + thread() < end and n_cluster > 0:
                store_i32(a.labels + 4 * (a.capacity * h + start + thread()), label)

    return [Launch(kernel, shared=ROW * CENTROIDS)]


@device
def count_label(labels, c, first, end):
    """How many of positions first .. end - 1 have label c; a warp's work."""
    n = 0
    for start in range(first, end, WARP):
        j = start + lane()
        own = load_i32(labels + 4 * j) == c if j < end else False
        n += int32(count_bits(ballot(uint32(1 if own else 0))))
    return n


@device
def list_label(labels, c, first, end, out):
    """Write the positions that have label c, ascending; a warp's work."""
    below = (uint32(1) << lane()) - uint32(1)
    for start in range(first, end, WARP):
        j = start + lane()
        own = load_i32(labels + 4 * j) == c if j < end else False
        found = ballot(uint32(1 if own else 0))
        if own:
            store_i32(out + 4 * int32(count_bits(uint32(found & below))), j)
        out += 4 * int32(count_bits(found))


def tactic_mean(head_dim: int) -> list[Launch]:
    """Kernel of TACTIC_MEAN: blocks stride over segments of KV heads, their warps clusters."""

    @device
    def replace(centroid, mean, norm, members, pages):
        """Set the centroid to the mean of its members (list, number); return whether it moved."""
        (listed, n), (k_pages, k_table, n_head_kv, h) = members, pages
        total, moved = float32(0), 0
        for d in range(lane(), head_dim, WARP):
            x = float32(0)
            for i in range(n):
                row = key_row(k_table, n_head_kv, h, load_i32(listed + 4 * i))
                x += const_f16(k_pages + 2 * (head_dim * row + d))
            x /= float32(n)
            if x != load_f32(centroid + 4 * d):
                moved = 1
            store_f32(centroid + 4 * d, x)
            store_f16(mean + 2 * d, x)
            total += x * x
        total = warp_sum(total)
        if lane() == 0:
            store_f32(norm, -total / float32(2))
        return ballot(uint32(moved)) != 0

    @device
    def place_clusters(starts, cursor, span, parts):
        """Prefix-sum the counts of clusters low .. high - 1: where their lists start."""
        low, high, before = span
        for first in range(low, high, THREADS):
            c = first + thread()
            n = load_i32(cursor + 4 * c) if c < high else 0
            ahead, total = block_before(int32(n), parts)
            if c < high:
                store_i32(starts + 4 * c, before + ahead)
            before += total

    def kernel(tid, n_thread, a):
        parts, changed = cuda.shared.array(WARPS, int32), cuda.shared.array(1, int32)
        begin = first_segment(a.extent, a.segment, a.n_sink)
        for item in range(begin * a.n_head_kv + tid, a.n_segment * a.n_head_kv, n_thread):
            h, s = item % a.n_head_kv, item // a.n_head_kv
            first, end, cluster, n_cluster = segment_at(
                a.extent, s, a.segment, a.per_cluster, a.n_sink
            )
            moves, last = a.moving + 8 * (a.n_segment * h + s), cluster + n_cluster
            if n_cluster == 0 or load_i64(moves) == 0:
                continue
            own, pages = a.labels + 4 * a.capacity * h, (a.k_pages, a.k_table, a.n_head_kv, h)
            counts, head_starts = a.cursor + 4 * a.n_slot * h, a.starts + 4 * (a.n_slot + 1) * h
            for c in range(cluster + warp(), last, WARPS):
                n = count_label(own, c, first, end)
                if lane() == 0:
                    store_i32(counts + 4 * c, n)
            if thread() == 0:
                changed[0] = 0
                if last == load_i64(a.extent + 16):
                    store_i32(head_starts + 4 * last, end - a.n_sink)
            sync_block()
            place_clusters(head_starts, counts, (cluster, last, first - a.n_sink), parts)
            sync_block()
            for c in range(cluster + warp(), last, WARPS):
                n, at = load_i32(counts + 4 * c), a.n_slot * h + c
                out = a.order + 4 * (a.capacity * h + load_i32(head_starts + 4 * c))
                list_label(own, c, first, end, out)
                cuda.syncwarp()
                centroid, mean = a.centroids + 4 * head_dim * at, a.means + 2 * head_dim * at
                if n > 0 and replace(centroid, mean, a.norms + 4 * at, (out, n), pages):
                    changed[0] = 1
            sync_block()
            if thread() == 0:
                store_i64(moves, changed[0])
            sync_block()  # before it is cleared for the next segment

    return [Launch(kernel)]


def tactic_score(head_dim: int, group: int) -> list[Launch]:
    """Kernel of TACTIC_SCORE: blocks stride over spans of a KV head's clusters."""

    @device
    def mean_at(means, c):
        at, n = means
        return at + 2 * head_dim * c if c < n else 0

    stage = staging(head_dim, group, mean_at)

    def kernel(tid, n_thread, a):
        n, shared = load_i64(a.extent + 16), shared_address(cuda.shared.array(0, uint8))
        for item in range(tid, (n + SPAN - 1) // SPAN * a.n_head_kv, n_thread):
            h, start = item % a.n_head_kv, item // a.n_head_kv * SPAN
            own, c = (a.means + 2 * head_dim * a.n_slot * h, n), start + thread()
            stage(shared, a.q + 4 * head_dim * group * h, group, own, start)
            for g in range(group if c < n else 0):
                x = load_shared(uint32(shared + ROW * g + 4 * thread()))
                store_f32(a.scores + 4 * (a.n_slot * (group * h + g) + c), x)
            sync_block()  # before the next span's products overwrite what is read here

    return [Launch(kernel, shared=ROW * group)]


# ---- the selection -------------------------------------------------------------------------------


def tactic_mark(group: int) -> list[Launch]:
    """Kernels of TACTIC_MARK: marks by the positions' labels, then how many a row has.

    Blocks take parts of rows. HELD clusters at a time are in shared memory: the last position of
    each that a head of the row keeps, or -1.
    """

    @device
    def keep_of(a, head, shared, base):
        """Raise the last positions of clusters from `base` on to those of a head."""
        n_cluster, keep = load_i64(a.extent + 16), load_i32(a.keep + 4 * head)
        starts = a.starts + 4 * (a.n_slot + 1) * quotient(head, a.heads_per_kv)
        order = a.order + 4 * a.capacity * quotient(head, a.heads_per_kv)
        ranked, ends = a.rank + 4 * a.n_slot * head, a.ends + 4 * a.n_end * head
        whole = keep >= load_i64(a.extent + 8) - a.n_sink  # then ends may not be there
        i, before = thread(), 0
        while i < n_cluster and (whole or before < keep):
            c, last = load_i32(ranked + 4 * i), a.capacity  # all that a loop loads is in flight
            end, before = load_i32(ends + 4 * i), load_i32(ends + 4 * max(0, i - 1))
            before = before if i > 0 else 0
            if base <= c and c < base + HELD and (whole or before < keep):
                if keep < end and not whole:
                    last = load_i32(order + 4 * (load_i32(starts + 4 * c) + keep - before - 1))
                at = uint32(shared + 4 * (c - base))
                store_shared_i32(at, max(int32(last), load_shared_i32(at)))
            i += threads()
        sync_block()

    @device
    def label_of(labels, inside, j):
        """The cluster of a position; -1 outside of the range of clustered ones."""
        return load_i32(labels + 4 * j) if inside[0] <= j and j < inside[1] else int64(-1)

    @device
    def bits_of(shared, c, j):
        """A bit a lane, the lowest of lane 0: whether its position j of cluster c is kept."""
        kept = False
        if c >= 0 and c < HELD:
            kept = j <= load_shared_i32(uint32(shared + 4 * c))
        return int64(ballot(uint32(1 if kept else 0)))

    @device
    def mark_words(row, labels, inside, shared, base, span):
        """Mark words low .. high - 1 of a row by clusters from `base` on, two a warp at once."""
        low, high = span
        word, n_warp = low + warp(), quotient(threads(), WARP)
        while word < high:
            j, other = 64 * word + lane(), 64 * (word + n_warp) + lane()
            a, b = label_of(labels, inside, j), label_of(labels, inside, j + 32)
            c, d = label_of(labels, inside, other), label_of(labels, inside, other + 32)
            one = bits_of(shared, a - base, j) | bits_of(shared, b - base, j + 32) << 32
            two = bits_of(shared, c - base, other) | bits_of(shared, d - base, other + 32) << 32
            if lane() == 0:
                at, far = row + 8 * word, row + 8 * (word + n_warp)
                store_i64(at, one if base == 0 else one | load_i64(at))
                if word + n_warp < high:
                    store_i64(far, two if base == 0 else two | load_i64(far))
            word += 2 * n_warp

    def mark(tid, n_thread, a):
        shared, n_part = shared_address(cuda.shared.array(0, uint8)), quotient(n_thread, a.n_row)
        end, n_cluster = load_i64(a.extent + 8), load_i64(a.extent + 16)
        n_part, n_word, item = max(1, n_part), quotient(end + 63, 64), int64(tid)
        share = quotient(n_word + n_part - 1, n_part)  # words of a part
        inside = a.n_sink, end if n_cluster > 0 else 0
        while item < a.n_row * n_part:
            r, part = quotient(item, n_part), remainder(item, n_part)
            labels = a.labels + 4 * a.capacity * quotient(r * group, a.heads_per_kv)
            row, base = a.marks + a.capacity // 8 * r, 0
            while base == 0 or base < n_cluster:
                c = thread()
                while c < min(n_cluster - base, HELD):
                    store_shared_i32(uint32(shared + 4 * c), int32(-1))
                    c += threads()
                sync_block()
                for g in range(group):
                    keep_of(a, r * group + g, shared, base)
                span = share * part, min(n_word, share * (part + 1))
                mark_words(row, labels, inside, shared, base, span)
                sync_block()  # before the next clusters overwrite what is read here
                base += HELD
            item += n_thread

    def count(tid, n_thread, a):
        parts, n_word = cuda.shared.array(MOST_WARPS, int32), (load_i64(a.extent + 8) + 63) // 64
        for r in range(tid, a.n_row, n_thread):
            row, found, word = a.marks + a.capacity // 8 * r, 0, thread()
            while word < n_word:
                found += size_of(load_i64(row + 8 * word))
                word += threads()
            _, total = block_before(int32(found), parts)
            if thread() == 0:
                store_i32(a.count + 4 * r, total)

    return [
        Launch(mark, shared=4 * HELD, threads=MOST_THREADS, any_size=True),
        Launch(count, threads=MOST_THREADS, any_size=True),
    ]


@device
def write_marked(words, first, end, out, parts):
    """Write the positions of bits, as write_bits does, for words which have many bits.

    The lanes of a warp write one word's positions together.
    """
    n_warp = quotient(threads(), WARP)
    share = quotient(end - first + n_warp - 1, n_warp)
    begin = min(end, first + share * warp())
    stop, found = min(end, begin + share), 0
    for word in range(begin + lane(), stop, WARP):
        found += size_of(load_i64(words + 8 * word))
    before, total = block_before(int32(found), parts)
    out += 4 * shuffle_i32(int32(before), 0)  # of the warp's first lane
    below = (uint32(1) << lane()) - uint32(1)
    for word in range(begin, stop):
        bits = load_i64(words + 8 * word)
        for half in range(2):
            own = uint32(bits >> (32 * half))
            if own >> lane() & 1:
                to = out + 4 * count_bits(uint32(own & below))
                store_i32(to, 64 * word + 32 * half + lane())
            out += 4 * count_bits(own)
    return total


def tactic_select() -> list[Launch]:
    """Kernel of TACTIC_SELECT: blocks take parts of rows, after what comes before these."""

    def kernel(tid, n_thread, a):
        parts, n_kv = cuda.shared.array(MOST_WARPS, int32), load_i64(a.step + STEP.pos) + 1
        first, n_word = min(a.n_sink, n_kv), (load_i64(a.extent + 8) + 63) // 64
        end = min(n_kv, max(first, load_i64(a.extent + 8)))
        n_outside = first + n_kv - end
        n_part = max(1, quotient(n_thread, a.n_row))
        share = quotient(n_word + n_part - 1, n_part)  # words of a part
        for item in range(tid, a.n_row * n_part, n_thread):
            r, part = quotient(item, n_part), remainder(item, n_part)
            words = a.marks + a.capacity // 8 * r
            low, high = min(n_word, share * part), min(n_word, share * (part + 1))
            found = 0  # of the rows before, and in the parts before
            i = word = thread()
            while i < r:
                found += load_i32(a.count + 4 * i)
                i += threads()
            while word < low:
                found += size_of(load_i64(words + 8 * word))
                word += threads()
            _, before = block_before(int32(found), parts)
            begin = n_outside * r + before
            at = a.indices + 4 * begin
            if part == 0:
                write_range(at, 0, first)
            n = write_marked(words, low, high, at + 4 * first, parts)
            if part == n_part - 1:
                write_range(at + 4 * (first + n), end, n_kv)
                if thread() == 0:
                    store_i32(a.indptr + 4 * (r + 1), begin + n_outside + n)
                    if r == 0:
                        store_i32(a.indptr, 0)

    return [Launch(kernel, threads=MOST_THREADS, any_size=True)]
