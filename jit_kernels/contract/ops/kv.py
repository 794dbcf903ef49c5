"""Copies between layers' KV caches, and the GPU page cache with its backing store."""

from typing import NamedTuple

from tamis.jit_kernels.contract.op import Address, op

KV_RANKS = 1024  # of frames, by the order of eviction
KV_OLD = 1 << 20  # age of an unused frame: passes before the first one


class _KVState(NamedTuple):
    """Byte offsets of the state of the page frames: int64s."""

    n_pass: int  # passes that KV_ALLOCATE has begun
    serial: int  # of the next KV_EVICT, from 1 on: the mark of the pages that it is to fetch
    n_missing: int  # pages that the last KV_EVICT allocated frames for
    n_hit: int  # pages that were in frames when they were asked for; counted, never reset
    n_miss: int  # and those that were not


KV_STATE = _KVState(0, 8, 16, 24, 32)
KV_STATE_SIZE = 5


class CopyRows:
    """Early token freezing, see select/cpe.py: rows of source go to target."""

    rows: Address  # int64 [2]: rows rows[0] .. rows[1] - 1
    source: Address  # f32 [n_tok, n]
    target: Address  # f32 [n_tok, n]
    n: int


COPY_ROWS = op("kv.token_freezing", CopyRows)


class CopyKv:
    """Early token freezing: copy the KV of the positions of `rows` to another layer's pages."""

    step: Address
    rows: Address  # int64 [2], as for COPY_ROWS
    k_from: Address  # pages and tables: see KVView
    v_from: Address
    k_from_table: Address
    v_from_table: Address
    k_to: Address
    v_to: Address
    k_to_table: Address
    v_to_table: Address
    n_head_kv: int


COPY_KV = op("kv.token_freezing", CopyKv, "head_dim type_k type_v")


class Crc32c:
    """CRC-32C (Castagnoli; RFC 3720, B.4) of n rows."""

    data: Address  # uint8 [.., size]
    rows: Address  # int64 [n]: numbers of rows of data
    sums: Address  # uint32 [n]
    n: int
    size: int  # bytes of a row


CRC32C = op("kv.checksum", Crc32c)

# The GPU page cache: all pages are in a backing store, some of them in frames, where all
# other ops read and write them. Page p of layer l was written in frame l * n_ring + p % n_ring; all
# frames from n_first = n_layer * n_ring on are any page's. What is copied has whole lines and what
# completes the 16 bytes at their ends.


class KvAllocate:
    """Begin a pass: frames for the pages that positions pos .. pos + n_tok - 1 are in.

    They get what the backing store has of positions before.
    """

    step: Address
    state: Address  # int64 [KV_STATE_SIZE], see KV_STATE
    table: Address  # int32 [n_layer, n_page]: a page's frame, or -1
    ring: Address  # int32 [n_layer, n_ring]: which page is or was in each; -1: none
    owner: Address  # int32 [n_cache]: layer * n_page + page, or -1
    used: Address  # int32 [n_cache]: n_pass * n_layer + layer of the pass and layer of its last use
    k_store: Address  # backing store, [n_layer * n_page, n_head_kv, PAGE] rows of k_bytes
    v_store: Address  # the same of v_bytes
    k_frames: Address  # frames, the same of [n_layer * n_ring + n_cache]
    v_frames: Address
    n_layer: int
    n_page: int
    n_ring: int
    n_head_kv: int
    k_bytes: int  # of a row, a multiple of 2
    v_bytes: int  # of a row, a multiple of 2


KV_ALLOCATE = op("kv.page_cache", KvAllocate)


class KvWriteBack:
    """End a pass: the backing store gets these positions of all layers."""

    step: Address
    k_store: Address  # as for KV_ALLOCATE
    v_store: Address
    k_frames: Address
    v_frames: Address
    n_layer: int
    n_page: int
    n_ring: int
    n_head_kv: int
    k_bytes: int
    v_bytes: int


KV_WRITE_BACK = op("kv.page_cache", KvWriteBack)


class KvMark:
    """Mark the pages that ATTEND of the same step, Selection, window and stride reads."""

    step: Address
    state: Address  # as for KV_ALLOCATE
    indptr: Address
    indices: Address
    marks: Address  # int32 [n_page]: the marks, state.serial
    n_row: int
    q_block: int
    block: int
    window: int
    stride: int


KV_MARK = op("kv.page_cache", KvMark)


class KvEvict:
    """Allocate frames for the pages of a layer that an op is about to read and that are in none.

    reader, of KV_READERS, names that op's Reads: for "chosen" the pages are those marked in marks,
    for others those of its spans, of found, block, x and y. Evicted are frames that their layer did
    not use the last time, longest ago first, then those of the layers that come up last; none that
    this layer used in this pass. Counts hits and misses, and state.serial up.
    """

    step: Address
    state: Address  # as for KV_ALLOCATE, the next three too
    table: Address
    owner: Address
    used: Address
    marks: Address  # int32 [n_page]
    missing: Address  # int32 [n_page]: state.n_missing pages, in any order
    counts: Address  # int32 [KV_RANKS], scratch
    found: Address  # int64 [n_found]
    n_found: int  # int64s of found that count
    block: int
    x: int
    y: int
    layer: int
    n_layer: int
    n_page: int
    n_first: int  # the first frame that is any page's
    n_cache: int  # at least n_page, a multiple of 16


KV_EVICT = op("kv.page_cache", KvEvict, "reader")


class KvFetch:
    """Fetch the missing pages to their frames."""

    state: Address  # as for KV_ALLOCATE and KV_EVICT
    table: Address
    missing: Address
    k_store: Address
    v_store: Address
    k_frames: Address
    v_frames: Address
    layer: int
    n_page: int
    n_head_kv: int
    k_bytes: int
    v_bytes: int


KV_FETCH = op("kv.page_cache", KvFetch)
