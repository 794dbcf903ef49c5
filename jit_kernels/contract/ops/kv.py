"""Copies between layers' KV caches, and the GPU page cache with its backing store."""

from typing import NamedTuple

from tamis.jit_kernels.contract.op import Address, InOut, Out, op

KV_RANKS = 1024  # ranks of frames by the order of eviction
KV_OLD = 1 << 20  # the age of an unused frame: passes before the first one


class _KVState(NamedTuple):
    """Byte offsets of the state of the page frames: int64s."""

    n_pass: int  # passes that KV_ALLOCATE has begun
    serial: int  # of the next KV_EVICT, from 1 on: marks the pages that it must fetch
    n_missing: int  # number of pages for which the last KV_EVICT allocated frames
    n_hit: int  # pages that were in frames when needed; counted, never reset
    n_miss: int  # pages that were not


KV_STATE = _KVState(0, 8, 16, 24, 32)
KV_STATE_SIZE = 5


class CopyRows:
    """Early token freezing, see select/cpe.py: rows of source are copied to target."""

    rows: Address  # int64 [2]: rows rows[0] .. rows[1] - 1
    source: Address  # f32 [n_tok, n]
    target: Out[Address]  # f32 [n_tok, n]
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
    k_to: Out[Address]
    v_to: Out[Address]
    k_to_table: Address
    v_to_table: Address
    n_head_kv: int


COPY_KV = op("kv.token_freezing", CopyKv, "head_dim type_k type_v")


class Crc32c:
    """CRC-32C (Castagnoli; RFC 3720, B.4) of n rows."""

    data: Address  # uint8 [.., size]
    rows: Address  # int64 [n]: indices of rows of data
    sums: Out[Address]  # uint32 [n]
    n: int
    size: int  # bytes of a row


CRC32C = op("kv.checksum", Crc32c)

# The GPU page cache: all pages are in a backing store, some of them in frames, where all other ops
# read and write them. Page p of layer l is written in frame l * n_ring + p % n_ring; frames from
# n_first = n_layer * n_ring on may hold any page. Copies cover whole lines, widened to 16 bytes at
# both ends.


class KvAllocate:
    """Begin a pass: frames for the pages of positions pos .. pos + n_tok - 1.

    They get the backing store's data of earlier positions.
    """

    step: Address
    state: InOut[Address]  # int64 [KV_STATE_SIZE], see KV_STATE
    table: InOut[Address]  # int32 [n_layer, n_page]: the frame of a page, or -1
    ring: InOut[Address]  # int32 [n_layer, n_ring]: the page that is or was in each; -1: none
    owner: InOut[Address]  # int32 [n_cache]: layer * n_page + page, or -1
    # int32 [n_cache]: n_pass * n_layer + layer of the pass and layer of its last use
    used: InOut[Address]
    k_store: Address  # backing store, [n_layer * n_page, n_head_kv, PAGE] rows of k_bytes
    v_store: Address  # the same of v_bytes
    k_frames: Out[Address]  # frames, the same of [n_layer * n_ring + n_cache]
    v_frames: Out[Address]
    n_layer: int
    n_page: int
    n_ring: int
    n_head_kv: int
    k_bytes: int  # of a row, a multiple of 2
    v_bytes: int  # of a row, a multiple of 2


KV_ALLOCATE = op("kv.page_cache", KvAllocate)


class KvWriteBack:
    """End a pass: these positions of all layers are copied to the backing store."""

    step: Address
    k_store: Out[Address]  # as for KV_ALLOCATE
    v_store: Out[Address]
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
    marks: Out[Address]  # int32 [n_page]: the marks, state.serial
    n_row: int
    q_block: int
    block: int
    window: int
    stride: int


KV_MARK = op("kv.page_cache", KvMark)


class KvEvict:
    """Allocate frames for a layer's pages that the next op reads and that have none.

    reader is the KV_READERS name of that op's Reads: for "chosen" the pages are those in marks, for
    others those of its spans, given found, block, x and y. Evicted are frames that their layer did
    not use the last time, longest ago first, then those of the layers that come up last; never one
    that this layer used in this pass. Counts hits and misses, and increments state.serial.
    """

    step: Address
    state: InOut[Address]  # as for KV_ALLOCATE, like the next three
    table: InOut[Address]
    owner: InOut[Address]
    used: InOut[Address]
    marks: Address  # int32 [n_page]
    missing: Out[Address]  # int32 [n_page]: state.n_missing pages, in any order
    counts: Out[Address]  # int32 [KV_RANKS], scratch
    found: Address  # int64 [n_found]
    n_found: int  # number of int64s of found
    block: int
    x: int
    y: int
    layer: int
    n_layer: int
    n_page: int
    n_first: int  # the first frame that may hold any page
    n_cache: int  # at least n_page, a multiple of 16


KV_EVICT = op("kv.page_cache", KvEvict, "reader")


class KvFetch:
    """Fetch the missing pages to their frames."""

    state: Address  # as for KV_ALLOCATE and KV_EVICT
    table: Address
    missing: Address
    k_store: Address
    v_store: Address
    k_frames: Out[Address]
    v_frames: Out[Address]
    layer: int
    n_page: int
    n_head_kv: int
    k_bytes: int
    v_bytes: int


KV_FETCH = op("kv.page_cache", KvFetch)

# The token bank: KV rows of single units (some positions of one KV head) that decode attention
# reads. A slot of KV head h is `unit` rows of that head, anywhere in pages of the bank; all layers
# share the slots. ATTEND reads the bank in place of the cache: its Selection is translated from
# positions to rows of the bank, its pages are in order. The last slot of a head has the unit that
# is being written, so that unwritten positions come last.

BANK_BUFFER = 1 << 17  # most bytes of a file that are read at once
BANK_GROUP = 16  # slots of a group; of these the least recently used one is evicted


class _BankState(NamedTuple):
    """Byte offsets of the state of a token bank: int64s."""

    serial: int  # of the next BANK_LOOKUP, from 1 on: stamps the slots that it uses
    n_hit: int  # units that were in the bank when needed; counted, never reset
    n_miss: int  # units that were not
    n_bad: int  # units of the file that differ from what was written
    n_written: int  # number of written positions: units beyond are empty
    n_read: int  # bytes read from the file
    waited: int  # the serial of the last BANK_READ that had to wait for the disk


BANK_STATE = _BankState(0, 8, 16, 24, 32, 40, 48)
BANK_STATE_SIZE = 7


class _BankAhead(NamedTuple):
    """Byte offsets of the data of the next call that BANK_READ uses: addresses, then numbers.

    Int64s.
    """

    indptr: int  # 0: there is none
    indices: int
    block: int
    n_row: int
    layer: int


BANK_AHEAD = _BankAhead(0, 8, 16, 24, 32)
BANK_AHEAD_SIZE = 5


class BankBegin:
    """Begin a pass: units from position pos on are dropped, if positions there were written."""

    step: Address
    # int64 [STEP_SIZE]: ATTEND's step record, with the position of the pass's query in the bank.
    row_step: Out[Address]
    state: InOut[Address]  # int64 [BANK_STATE_SIZE], see BANK_STATE
    slots: InOut[Address]  # int32 [n_layer, n_head_kv, n_unit]: the slot of a unit, or -1
    owner: InOut[Address]  # int32 [n_head_kv, n_slot]: layer * n_unit + unit, or -1
    used: InOut[Address]  # int32 [n_head_kv, n_slot]: the serial of its last use
    n_layer: int
    n_head_kv: int
    n_unit: int
    n_slot: int
    unit: int  # positions


BANK_BEGIN = op("kv.token_bank", BankBegin)


class BankLookup:
    """Slots for all units that a Selection of one query token reads, and the Selection of rows.

    A unit that is not in the bank takes the least recently used slot of a group of BANK_GROUP, the
    groups cyclically, except slots that this call uses. Of slots that their layer used in the last
    n_layer calls, those of the layers that come up last are taken first. The head's first n_missing
    entries of missing name these units, on the CPU in order. Increments serial.
    """

    step: Address
    state: InOut[Address]  # as for BANK_BEGIN, like the next three
    slots: InOut[Address]
    owner: InOut[Address]
    used: InOut[Address]
    hands: InOut[Address]  # int64 [n_head_kv]: the next group
    missing: Out[Address]  # int32 [n_head_kv, n_unit]
    n_missing: Out[Address]  # int64 [n_head_kv]
    indptr: Address  # of the Selection, of n_row rows
    indices: Address
    rows: Out[Address]  # int32, as many as indices: the Selection's blocks in the bank
    layer: int
    n_layer: int
    n_head_kv: int
    n_unit: int
    n_slot: int  # whole groups, which before the last one have room for n_unit
    n_row: int  # a multiple of n_head_kv
    block: int
    unit: int  # a multiple of block, a divisor of PAGE


BANK_LOOKUP = op("kv.token_bank", BankLookup)


class BankFetch:
    """Fetch the missing units from the backing store to their slots, the newest from its frame.

    The store has all positions before pos; page pos / PAGE is in a frame.
    """

    step: Address
    state: Address  # as for BANK_LOOKUP
    slots: Address
    missing: Address
    n_missing: Address
    k_bank: Out[Address]  # the bank's rows, [n_slot * unit / PAGE, n_head_kv, PAGE] of k_bytes
    v_bank: Out[Address]  # of v_bytes
    k_store: Address  # as for KV_ALLOCATE, like the next three
    v_store: Address
    k_frames: Address
    v_frames: Address
    table: Address  # int32 [n_page]: the frames of this layer's pages
    layer: int
    n_page: int
    n_head_kv: int
    n_unit: int
    n_slot: int
    unit: int
    k_bytes: int  # of a row, a multiple of 2
    v_bytes: int


BANK_FETCH = op("kv.token_bank", BankFetch)


class BankRead:
    """Fetch the missing units from a file to their slots, those of pos's page from its frame.

    Neighbouring units are read at once, and checked: n_bad counts those with a wrong checksum.
    Units that the system has cached are read first, then reads of all others are started before the
    first of them is waited for; if that happened in the last n_layer calls, units of the next
    call's last Selection are prefetched, too.
    """

    step: Address
    state: InOut[Address]  # as for BANK_LOOKUP
    slots: Address
    missing: InOut[Address]  # fetched ones become -1
    n_missing: Address
    k_bank: Out[Address]  # as for BANK_FETCH
    v_bank: Out[Address]
    k_frames: Address
    v_frames: Address
    k_table: Address  # int32 [n_page]: the frames of this layer's pages
    v_table: Address
    k_sums: Address  # uint32: checksums of the file's units, in order
    v_sums: Address
    buffers: Out[Address]  # uint8 [n_thread, BANK_BUFFER]
    ahead: Address  # int64 [BANK_AHEAD_SIZE]: of the next call, see BANK_AHEAD
    handle: int  # of the file
    k_start: int  # the offset of keys in the file
    v_start: int
    layer: int
    n_layer: int
    n_page: int
    n_head_kv: int
    n_unit: int
    n_slot: int
    unit: int
    file_unit: int  # positions covered by one checksum, a divisor of PAGE
    k_bytes: int
    v_bytes: int


BANK_READ = op("kv.token_bank", BankRead)
