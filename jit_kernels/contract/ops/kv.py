"""Copies between layers' KV caches, and the GPU page cache with its backing store."""

from typing import NamedTuple

from tamis.jit_kernels.contract.op import op

KV_RANKS = 1024  # of frames, by who is taken first
KV_OLD = 1 << 20  # a frame that nobody asks for was last used so long before the first pass


class _KVState(NamedTuple):
    """Byte offsets of what is known of the frames of keys and values: int64s."""

    n_pass: int  # passes that KV_CLAIM has begun
    serial: int  # of the next KV_TAKE: what pages are marked with that it is to bring; from 1 on
    n_missing: int  # pages that the last KV_TAKE gave frames to
    n_hit: int  # pages that were in frames when they were asked for; counted, never reset
    n_miss: int  # and those that were not


KV_STATE = _KVState(0, 8, 16, 24, 32)
KV_STATE_SIZE = 5

# Early token freezing, see select/cpe.py. rows int64 [2]: rows rows[0] .. rows[1] - 1 of
# source f32 [n_tok, n] go to target.
COPY_ROWS = op("kv.token_freezing", "copy_rows", "", "rows source target n")

# Keys and values of those rows' positions, from one layer's pages to another's of the same types.
COPY_KV = op(
    "kv.token_freezing",
    "copy_kv",
    "head_dim type_k type_v",
    "step rows k_from v_from k_from_table v_from_table k_to v_to k_to_table v_to_table n_head_kv",
)

# CRC-32C (Castagnoli; RFC 3720, B.4) of n rows of `size` bytes, those of data uint8 [.., size] that
# rows int64 [n] names -> sums uint32 [n].
CRC32C = op("kv.checksum", "crc32c", "", "data rows sums n size")

# Keys and values that are kept in a home elsewhere, and some of them in frames, where all other ops
# read and write them (gpu_page_cache). k_home, v_home: [n_layer * n_page, n_head_kv, PAGE] rows of
# k_bytes and v_bytes, multiples of 2; k_frames, v_frames the same, of frames. table int32 [n_layer,
# n_page]: a page's frame, or -1. Of each layer page p is written in frame layer * n_ring + p %
# n_ring, and ring int32 [n_layer, n_ring] says which page is or was there: -1 none. All frames from
# n_first = n_layer * n_ring on are any page's: owner int32 [n_cache], layer * n_page + page, or -1,
# and used int32 [n_cache], n_pass * n_layer + layer of the pass and layer that last asked for it.
# state int64 [KV_STATE_SIZE], see KV_STATE. What is copied has whole lines and what completes the
# 16 bytes at their ends.
# At the beginning of a pass: the frames of the pages that positions pos .. pos + n_tok - 1 are in,
# with what the home has of positions before.
KV_CLAIM = op(
    "kv.page_cache",
    "kv_claim",
    "",
    "step state table ring owner used k_home v_home k_frames v_frames n_layer n_page n_ring"
    " n_head_kv k_bytes v_bytes",
)

# At its end: the home gets these positions of all layers.
KV_KEEP = op(
    "kv.page_cache",
    "kv_keep",
    "",
    "step k_home v_home k_frames v_frames n_layer n_page n_ring n_head_kv k_bytes v_bytes",
)

# wanted int32 [n_page]: the pages that ATTEND of the same step, Selection, window and stride reads
# are marked with state.serial.
KV_WANT = op(
    "kv.page_cache",
    "kv_want",
    "",
    "step state indptr indices wanted n_row q_block block window stride",
)

# Frames for the pages of a layer that an op is about to read and that are in none: missing int32
# [n_page], state.n_missing of them, in any order. reader, of KV_READERS, names that op's Reads: for
# "chosen" the pages are those marked in wanted, for others those of its spans, of found, of which
# n_found int64s count, block, x and y. Taken are frames that their layer did not ask for the last
# time, longest ago first, then those of the layers that come up last; none that this layer asked
# for in this pass. n_cache is at least n_page and a multiple of 16. Counts hits and misses, and
# state.serial up. counts int32 [KV_RANKS] is scratch.
KV_TAKE = op(
    "kv.page_cache",
    "kv_take",
    "reader",
    "step state table owner used wanted missing counts found n_found block x y layer n_layer n_page"
    " n_first n_cache",
)

# Keys and values of the missing pages come to their frames.
KV_BRING = op(
    "kv.page_cache",
    "kv_bring",
    "",
    "state table missing k_home v_home k_frames v_frames layer n_page n_head_kv k_bytes v_bytes",
)
