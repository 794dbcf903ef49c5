"""The KV cache of one sequence in the host's memory, and some of its pages on a GPU.

All pages are in a backing store that kernels can reach. The device has frames, each for a page of
one layer: those of the positions being written, and those that ops read last. If decode attention
reads what a method selects, a token bank (kv/token_bank.py) takes the memory that the pages of a
layer leave: units of one KV head. A Program itself fetches what an op reads, just before the op,
without stopping.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE, KVView, kv_row, zeros
from tamis.kv import token_bank
from tamis.kv.access_spans import ONE_QUERY
from tamis.kv.cache import KVCache, KVCounts
from tamis.kv.convert import as_type
from tamis.kv.types import UNIT, KVTypes
from tamis.model.hparams import HParams
from tamis.platform.memory import huge_zeros, shown_bytes

# the number of frames, beside those being written, is a multiple of it: see ops.KV_EVICT
AT_ONCE = 16


class GpuPageCache(KVCache):
    """Frames of kv_vram bytes where kernels run, and all pages in the host's memory.

    mapped: makes an array of the host visible to kernels without a copy, as long as its result is
    held. Raises ValueError if kv_vram is too small.
    """

    def __init__(
        self,
        hp: HParams,
        n_ctx: int,
        types: KVTypes,
        kv_vram: int,
        n_ubatch: int,
        mapped: Callable[[np.ndarray], Any],
    ) -> None:
        self.kv_vram: int = kv_vram
        self.types, self._hp = types, hp
        self._n_page, n_layer = -(-n_ctx // PAGE), hp.n_layer
        self._n_ring = -(-n_ubatch // PAGE) + 1  # pages that a chunk may touch
        self._page_bytes = types.row_bytes(hp.head_dim) * hp.n_head_kv * PAGE
        # The frame before the first one belongs to no page: kernels read it in place of a page
        # without a frame, and do not use the result.
        self._n_first, n_frame = n_layer * self._n_ring, kv_vram // self._page_bytes - 1
        self._n_cache = (n_frame - self._n_first) // AT_ONCE * AT_ONCE
        self._check()
        self._page, self._rows = (hp.n_head_kv, PAGE), [kv_row(type, hp.head_dim) for type in types]
        n_home = n_layer * self._n_page
        self._store = [huge_zeros((n_home, *self._page), row)[1] for row in self._rows]
        self._held = [mapped(stored) for stored in self._store]
        # The state of frames that kernels use: see ops.KV_ALLOCATE.
        self._table = np.zeros((n_layer, self._n_page), np.int32)
        self._ring = np.zeros((n_layer, self._n_ring), np.int32)
        self._bank: token_bank.TokenBank | None = None
        self._new_frames()
        self._state = np.zeros(ops.KV_STATE_SIZE, np.int64)
        self._state[ops.KV_STATE.serial // 8] = 1
        self._marks, self._missing = np.zeros((2, self._n_page), np.int32)
        self._counts = np.zeros(ops.KV_RANKS, np.int32)
        self._drop()
        self._end = 0  # positions that were made writable

    def _new_frames(self) -> None:
        n_frame = 1 + self._n_first + self._n_cache
        self._frames = [huge_zeros((n_frame, *self._page), row)[1][1:] for row in self._rows]
        self._owner, self._used = zeros((2, self._n_cache), np.int32)

    def expect(self, *, choosing: bool) -> None:
        """Give a token bank the memory that a layer's pages leave, if that is enough."""
        n_least = -(-self._n_page // AT_ONCE) * AT_ONCE
        n_bank = self._n_cache - n_least
        if choosing and n_bank >= token_bank.least(PAGE * self._n_page):
            self._bank = token_bank.TokenBank(self._hp, PAGE * self._n_page, self.types, n_bank)
            self._bank.open(UNIT)
            self._n_cache = n_least
            self._new_frames()
            self._drop()

    # ---- positions and Python's side -------------------------------------------------------------
    @property
    def capacity(self) -> int:
        """The number of tokens that fit."""
        return self._n_page * PAGE

    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        """Empty: kernels change the page table, Python does not."""
        return ()

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays that `read` and `write` use: to be fetched before, and sent after."""
        bank = () if self._bank is None else self._bank.arrays
        return (*self._store, self._table, self._ring, self._owner, self._used, *bank)

    def view(self, layer: int) -> KVView:
        """The view of a layer that kernels use: pages without a frame are -1."""
        k, v = self._frames
        return KVView(k, v, self._table[layer], self._table[layer])

    def reserve(self, first: int, n_tokens: int) -> None:
        """Note the number of positions: their pages get frames as chunks arrive."""
        assert n_tokens <= self.capacity
        self._end = max(self._end, n_tokens)

    def truncate(self, n_tokens: int) -> None:
        """Drop positions from n_tokens on, which are written again before they are read."""
        self._end = min(self._end, n_tokens)

    def read(self, layer: int, n_tokens: int, page: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Copies of K and V from a page on to position n_tokens, kv_row [n, n_head_kv]."""
        first, n_page = self._n_page * layer + page, -(-n_tokens // PAGE) - page
        k, v = (stored[first : first + n_page].swapaxes(1, 2) for stored in self._store)
        n = n_tokens - page * PAGE
        return (
            k.reshape(-1, *k.shape[2:])[:n].copy(),
            v.reshape(-1, *v.shape[2:])[:n].copy(),
        )

    def write(self, layer: int, k: np.ndarray, v: np.ndarray, page: int = 0) -> None:
        """Set K and V from the first position of a page on, in the form that `read` returns.

        Rows of another type are converted. All frames are then empty.
        """
        assert k.shape[:2] == v.shape[:2]
        self.reserve(page * PAGE, page * PAGE + len(k))
        for stored, rows, type in zip(self._store, (k, v), self.types, strict=True):
            converted, first = as_type(rows, type), self._n_page * layer + page
            for start in range(0, len(converted), PAGE):
                part = converted[start : start + PAGE].swapaxes(0, 1)
                stored[first + start // PAGE, :, : part.shape[1]] = part
        self._drop()

    def pages_from(self, first: int) -> list[Any]:
        """Copies of all layers' pages that hold positions from `first` on, for `put_back`."""
        layers = range(self._hp.n_layer)
        return [self.read(layer, self._end, first // PAGE) for layer in layers]

    def put_back(self, first: int, pages: list[Any]) -> None:
        """Undo the writes since `pages_from(first)`."""
        for layer, (k, v) in enumerate(pages):
            self.write(layer, k, v, first // PAGE)

    # ---- kernels' side ---------------------------------------------------------------------------
    def before(
        self,
        program: Program,
        step: np.ndarray,
        op: ops.Op,
        constants: dict[str, Any],
        fields: dict[str, Any],
    ) -> dict[str, Any]:
        """Record that what an op will read is fetched to frames, or to the token bank."""
        banked = None
        if token_bank.may_serve(op, constants):
            banked = self._banked(program, step, op, fields)
        if banked is None:
            self._record_fetch(program, step, op, fields, constants.get("q_block", 1))
        return banked or fields

    def record_begin(self, program: Program, step: np.ndarray) -> None:
        """Record that a chunk's positions get frames, before anything is written to them."""
        program.add(
            ops.KV_ALLOCATE,
            step=step,
            state=self._state,
            table=self._table,
            ring=self._ring,
            owner=self._owner,
            used=self._used,
            n_layer=self._hp.n_layer,
            n_ring=self._n_ring,
            **self._copies(),
        )
        if self._bank is not None:
            self._bank.record_begin(program, step)

    def record_end(self, program: Program, step: np.ndarray) -> None:
        """Record the copy of a chunk's positions, of all layers, to the backing store."""
        fields = self._copies() | {"n_layer": self._hp.n_layer, "n_ring": self._n_ring}
        program.add(ops.KV_WRITE_BACK, step=step, **fields)

    def _banked(
        self, program: Program, step: np.ndarray, op: ops.Op, fields: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Record that an op of one query reads its keys in the token bank; returns its fields then.

        None if it must read pages.
        """
        bank = self._bank
        if bank is None or not bank.fits(fields.get("block", 1)):
            return None
        if not bank.serves(program, fields):
            return None
        at = fields["k_table"].ctypes.data - self._table.ctypes.data
        layer = at // self._table.strides[0]
        copies = self._copies()
        del copies["n_head_kv"]

        def fetch(how: dict[str, Any]) -> None:
            program.add(ops.BANK_FETCH, table=self._table[layer], **copies, **how)

        return bank.record(program, step, op, fields, layer, fetch)

    def _record_fetch(
        self, program: Program, step: np.ndarray, op: ops.Op, fields: dict[str, Any], q_block: int
    ) -> None:
        """Record that what an op will read is fetched to frames.

        fields: of the op; q_block: one of ATTEND's constants.
        """
        reads = op.reads
        if reads is ops.READS_SELECTION:
            names = ("step", "indptr", "indices", "n_row")
            chosen = {name: fields[name] for name in names}
            chosen |= {name: fields.get(name, one) for name, one in ONE_QUERY.items()}
            chosen |= {"state": self._state, "marks": self._marks, "q_block": q_block}
            program.add(ops.KV_MARK, **chosen)
        at = fields["k_table"].ctypes.data - self._table.ctypes.data
        layer = at // self._table.strides[0]
        told_by = reads.found, reads.block, reads.x, reads.y
        listed, block, x, y = (fields.get(name) for name in told_by)
        program.add(
            ops.KV_EVICT,
            (reads.name,),
            step=step,
            state=self._state,
            table=self._table,
            owner=self._owner,
            used=self._used,
            marks=self._marks,
            missing=self._missing,
            counts=self._counts,
            found=listed,
            n_found=0 if listed is None else listed.size // reads.every,
            block=block,
            x=x,
            y=y,
            layer=layer,
            n_layer=self._hp.n_layer,
            n_page=self._n_page,
            n_first=self._n_first,
            n_cache=self._n_cache,
        )
        program.add(
            ops.KV_FETCH,
            state=self._state,
            table=self._table,
            missing=self._missing,
            layer=layer,
            **self._copies(),
        )

    @property
    def counters(self) -> tuple[np.ndarray, ...]:
        """The arrays that `counts` reads."""
        return (self._state,) if self._bank is None else (self._state, self._bank.state)

    @property
    def counts(self) -> KVCounts:
        """The counters of the frames, in pages, and of the token bank, in its units.

        They are as of the time when `counters` were fetched.
        """
        n_hit, n_miss = (
            int(self._state[at // 8]) for at in (ops.KV_STATE.n_hit, ops.KV_STATE.n_miss)
        )
        n_read = n_miss * self._page_bytes
        if self._bank is not None:
            hits, misses, _ = self._bank.counted
            n_hit, n_miss = n_hit + hits, n_miss + misses
            n_read += misses * self._bank.unit * self.types.row_bytes(self._hp.head_dim)
        return KVCounts(n_hit=n_hit, n_miss=n_miss, n_read=n_read)

    def _copies(self) -> dict[str, Any]:
        (k_store, v_store), (k_frames, v_frames) = self._store, self._frames
        return {
            "k_store": k_store,
            "v_store": v_store,
            "k_frames": k_frames,
            "v_frames": v_frames,
            "n_page": self._n_page,
            "n_head_kv": self._hp.n_head_kv,
            "k_bytes": k_store[0, 0, 0].nbytes,
            "v_bytes": v_store[0, 0, 0].nbytes,
        }

    def _drop(self) -> None:
        """Empty all frames."""
        self._table[...], self._ring[...], self._owner[...] = -1, -1, -1
        self._used[...] = -ops.KV_OLD
        if self._bank is not None:
            self._bank.truncate(0)

    def _check(self) -> None:
        n_least = -(-self._n_page // AT_ONCE) * AT_ONCE
        least = (1 + self._n_first + n_least) * self._page_bytes
        if self._n_cache < n_least:
            raise ValueError(
                f"kv_vram is {shown_bytes(self.kv_vram)}, this context needs "
                f"{-(-least >> 20)} MiB of the GPU: the pages of a layer and those of a chunk in "
                "all layers; raise kv_vram, or lower n_ctx"
            )
