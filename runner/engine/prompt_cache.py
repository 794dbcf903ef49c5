"""A cache of prompts beyond the sessions that read them: in RAM, and in files that outlive it.

It stores pages of 64 tokens by hash. The hash of a page covers the hash of the one before it, and
that of the first covers what keys depend on beside tokens: weights, adapters, KV types, methods,
device and the caller's scope. So a prefix that conversations share is stored once, files of several
processes and models lie in one folder, and a look-up needs no list: it tries page after page. After
the last whole page of a sequence comes its *end*: the tokens since, their page, and the states of
recurrent layers; a sequence with such layers can resume only from an end.

Eviction order: each page is due at the time at which a conversation with it was last used, plus one
second for each token of that conversation, up to one day. A conversation's pages are due together,
its last pages first. So conversations are evicted as a whole, the least recently used one first;
and a conversation that is n tokens longer than others survives them in the n seconds after its use,
however many they are: computing it again would take longer.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from tamis.engine.session import Session
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.page_files import PageFiles, Record
from tamis.kv.pages import OutOfPagesError
from tamis.kv.unit_file import KVFileError
from tamis.vision.held import whole_pictures

LONGEST = 86400  # in tokens: longer conversations are due as if they had this many
PAGE_SECONDS = 1e-3  # the time by which a page is due before its predecessor
RUN = 64  # pages that are copied at once
ROOM = 16  # a full RAM is emptied by one ROOM-th
VERSION = 1  # of the hashes' content, and of the pages
_NONE, _NO_TOKENS = np.zeros(0, np.uint8), np.zeros(0, np.int32)


class _Prefix(NamedTuple):
    """The stored part of a prompt: whole pages, and an end if `end` is set."""

    names: list[bytes]
    end: Record | None
    n_tokens: int


class PromptCache:
    """Stores the KV cache of sessions, and appends it to sessions with the same prefix.

    All calls come from one thread, which owns the sessions. After a failure of the disk, or with
    too little memory, a page counts as missing.
    """

    def __init__(self, n_ram: int, files: PageFiles | None = None, salt: str = "") -> None:
        """Make a cache; n_ram: bytes kept in RAM; files: where all records are also written.

        salt: what keys depend on beside what a session itself knows.
        """
        self.n_ram, self._files, self._salt = n_ram, files, salt
        self._records: dict[bytes, Record] = {}
        self._due: dict[bytes, float] = {}
        self._identities: WeakKeyDictionary[Session, bytes] = WeakKeyDictionary()
        self.ram_bytes = 0  # kept in RAM
        self.n_kept = self.n_restored = 0  # bytes stored from sessions, and restored to them
        self.n_hits = self.n_restored_tokens = 0
        self.n_ram_evicted = 0  # records

    @staticmethod
    def open(
        n_ram: int, folder: str | Path | None = None, n_disk: int = 0, salt: str = ""
    ) -> "PromptCache":
        """A cache with n_ram bytes of RAM, and n_disk bytes of files if a folder is named.

        Raises OSError for a folder that cannot be made, or that others may change.
        """
        files = None if folder is None else PageFiles(Path(folder), n_disk)
        return PromptCache(n_ram, files, salt)

    @property
    def disk_bytes(self) -> int:
        """The bytes in the folder, as far as they are known."""
        return 0 if self._files is None else self._files.held

    @property
    def n_evicted(self) -> int:
        """The number of evicted records: of those in files, or in RAM if there are no files."""
        return self.n_ram_evicted if self._files is None else self._files.n_evicted

    @property
    def n_failed(self) -> int:
        """The number of files that could not be written, or were damaged."""
        return 0 if self._files is None else self._files.n_failed

    def keep(self, session: Session, scope: str = "") -> None:
        """Store what a session holds, except what is stored already.

        Raises KVFileError, MemoryError.
        """
        tokens = np.asarray(session.tokens, np.int32)
        if not len(tokens):
            return
        root = self._root(session, scope)
        names, now = _chain(root, tokens), time.time()
        first = 0
        for first, name in enumerate([*names, None]):
            if name is None or not self._has(name):
                break
            self._touch(name, _due(now, len(tokens), first))
        for start in range(first, len(names), RUN):
            end = min(start + RUN, len(names))
            for i, page in enumerate(session.pages(start, end), start):
                self._add(
                    names[i], Record(_NO_TOKENS, page.copy(), _NONE), _due(now, len(tokens), i)
                )
            self._make_room()
        for n_tokens, state in session.states() or [(len(tokens), _NONE)]:
            self._keep_end(session, [root, *names], tokens[:n_tokens], state)
        self._make_room()

    def extend(
        self, session: Session, ids: Sequence[int], scope: str = "", *, least: int = 1
    ) -> int:
        """Append to a session what is stored of a prompt that begins with the session's tokens.

        It never includes the prompt's last token, whose logits are needed, and appends nothing if
        it would be fewer than `least` tokens. Returns the number of tokens that the session holds
        then. Raises KVFileError if the session's own KV cache is in a file that fails.
        """
        held, tokens = session.n_past, np.asarray(ids, np.int32)
        root, states = self._root(session, scope), session.has_states
        prefix = self._find(root, tokens[:-1] if states else tokens, states=states)
        n_tokens = whole_pictures(ids, min(prefix.n_tokens, session.n_ctx, len(tokens) - 1))
        if n_tokens < held + least:
            return held
        # Truncating recurrent layers computes tokens again, unless all are dropped.
        first = 0 if session.has_states else held // PAGE
        records = self._read(prefix, first, -(-n_tokens // PAGE))
        n_tokens = whole_pictures(ids, min(n_tokens, (first + len(records)) * PAGE))
        state = None
        if session.has_states:
            if n_tokens < prefix.n_tokens or prefix.end is None:
                return held
            state = prefix.end.state.view(np.float32)
        if n_tokens < held + least:
            return held
        session.truncate(first * PAGE)
        try:
            pages = [record.data for record in records]
            session.append_pages(tokens[first * PAGE : n_tokens].tolist(), pages, state)
        except KVFileError:
            raise
        except (ValueError, MemoryError, OutOfPagesError):  # the content of a file does not fit
            return session.n_past
        self.n_hits += 1
        self.n_restored += sum(map(len, pages))
        self.n_restored_tokens += n_tokens - held
        now = time.time()
        for i, name in enumerate(prefix.names):
            self._touch(name, _due(now, len(tokens), i))
        self._make_room()
        return n_tokens

    def holds(self, session: Session, ids: Sequence[int], scope: str = "") -> int:
        """The number of a prompt's first tokens that are stored; of a session without states."""
        tokens = np.asarray(ids, np.int32)
        return self._find(self._root(session, scope), tokens, states=False).n_tokens

    def evict(self, session: Session, scope: str = "") -> None:
        """Evict the records of a session's sequence.

        Others compute again what they share with it.
        """
        root = self._root(session, scope)
        names = _chain(root, np.asarray(session.tokens, np.int32))
        nodes = [root, *names]
        for name in [*names, *map(_end_of, nodes), *map(_state_of, nodes)]:
            self._drop(name)
            if self._files is not None:
                self._files.remove(name)

    def close(self, seconds: float = 10.0) -> None:
        """Wait some seconds until files are written."""
        if self._files is not None:
            self._files.close(seconds)

    # --- records by their names ------------------------------------------------------------------

    def _root(self, session: Session, scope: str) -> bytes:
        """The part of the first page's hash that is independent of its tokens."""
        if session not in self._identities:
            self._identities[session] = session.identity
        text = json.dumps([VERSION, self._salt, scope]).encode()
        return _digest(self._identities[session] + text)

    def _find(self, root: bytes, tokens: np.ndarray, *, states: bool) -> _Prefix:
        """The stored part of a prompt.

        With states only up to an end, as a state is needed there.
        """
        names = []
        for name in _chain(root, tokens):
            if not self._has(name):
                break
            names.append(name)
        nodes = [root, *names]
        if not states:
            end = self._get(_end_of(nodes[-1]))
            n = 0 if end is None else _n_same(end.tokens, tokens[len(names) * PAGE :])
            return _Prefix(names, end, len(names) * PAGE + n)
        for n in range(len(names), -1, -1):
            rest: np.ndarray = tokens[n * PAGE :]
            for name in (_end_of(nodes[n]), _state_of(nodes[n])):
                end = self._get(name)
                if end is not None and _n_same(end.tokens, rest) == len(end.tokens):
                    return _Prefix(names[:n], end, n * PAGE + len(end.tokens))
        return _Prefix(names, None, 0)

    def _read(self, prefix: _Prefix, first: int, n_page: int) -> list[Record]:
        """The records of pages first .. n_page - 1, up to the first that cannot be read."""
        records: list[Record] = []
        for i in range(first, n_page):
            record = self._get(prefix.names[i]) if i < len(prefix.names) else prefix.end
            if record is None or (records and len(record.data) != len(records[0].data)):
                break
            records.append(record)
        return records

    def _has(self, name: bytes) -> bool:
        return name in self._records or (self._files is not None and self._files.has(name))

    def _get(self, name: bytes) -> Record | None:
        """A record; one from a file is then kept in RAM."""
        record = self._records.get(name)
        if record is None and self._files is not None:
            record = self._files.read(name)
            if record is not None:
                self._hold(name, record, time.time())
        return record

    def _add(self, name: bytes, record: Record, due: float) -> None:
        self.n_kept += record.n_byte
        self._hold(name, record, due)
        if self._files is not None:
            self._files.write(name, record, due)

    def _hold(self, name: bytes, record: Record, due: float) -> None:
        """Keep a record in RAM, if there is room."""
        if record.n_byte <= self.n_ram:
            self._drop(name)
            self._records[name], self._due[name] = record, due
            self.ram_bytes += record.n_byte

    def _touch(self, name: bytes, due: float) -> None:
        if name in self._due:
            self._due[name] = max(due, self._due[name])
        if self._files is not None:
            self._files.touch(name, due)

    def _drop(self, name: bytes) -> None:
        """Drop a record from RAM, if it is there."""
        if (record := self._records.pop(name, None)) is not None:
            del self._due[name]
            self.ram_bytes -= record.n_byte

    def _make_room(self) -> None:
        """Drop the records of RAM that are due first, if there are too many bytes."""
        if self.ram_bytes <= self.n_ram:
            return
        for name in sorted(self._due, key=self._due.__getitem__):
            if self.ram_bytes <= self.n_ram - self.n_ram // ROOM:
                break
            self._drop(name)
            self.n_ram_evicted += 1

    def _keep_end(
        self, session: Session, nodes: list[bytes], tokens: np.ndarray, state: np.ndarray
    ) -> None:
        """Store the end of a sequence's first tokens. nodes: the names of pages, after the root."""
        n = len(tokens) // PAGE
        rest = tokens[n * PAGE :]
        name = _end_of(nodes[n]) if len(rest) else _state_of(nodes[n])
        known = self._records.get(name)
        same = known is not None and np.array_equal(known.tokens, rest)
        if same or not (len(rest) or len(state)):
            return
        page = session.pages(n, n + 1)[0].copy() if len(rest) else _NONE
        self._drop(name)
        record = Record(rest.copy(), page, state.reshape(-1).view(np.uint8))
        self._add(name, record, _due(time.time(), session.n_past, n))


def _due(now: float, n_tokens: int, page: int) -> float:
    """The time at which a page is due, of a conversation of n_tokens tokens that is used now."""
    return now + min(n_tokens, LONGEST) - PAGE_SECONDS * page


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def _chain(root: bytes, tokens: np.ndarray) -> list[bytes]:
    """The names of the whole pages of a sequence."""
    names, name = [], root
    for first in range(0, len(tokens) - PAGE + 1, PAGE):
        name = _digest(name + tokens[first : first + PAGE].tobytes())
        names.append(name)
    return names


def _n_same(a: np.ndarray, b: np.ndarray) -> int:
    """The length of the common prefix of two sequences, in tokens."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def _end_of(name: bytes) -> bytes:
    """The name of the remainder of a sequence after a page."""
    return _digest(name + b"end")


def _state_of(name: bytes) -> bytes:
    """The name of the states of recurrent layers right after a page: an end without tokens."""
    return _digest(name + b"state")
