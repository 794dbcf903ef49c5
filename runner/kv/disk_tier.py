"""The KV cache of one sequence in a fixed amount of memory, the rest in a file.

Data is fetched just before the op that reads it. The positions that a method selects for one token
are a few units, which the Program itself reads into a token bank (kv/token_bank.py). For other ops
the Program stops; sinks and recent positions, which methods read in every layer, stay in memory and
need no stop. A thread writes whole pages to the file later; while a layer runs, the system
prefetches what the next layer selected in the last step.
"""

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Call, Program
from tamis.jit_kernels.contract.types import PAGE, KVView
from tamis.kv import access_spans as reads
from tamis.kv import token_bank
from tamis.kv.cache import KVCache, KVCounts
from tamis.kv.convert import as_type
from tamis.kv.frame_pool import Frames, Load, OutOfFramesError
from tamis.kv.types import UNITS, KVTypes, Tier
from tamis.kv.unit_file import KVFile
from tamis.model.hparams import HParams
from tamis.platform.memory import shown_bytes

T = TypeVar("T")
N_READER = 4  # threads: a disk serves several requests in the time of one
MARGIN = 8  # frames beyond those of a layer and of the pages being written
FEW_KEPT = 8  # pages of a layer, sinks and recent ones, that stay in memory in most cases
MOST_KEPT = 24  # and at most
MOST_THREADS = 1024  # of a Program


class DiskTier(KVCache):
    """Frames in a limited memory, and a file with all other pages.

    Raises ValueError if kv_ram is too small, OSError if the file cannot be made.
    """

    def __init__(self, hp: HParams, n_ctx: int, types: KVTypes, tier: Tier, n_ubatch: int) -> None:
        kv_ram, folder, self._unit = tier
        assert self._unit in UNITS, self._unit
        self.types, self._counts, self._hp = types, KVCounts(), hp
        self.kv_ram: int = kv_ram
        self._n_page = -(-n_ctx // PAGE)
        self._page_bytes = types.row_bytes(hp.head_dim) * hp.n_head_kv * PAGE
        self._n_frame = kv_ram // self._page_bytes
        self._n_allocated = hp.n_layer * (-(-n_ubatch // PAGE) + 1)
        self._check(MARGIN, "this model")
        self._file = KVFile(folder)
        sides, at = [], 0
        for type in types:
            side = Frames(hp, type, self._n_frame, self._n_page, self._unit, (self._file, at))
            sides.append(side)
            at += side.page_bytes * hp.n_layer * self._n_page
        self._sides: list[Frames] = sides
        self._end = np.zeros(hp.n_layer, np.int64)  # the number of positions of each layer
        # For a layer and side, the step that last asked for units, and these units.
        self._needed: dict[tuple[int, int], tuple[int, np.ndarray]] = {}
        self._pool = ThreadPoolExecutor(N_READER, "tamis-kv")
        self._writer = ThreadPoolExecutor(1, "tamis-kv-write")
        self._writing: list[tuple[Future[None], int, int, np.ndarray]] = []
        self._failed = False  # a write has failed; the data is still in memory
        self._ahead: list[tuple[int, list[Future[None]], Load]] = []
        self._step, self._n_tok, self._n_ctx = 0, 0, n_ctx
        self._bank: token_bank.TokenBank | None = None  # made when a Program needs it
        self._banked = weakref.WeakKeyDictionary[Program, _Banked]()
        # By Program and call.
        self._spans: weakref.WeakKeyDictionary[Program, dict[int, _SpanReader]]
        self._spans = weakref.WeakKeyDictionary()
        self._kept: dict[int, frozenset[int]] = {}  # by layer, the pages that stay
        self._stopping = set[int]()  # layers for whose ops a pass stops
        weakref.finalize(self, _close, self._pool, self._writer, self._file)

    # ---- positions and Python's side -------------------------------------------------------------
    @property
    def counts(self) -> KVCounts:
        """The counters of memory and file."""
        if self._bank is None:
            return replace(self._counts)
        n_hit, n_miss, n_read = self._bank.counted
        counts, sides = self._counts, len(self._sides)
        unit = self._bank.unit * self.types.row_bytes(self._hp.head_dim)
        asked = unit * (n_hit + n_miss)
        return KVCounts(
            counts.n_hit + sides * n_hit,
            counts.n_miss + sides * n_miss,
            counts.n_ahead,
            counts.n_read + n_read,
            counts.n_written,
            counts.n_chosen + asked,
            counts.n_covered + asked,
        )

    @property
    def capacity(self) -> int:
        """The number of tokens that fit."""
        return self._n_page * PAGE

    @property
    def tables(self) -> tuple[np.ndarray, ...]:
        """The page table of the keys, by whose address a layer is known."""
        return (self._table,)

    @property
    def _table(self) -> np.ndarray:
        return self._sides[0].table

    def view(self, layer: int) -> KVView:
        """The view of a layer that kernels use: pages that are not in memory are -1."""
        k, v = self._sides
        return KVView(k.frames, v.frames, k.table[layer], v.table[layer])

    def reserve(self, first: int, n_tokens: int) -> None:
        """Do nothing: pages get their frames as chunks arrive."""
        assert n_tokens <= self.capacity

    def truncate(self, n_tokens: int) -> None:
        """Drop the pages that hold no position below n_tokens."""
        if (self._end <= n_tokens).all():
            return
        self._settle(wait=True, check=False)
        self._join()
        first = -(-n_tokens // PAGE)
        if self._bank is not None:
            self._bank.truncate(n_tokens)
        self._kept.clear()
        for layer in range(self._hp.n_layer):
            for side in self._sides:
                side.drop(layer, first)
        np.minimum(self._end, n_tokens, out=self._end)
        self._needed.clear()

    def read(self, layer: int, n_tokens: int, page: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Copies of K and V from a page on to position n_tokens, kv_row [n, n_head_kv].

        Raises KVFileError.
        """
        self._settle(wait=True, check=False)
        self._join()
        n_page, both = -(-n_tokens // PAGE) - page, []
        for side in self._sides:
            pages = np.zeros((n_page, *side.frames.shape[1:]), side.frames.dtype)
            n_unit = side.page_bytes // side.unit_bytes
            units = pages.view(np.uint8).reshape(n_page, n_unit, side.unit_bytes)
            for i in range(n_page):
                side.read_page(layer, page + i, units[i])
            rows = pages.swapaxes(1, 2)
            both.append(rows.reshape(n_page * PAGE, *rows.shape[2:])[: n_tokens - page * PAGE])
        return both[0], both[1]

    def pages_from(self, first: int) -> list[Any]:
        """Copies of all layers' pages that hold positions from `first` on, for `put_back`."""
        n = int(self._end.max())
        return [self.read(layer, n, first // PAGE) for layer in range(self._hp.n_layer)]

    def put_back(self, first: int, pages: list[Any]) -> None:
        """Undo the writes since `pages_from(first)`."""
        for layer, (k, v) in enumerate(pages):
            self.write(layer, k, v, first // PAGE)

    def write(self, layer: int, k: np.ndarray, v: np.ndarray, page: int = 0) -> None:
        """Set K and V from the first position of a page on; later positions are dropped.

        An incomplete page gets a frame. Raises KVFileError.
        """
        self._settle(wait=True, check=False)
        self._join()
        end = page * PAGE + len(k)
        if self._bank is not None:
            self._bank.truncate(page * PAGE)
        self._kept.clear()
        for side, rows, type in zip(self._sides, (k, v), self.types, strict=True):
            converted = as_type(rows, type)
            side.drop(layer, page)
            for start in range(0, len(converted), PAGE):
                at = page + start // PAGE
                part = converted[start : start + PAGE].swapaxes(0, 1)
                if part.shape[1] == PAGE:
                    units = np.ascontiguousarray(part).view(np.uint8).reshape(-1, side.unit_bytes)
                    side.write_page(layer, at, units)
                    self._counts.n_written += units.nbytes
                else:
                    side.allocate(layer, np.array([at]))
                    side.frames[side.table[layer, at], :, : part.shape[1]] = part
        self._end[layer] = end
        self._needed.clear()  # there may now be fewer pages than were asked for

    def drop_cached(self) -> None:
        """Drop the system's cached copies of the file, for measurements."""
        self._settle(wait=True)
        self._join()
        self._file.drop_cached()

    # ---- kernels' side ---------------------------------------------------------------------------
    def before(
        self,
        program: Program,
        step: np.ndarray,
        op: ops.Op,
        constants: dict[str, Any],
        fields: dict[str, Any],
    ) -> dict[str, Any]:
        """Record that positions which a method selects for one token go to a token bank."""
        banked = self._banked.setdefault(program, _Banked())
        served = token_bank.may_serve(op, constants)
        if not (served and token_bank.TokenBank.serves(program, fields)):
            banked.n_whole += op is ops.ATTEND and fields["window"] == 0
            return fields
        bank, block = self._own_bank(shared=banked.n_whole > 0), fields.get("block", 1)
        if bank is None or not bank.fits(block):
            return fields
        layer = self._layer_of(fields["k_table"].ctypes.data)
        arrays = (fields[name].ctypes.data for name in ("indptr", "indices"))
        said = [*arrays, block, fields["n_row"]]
        if banked.ahead:
            banked.ahead[-1][:] = *said, layer
        else:
            bank.open(block)
            bank.record_begin(program, step)
            banked.first = *said, layer
        ahead = np.array(banked.first, np.int64)  # the first layer follows the last one
        assert len(ahead) == ops.BANK_AHEAD_SIZE
        banked.ahead.append(ahead)

        def read(how: dict[str, Any]) -> None:
            self._record_read(program, ahead, how)

        return bank.record(program, step, op, fields, layer, read)

    def _own_bank(self, *, shared: bool) -> token_bank.TokenBank | None:
        """The token bank, made of memory that no op needs; None if that is too small.

        shared: whether some layers are read whole in decode steps; it then takes half at most.
        """
        n_least = token_bank.least(self._n_ctx)
        n_left = self._n_frame - (self._n_page + MARGIN + self._n_allocated)
        n_half = min(self._n_frame // 2, n_left - FEW_KEPT * self._hp.n_layer)
        n_bank = min(max(n_least, n_half), n_left) if shared else n_left
        if self._bank is None and n_bank >= n_least and self._step == 0:
            self._bank = token_bank.TokenBank(self._hp, self._n_ctx, self.types, n_bank)
            self._buffers = np.zeros((MOST_THREADS, ops.BANK_BUFFER), np.uint8)
            self._n_frame -= n_bank
            for side in self._sides:
                side.limit(self._n_frame)
        return self._bank

    def _record_read(self, program: Program, ahead: np.ndarray, how: dict[str, Any]) -> None:
        """Record the reading of the token bank's missing units from the file."""
        (k, v), layer = self._sides, how["layer"]
        program.add(
            ops.BANK_READ,
            k_frames=k.frames,
            v_frames=v.frames,
            k_table=k.table[layer],
            v_table=v.table[layer],
            k_sums=k.sums,
            v_sums=v.sums,
            buffers=self._buffers,
            ahead=ahead,
            handle=self._file.handle,
            k_start=k.first_byte,
            v_start=v.first_byte,
            n_layer=self._hp.n_layer,
            n_page=self._n_page,
            file_unit=self._unit,
            k_bytes=k.unit_bytes // self._unit,
            v_bytes=v.unit_bytes // self._unit,
            **how,
        )

    def stops(self, program: Program) -> list[int]:
        """The calls before which `fetch` may have to be called. Raises ValueError if impossible."""
        stops = [i for i, call in enumerate(program.calls) if self._fetches(call, program)]
        calls = [program.calls[i] for i in stops]
        chosen = {reads.fields_of(call, program).values.get("indices") for call in calls}
        chosen.discard(None)
        calls += [call for call in program.calls if call.values and chosen & {*call.values}]
        if any(reads.reads_all(call, program) for call in calls):
            self._check(self._n_page + MARGIN, "a method that reads every key")
        return stops

    def _fetches(self, call: Call, program: Program) -> bool:
        """Whether an op reads pages of this cache."""
        if call.spec.op.reads is ops.READS_NOTHING:
            return False
        at = reads.fields_of(call, program)["k_table"] - self._table.ctypes.data
        return 0 <= at < self._table.nbytes

    def _layer_of(self, table: int) -> int:
        """The layer whose page table has this address."""
        return (table - self._table.ctypes.data) // self._table.strides[0]

    def due(self, program: Program, stops: list[int]) -> list[int]:
        """Those of `stops` that this pass needs; the data of the others stays in memory.

        Raises KVFileError, ValueError.
        """
        if self._n_tok != 1:
            self._stopping = set(range(self._hp.n_layer))
            return stops
        left, keep = [], dict[int, set[int]]()
        self._stopping = set()
        for at in stops:
            readers = self._spans.setdefault(program, {})
            if at not in readers:
                readers[at] = self._reader(program, at)
            reader = readers[at]
            pages = reader.pages(-(-int(self._end[reader.layer]) // PAGE))
            if pages is None:
                left.append(at)
                self._stopping.add(reader.layer)
            else:
                keep.setdefault(reader.layer, set()).update(pages)
        n_other = MARGIN + 2 * self._hp.n_layer + (self._n_page if left else 0)
        if sum(map(len, keep.values())) > self._n_frame - n_other:
            self._stopping, keep, left = set(range(self._hp.n_layer)), {}, stops
        self._keep({layer: frozenset(pages) for layer, pages in keep.items() if pages})
        return left

    def _reader(self, program: Program, at: int) -> "_SpanReader":
        call = program.calls[at]
        layer = self._layer_of(reads.fields_of(call, program)["k_table"])
        return _SpanReader(call, program, layer)

    def _keep(self, pages: dict[int, frozenset[int]]) -> None:
        """Keep pages of layers in memory until the next call."""
        if pages == self._kept:
            return
        self._join()
        self._unpin()
        for side in self._sides:
            side.release()
        self._kept = {}
        for layer, some in pages.items():
            listed = np.array(sorted(some), np.int64)
            need = np.zeros((int(listed.max()) + 1, self._hp.n_head_kv * PAGE // self._unit), bool)
            need[listed] = True
            self.fetch_units(layer, [need] * len(self._sides))
            for side in self._sides:
                side.keep(layer, listed)
        self._unpin()
        self._kept = pages

    def begin(self, pos: int, n_tok: int) -> None:
        """Make positions pos .. pos + n_tok - 1 writable in all layers. Raises KVFileError."""
        self._step += 1
        self._n_tok = n_tok
        if n_tok > 1:
            self._kept = {}
            for side in self._sides:
                side.release()
        if self._bank is not None and pos < self._end.max():
            self._bank.truncate(pos)
        self._join()  # frames that are still being filled must not be taken for new pages
        self._unpin()
        self._settle()
        if self._failed:
            self._failed = False
            self._write_behind(pos // PAGE)
            self._settle(wait=True)
        if self._bank is not None and n_tok == 1 and self._writing:
            self._settle(wait=True)  # the bank reads all but the last page from the file
        first, last = pos // PAGE, (pos + n_tok - 1) // PAGE
        pages = np.arange(first, last + 1)
        for layer in range(self._hp.n_layer):
            self._end[layer] = max(self._end[layer], pos + n_tok)
            if first == last and all(side.is_dirty(layer, first) for side in self._sides):
                continue
            if pos % PAGE:
                self._fill(layer, first, pos % PAGE)
            for side in self._sides:
                if self._writing and side.n_spare() < len(pages):
                    self._settle(wait=True)  # rather than evict what every step reads
                self._with_frames(partial(side.allocate, layer, pages), layer)

    def finish(self, pos: int, n_tok: int) -> None:
        """Note that positions pos .. pos + n_tok - 1 are written; whole pages go to the file.

        Raises KVFileError if the token bank has read units that differ from what was written.
        """
        if self._bank is not None and self._bank.failed():
            self._bank.truncate(0)
            raise self._file.damaged()
        if pos // PAGE < (pos + n_tok) // PAGE:
            self._write_behind((pos + n_tok) // PAGE)

    def fetch(self, program: Program, at: int) -> None:
        """Fetch what a call reads into memory, and start reading for the next layer.

        Raises KVFileError, ValueError.
        """
        call = program.calls[at]
        layer = self._layer_of(reads.fields_of(call, program)["k_table"])
        n_page = -(-int(self._end[layer]) // PAGE)
        if call.spec.op.reads is ops.READS_SELECTION:
            need, n_key = reads.chosen(call, program, n_page, self._unit)
        else:
            spans = reads.spans(call.spec.op.reads, reads.fields_of(call, program))
            need, n_key = self._spanned(spans, n_page)
        flat = need.reshape(n_page, -1)
        n_side = 2 if "v_pages" in call.spec.op.fields else 1
        for side in self._sides[:n_side]:
            self._counts.n_chosen += n_key * side.unit_bytes // self._unit
            self._counts.n_covered += int(flat.sum()) * side.unit_bytes
        self.fetch_units(layer, [flat] * n_side)
        following = (layer + 1) % self._hp.n_layer
        if call.spec.op.reads is ops.READS_SELECTION and following in self._stopping:
            self._read_ahead(following)

    def _fill(self, layer: int, page: int, n_line: int) -> None:
        """Fetch a page's first n_line positions into memory, before the others are written."""
        need = np.zeros((page + 1, self._hp.n_head_kv, PAGE // self._unit), bool)
        need[page, :, : -(-n_line // self._unit)] = True
        self._join()
        for i, side in enumerate(self._sides):
            if not side.is_dirty(layer, page):
                lookup = partial(side.lookup, layer, need.reshape(page + 1, -1), self._step)
                load = self._with_frames(lookup, layer)
                self._wait([(i, self._start(i, load), load)])

    def _spanned(self, spans: reads.Spans, n_page: int) -> tuple[np.ndarray, int]:
        per_page, n_head_kv = PAGE // self._unit, self._hp.n_head_kv
        spans = [(first, min(last, n_page * PAGE)) for first, last in spans]
        line = np.zeros(n_page * per_page, bool)
        for first, last in spans:
            line[first // self._unit : -(-last // self._unit)] = True
        shape = (n_page, n_head_kv, per_page)
        need = np.broadcast_to(line.reshape(n_page, 1, per_page), shape)
        return need, n_head_kv * sum(last - first for first, last in spans)

    def fetch_units(self, layer: int, needs: list[np.ndarray]) -> None:
        """Wait until units of keys, or of K and V, are in memory.

        needs: bool [n_page, units of a page], grouped by KV head. They stay until the next call.
        Raises KVFileError, ValueError.
        """
        self._join()
        self._unpin()
        loads = []
        for i, need in enumerate(needs):
            side = self._sides[i]
            load = self._with_frames(partial(side.lookup, layer, need, self._step), layer)
            step, before = self._needed.get((layer, i), (0, need))
            # A selecting op may have read more keys in this step than it selected.
            self._needed[layer, i] = self._step, need | before if step == self._step else need
            loads.append(load)
            self._counts.n_hit += int(need.sum()) - len(load.numbers)
            self._counts.n_miss += len(load.numbers)
        self._wait([(i, self._start(i, load), load) for i, load in enumerate(loads)])

    def _read_ahead(self, layer: int) -> None:
        for i, side in enumerate(self._sides):
            if (layer, i) in self._needed:
                _, need = self._needed[layer, i]
                load = side.lookup(layer, need, self._step, ahead=True)
                self._counts.n_ahead += len(load.numbers)
                self._ahead.append((i, self._start(i, load), load))

    def _start(self, side: int, load: Load) -> list["Future[None]"]:
        n = len(load.numbers)
        self._counts.n_read += n * self._sides[side].unit_bytes
        n_part = min(N_READER, -(-n // 8))
        return [self._pool.submit(load.run, i, n_part) for i in range(n_part)]

    def _join(self) -> None:
        """Wait for the prefetched units."""
        ahead, self._ahead = self._ahead, []
        self._wait(ahead)

    def _wait(self, started: list[tuple[int, list["Future[None]"], Load]]) -> None:
        """Wait for all Loads, then raise the first error among them."""
        errors = []
        for i, futures, load in started:
            raised = [future.exception() for future in futures]
            errors += [error for error in raised if error is not None]
            if not any(raised):
                self._sides[i].loaded(load)
        if errors:
            raise errors[0]

    def _unpin(self) -> None:
        for side in self._sides:
            side.unpin()

    def _with_frames(self, take: Callable[[], T], layer: int) -> T:
        """The result of `take`, once there are frames for it. Raises KVFileError, ValueError."""
        try:
            return take()
        except OutOfFramesError:
            self._settle(wait=True)
        try:
            return take()
        except OutOfFramesError as error:
            least = (self._n_frame + error.n) * self._page_bytes
            raise ValueError(
                f"layer {layer} needs {error.n} pages more at once than kv_ram of {self.kv_ram} "
                f"bytes has room for: raise kv_ram to {-(-least >> 20)} MiB, lower n_ctx, or "
                "choose a method that reads less"
            ) from None

    # ---- write-behind --------------------------------------------------------------------------
    def _write_behind(self, end: int) -> None:
        """Start writing the pages below `end` that the file lacks."""
        busy = {(layer, i, int(p)) for _, layer, i, pages in self._writing for p in pages}
        for layer in range(self._hp.n_layer):
            for i, side in enumerate(self._sides):
                dirty = side.dirty_pages(layer, end)
                pages = np.array([p for p in dirty if (layer, i, int(p)) not in busy], np.int64)
                if len(pages):
                    job = self._writer.submit(side.write, layer, pages)
                    self._writing.append((job, layer, i, pages))

    def _settle(self, *, wait: bool = False, check: bool = True) -> None:
        """Process finished writes. check: raise their errors; the writes are tried again later."""
        errors, left = [], []
        for item in self._writing:
            job, layer, i, pages = item
            if not wait and not job.done():
                left.append(item)
                continue
            error = job.exception()
            if error is None:
                self._counts.n_written += len(pages) * self._sides[i].page_bytes
                self._sides[i].clean(layer, pages)
            else:
                errors.append(error)
        self._writing, self._failed = left, self._failed or bool(errors)
        if errors and check:
            raise errors[0]

    def _check(self, n_frame: int, who: str) -> None:
        least = (n_frame + self._n_allocated) * self._page_bytes
        if self.kv_ram < least:
            raise ValueError(
                f"kv_ram is {shown_bytes(self.kv_ram)}, {who} needs "
                f"{-(-least >> 20)} MiB at this context: raise kv_ram, or lower n_ctx"
            )


class _SpanReader:
    """A call that reads a few positions that its fields determine before it runs."""

    def __init__(self, call: Call, program: Program, layer: int) -> None:
        self._reads, self.layer = call.spec.op.reads, layer
        self._fields = reads.fields_of(call, program)
        self._is_known = self._reads not in (ops.READS_SELECTION, ops.READS_ALL)

    def pages(self, n_page: int) -> set[int] | None:
        """The pages that it reads, of n_page; None if they are many, or unknown yet."""
        if not self._is_known:
            return None
        pages = set[int]()
        for first, end in reads.spans(self._reads, self._fields):
            last = min(-(-end // PAGE), n_page)
            if last - first // PAGE > MOST_KEPT:
                return None
            pages.update(range(first // PAGE, last))
        return pages


class _Banked:
    """The recording of a Program's attention from one token to selected positions."""

    def __init__(self) -> None:
        # for each layer that reads the bank: the fields of BANK_AHEAD
        self.ahead: list[np.ndarray] = []
        self.first: tuple[int, ...] = ()  # the fields of the first of them
        self.n_whole = 0  # layers that do not read it and have no window of their own


def _close(pool: ThreadPoolExecutor, writer: ThreadPoolExecutor, file: KVFile) -> None:
    for threads in (pool, writer):
        threads.shutdown()
    file.close()
