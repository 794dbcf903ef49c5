"""A cache of prompts beyond the sessions that read them: in RAM, and in files that outlive it.

What is kept is pages of 64 tokens by hash. The hash of a page covers the hash of the one before it,
and the first one's what keys depend on beside tokens: weights, adapters, KV types, methods, device
and the caller's scope. So a prefix that conversations share is kept once, files of several
processes and models lie in one folder, and a look-up needs no list: page after page is there or
not. After the last whole page of a sequence comes its *end*: the tokens since, their page, and the
states of recurrent layers, which a sequence with such layers can go on from only there.

What goes first where there is no room: each page is due at the time at which a conversation that
has it was last used, later by a second for each token of that conversation, of a day's at most. A
conversation's pages are due together, its last pages first. So conversations go as a whole, the one
unused longest first; and one that is n tokens longer than others stays while they go in the n
seconds after its use, however many they are: reading it again would take longer.
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

LONGEST = 86400  # tokens: longer conversations are due as if they had so many
PAGE_SECONDS = 1e-3  # that a page is due before the one ahead of it
RUN = 64  # pages that are copied at once
ROOM = 16  # where RAM is full, a part of it this small is emptied
VERSION = 1  # of what the hashes cover, and of the pages
_NONE, _NO_TOKENS = np.zeros(0, np.uint8), np.zeros(0, np.int32)


class _Found(NamedTuple):
    """What is kept of a prompt: whole pages, and an end where `end` is one."""

    names: list[bytes]
    end: Record | None
    n_tokens: int


class PromptCache:
    """Keeps what sessions hold, and appends it to sessions that begin alike.

    Its calls are of one thread, which owns the sessions. A failure of the disk, or too little
    memory, is a page that is not there.
    """

    def __init__(self, n_ram: int, files: PageFiles | None = None, salt: str = "") -> None:
        """n_ram: bytes that may be kept in RAM; files: where all that is kept is written to.

        salt: what keys depend on beside what a session knows of itself.
        """
        self.n_ram, self._files, self._salt = n_ram, files, salt
        self._records: dict[bytes, Record] = {}
        self._due: dict[bytes, float] = {}
        self._identities: WeakKeyDictionary[Session, bytes] = WeakKeyDictionary()
        self.ram_bytes = 0  # kept in RAM
        self.n_kept = self.n_restored = 0  # bytes that were taken from sessions, and given to them
        self.n_hits = self.n_restored_tokens = 0
        self.n_ram_evicted = 0  # records

    @staticmethod
    def open(
        n_ram: int, folder: str | Path | None = None, n_disk: int = 0, salt: str = ""
    ) -> "PromptCache":
        """A cache of n_ram bytes, and of n_disk bytes of files in a folder where one is named.

        Raises OSError for a folder that cannot be made, or that others may change.
        """
        files = None if folder is None else PageFiles(Path(folder), n_disk)
        return PromptCache(n_ram, files, salt)

    @property
    def disk_bytes(self) -> int:
        """Bytes in the folder, as far as they are known."""
        return 0 if self._files is None else self._files.held

    @property
    def n_evicted(self) -> int:
        """Records that had no room: those in RAM, where there are no files, or else files."""
        return self.n_ram_evicted if self._files is None else self._files.n_evicted

    @property
    def n_failed(self) -> int:
        """Files that could not be written, or were damaged."""
        return 0 if self._files is None else self._files.n_failed

    def keep(self, session: Session, scope: str = "") -> None:
        """Keep what a session holds, as far as it is not kept. Raises KVFileError, MemoryError."""
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
        """Append what is kept of a prompt, which begins with what a session holds, to the session.

        Never the prompt's last token, whose logits are needed, and nothing where it is fewer than
        `least` tokens. Returns how many tokens the session holds then. Raises KVFileError where its
        own KV cache is in a file that fails.
        """
        held, tokens = session.n_past, np.asarray(ids, np.int32)
        root, states = self._root(session, scope), session.has_states
        found = self._find(root, tokens[:-1] if states else tokens, states=states)
        n_tokens = min(found.n_tokens, session.n_ctx, len(tokens) - 1)
        if n_tokens < held + least:
            return held
        # To truncate recurrent layers computes tokens again, but for all.
        first = 0 if session.has_states else held // PAGE
        records = self._read(found, first, -(-n_tokens // PAGE))
        n_tokens = min(n_tokens, (first + len(records)) * PAGE)
        state = None
        if session.has_states:
            if n_tokens < found.n_tokens or found.end is None:
                return held
            state = found.end.state.view(np.float32)
        if n_tokens < held + least:
            return held
        session.truncate(first * PAGE)
        try:
            pages = [record.data for record in records]
            session.append_pages(tokens[first * PAGE : n_tokens].tolist(), pages, state)
        except KVFileError:
            raise
        except (ValueError, MemoryError, OutOfPagesError):  # what a file has does not fit
            return session.n_past
        self.n_hits += 1
        self.n_restored += sum(map(len, pages))
        self.n_restored_tokens += n_tokens - held
        now = time.time()
        for i, name in enumerate(found.names):
            self._touch(name, _due(now, len(tokens), i))
        self._make_room()
        return n_tokens

    def evict(self, session: Session, scope: str = "") -> None:
        """Drop what is kept of a session's sequence; others read again what they share of it."""
        root = self._root(session, scope)
        names = _chain(root, np.asarray(session.tokens, np.int32))
        nodes = [root, *names]
        for name in [*names, *map(_end_of, nodes), *map(_state_of, nodes)]:
            self._drop(name)
            if self._files is not None:
                self._files.remove(name)

    def close(self, seconds: float = 10.0) -> None:
        """Wait for files to be written, for some seconds."""
        if self._files is not None:
            self._files.close(seconds)

    # --- records by their names ------------------------------------------------------------------

    def _root(self, session: Session, scope: str) -> bytes:
        """What the first page's hash covers beside its tokens."""
        if session not in self._identities:
            self._identities[session] = session.identity
        text = json.dumps([VERSION, self._salt, scope]).encode()
        return _digest(self._identities[session] + text)

    def _find(self, root: bytes, tokens: np.ndarray, *, states: bool) -> _Found:
        """What is kept of a prompt; with states only up to an end, as a state is needed there."""
        names = []
        for name in _chain(root, tokens):
            if not self._has(name):
                break
            names.append(name)
        nodes = [root, *names]
        if not states:
            end = self._get(_end_of(nodes[-1]))
            n = 0 if end is None else _n_same(end.tokens, tokens[len(names) * PAGE :])
            return _Found(names, end, len(names) * PAGE + n)
        for n in range(len(names), -1, -1):
            rest: np.ndarray = tokens[n * PAGE :]
            for name in (_end_of(nodes[n]), _state_of(nodes[n])):
                end = self._get(name)
                if end is not None and _n_same(end.tokens, rest) == len(end.tokens):
                    return _Found(names[:n], end, n * PAGE + len(end.tokens))
        return _Found(names, None, 0)

    def _read(self, found: _Found, first: int, n_page: int) -> list[Record]:
        """The records of pages first .. n_page - 1, as far as they can be read."""
        records: list[Record] = []
        for i in range(first, n_page):
            record = self._get(found.names[i]) if i < len(found.names) else found.end
            if record is None or (records and len(record.data) != len(records[0].data)):
                break
            records.append(record)
        return records

    def _has(self, name: bytes) -> bool:
        return name in self._records or (self._files is not None and self._files.has(name))

    def _get(self, name: bytes) -> Record | None:
        """A record; one that was in a file is in RAM then."""
        found = self._records.get(name)
        if found is None and self._files is not None:
            found = self._files.read(name)
            if found is not None:
                self._hold(name, found, time.time())
        return found

    def _add(self, name: bytes, record: Record, due: float) -> None:
        self.n_kept += record.n_byte
        self._hold(name, record, due)
        if self._files is not None:
            self._files.write(name, record, due)

    def _hold(self, name: bytes, record: Record, due: float) -> None:
        """Have a record in RAM, as long as there is room."""
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
        """Drop a record of RAM, if it is there."""
        if (found := self._records.pop(name, None)) is not None:
            del self._due[name]
            self.ram_bytes -= found.n_byte

    def _make_room(self) -> None:
        """Drop the records of RAM that are due first where there are too many bytes."""
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
        """Keep the end of a sequence's first tokens. nodes: the names of pages, after the root."""
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
    """When a page of a conversation of n_tokens tokens that is used now is due."""
    return now + min(n_tokens, LONGEST) - PAGE_SECONDS * page


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


def _chain(root: bytes, tokens: np.ndarray) -> list[bytes]:
    """The names of the whole pages of a sequence."""
    found, name = [], root
    for first in range(0, len(tokens) - PAGE + 1, PAGE):
        name = _digest(name + tokens[first : first + PAGE].tobytes())
        found.append(name)
    return found


def _n_same(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences begin with alike."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def _end_of(name: bytes) -> bytes:
    """The name of the remainder of a sequence after a page."""
    return _digest(name + b"end")


def _state_of(name: bytes) -> bytes:
    """The name of the states of recurrent layers right after a page: an end without tokens."""
    return _digest(name + b"state")
