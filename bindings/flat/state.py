"""Functions of saved states: a context's sequences as bytes or as a file.

A state is: MAGIC · version and header size, u32 · header (JSON: the caller's tokens, and the
sequences with their bytes) · each sequence as Session.save writes it · SHA-256 of all that
precedes. Files are written whole or not at all; a state that does not fit changes nothing.
"""

import hashlib
import json
import struct
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tamis.bindings.flat.buffers import as_array, as_int, as_text
from tamis.bindings.flat.context import Context, using
from tamis.bindings.flat.status import invalid, returns
from tamis.engine.session import Session, SessionFileError
from tamis.platform.private_files import write_whole

MAGIC, VERSION = b"TAMISCTX", 1
DIGEST_BYTES = 32


class State(NamedTuple):
    """A state that was read and checked."""

    tokens: list[int]
    sequences: dict[int, bytes]


def session_bytes(session: Session) -> bytes:
    """The bytes that Session.save writes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session"
        session.save(path)
        return path.read_bytes()


def load_session(session: Session, data: bytes) -> None:
    """Replace a session by the result of `session_bytes`. Raises what Session.load raises."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session"
        path.write_bytes(data)
        session.load(path)


def pack(context: Context, seqs: Iterable[int], tokens: list[int]) -> bytes:
    """The state of these sequences as bytes. Raises Refusal if one has a gap."""
    seqs = list(seqs)
    for seq in seqs:
        context.check_whole(seq)
    parts = {seq: session_bytes(context.session(seq)) for seq in seqs}
    sizes = [[seq, len(part)] for seq, part in parts.items()]
    header = json.dumps({"tokens": tokens, "sequences": sizes}).encode()
    body = b"".join(
        (MAGIC, struct.pack("<II", VERSION, len(header)), header, *parts.values()),
    )
    return body + hashlib.sha256(body).digest()


def unpack(data: bytes) -> State:
    """Read a state. Raises SessionFileError if it is damaged or of another version."""
    body, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if body[:8] != MAGIC or hashlib.sha256(body).digest() != digest:
        raise SessionFileError("this is no state of a context, or it is damaged")
    version, size = struct.unpack_from("<II", body, 8)
    if version != VERSION:
        raise SessionFileError(f"the state has version {version}, this program reads {VERSION}")
    header, at, sequences = json.loads(body[16 : 16 + size]), 16 + size, {}
    for seq, n in header["sequences"]:
        sequences[int(seq)] = body[at : at + n]
        at += n
    return State(header["tokens"], sequences)


def restore(context: Context, state: State, to: int | None = None) -> None:
    """Replace all sequences by the state's.

    With `to`, only that one, by the state's only sequence.
    """
    sequences = state.sequences
    if to is not None:
        if len(sequences) != 1:
            invalid(f"the state has {len(sequences)} sequences, expected one")
        sequences = {to: next(iter(sequences.values()))}
    if max(sequences, default=0) >= context.n_seq_max:
        invalid(f"the state has sequence {max(sequences)}, n_seq_max is {context.n_seq_max}")
    new = {}
    for seq, data in sequences.items():
        new[seq] = context.new_session()
        load_session(new[seq], data)
    if to is None:
        context.sessions, context.gaps = new, {}
    else:
        context.sessions |= new
        context.gaps.pop(to, None)
    context.drop_outputs()


def _all(context: Context) -> list[int]:
    return [seq for seq in sorted(context.sessions) if context.n_past(seq)]


def _put(data: bytes, dst: Any, size: Any) -> int:
    room = as_int(size, "size", 0, 1 << 62)
    if room < len(data):
        invalid(f"dst has room for {room} bytes, the state has {len(data)}")
    as_array(dst, np.uint8, "dst", len(data), write=True)[:] = np.frombuffer(data, np.uint8)
    return len(data)


def _read(src: Any, size: Any) -> State:
    return unpack(as_array(src, np.uint8, "src", as_int(size, "size", 0, 1 << 62)).tobytes())


def _tokens(tokens: Any, n: Any) -> list[int]:
    n = as_int(n, "n_token_count", 0)
    return as_array(tokens, np.int32, "tokens", n).tolist() if n else []


def _tokens_out(state: State, tokens: Any, capacity: Any, count: Any) -> Callable[[], None]:
    """A function that writes the state's tokens to the caller's buffers, which are checked here."""
    n = len(state.tokens)
    if n > as_int(capacity, "n_token_capacity", 0, 1 << 62):
        invalid(f"tokens_out has room for {capacity} tokens, the state has {n}")
    target = as_array(tokens, np.int32, "tokens_out", n, write=True) if n else None
    counted = as_array(count, np.uint64, "n_token_count_out", 1, write=True)

    def put() -> None:
        counted[0] = n
        if target is not None:
            target[:] = state.tokens

    return put


def _write(path: Any, data: bytes) -> int:
    target = Path(as_text(path, "path"))
    with write_whole(target) as file:
        file.write(data)
    return len(data)


@returns(0)
def llama_state_get_size(ctx: int) -> int:
    """The bytes of the state of all sequences; it takes as long as writing the state."""
    with using(ctx) as context:
        return len(pack(context, _all(context), []))


@returns(0)
def llama_state_get_data(ctx: int, dst: Any, size: int) -> int:
    """Write the state of all sequences; returns its bytes, or 0 if there is no room."""
    with using(ctx) as context:
        return _put(pack(context, _all(context), []), dst, size)


@returns(0)
def llama_state_set_data(ctx: int, src: Any, size: int) -> int:
    """Replace all sequences by a state; returns the bytes read, or 0 if it does not fit."""
    with using(ctx) as context:
        restore(context, _read(src, size))
        return int(size)


@returns(False)
def llama_state_save_file(ctx: int, path_session: Any, tokens: Any, n_token_count: int) -> bool:
    """Write a file with the state of all sequences and tokens of the caller's choice."""
    with using(ctx) as context:
        _write(path_session, pack(context, _all(context), _tokens(tokens, n_token_count)))
        return True


@returns(False)
def llama_state_load_file(
    ctx: int, path_session: Any, tokens_out: Any, n_token_capacity: int, n_token_count_out: Any
) -> bool:
    """Replace all sequences by those of a file; tokens saved with it are written to tokens_out.

    n_token_count_out: a buffer of one size_t.
    """
    with using(ctx) as context:
        state = unpack(Path(as_text(path_session, "path_session")).read_bytes())
        put = _tokens_out(state, tokens_out, n_token_capacity, n_token_count_out)
        restore(context, state)
        put()
        return True


@returns(0)
def llama_state_seq_get_size(ctx: int, seq_id: int) -> int:
    """The bytes of the state of one sequence; it takes as long as writing the state."""
    with using(ctx) as context:
        return len(pack(context, [context.seq_id(seq_id)], []))


@returns(0)
def llama_state_seq_get_data(ctx: int, dst: Any, size: int, seq_id: int) -> int:
    """Write the state of one sequence; returns its bytes, or 0 if there is no room."""
    with using(ctx) as context:
        return _put(pack(context, [context.seq_id(seq_id)], []), dst, size)


@returns(0)
def llama_state_seq_set_data(ctx: int, src: Any, size: int, dest_seq_id: int) -> int:
    """Replace a sequence by a state of one; returns the bytes read, or 0 if it does not fit."""
    with using(ctx) as context:
        restore(context, _read(src, size), context.seq_id(dest_seq_id))
        return int(size)


@returns(0)
def llama_state_seq_save_file(
    ctx: int, filepath: Any, seq_id: int, tokens: Any, n_token_count: int
) -> int:
    """Write a file with the state of one sequence and the caller's tokens.

    Returns its bytes, or 0.
    """
    with using(ctx) as context:
        data = pack(context, [context.seq_id(seq_id)], _tokens(tokens, n_token_count))
        return _write(filepath, data)


@returns(0)
def llama_state_seq_load_file(
    ctx: int,
    filepath: Any,
    dest_seq_id: int,
    tokens_out: Any,
    n_token_capacity: int,
    n_token_count_out: Any,
) -> int:
    """Replace a sequence by a file's, as llama_state_load_file does.

    Returns the file's bytes, or 0.
    """
    with using(ctx) as context:
        data = Path(as_text(filepath, "filepath")).read_bytes()
        state = unpack(data)
        put = _tokens_out(state, tokens_out, n_token_capacity, n_token_count_out)
        restore(context, state, context.seq_id(dest_seq_id))
        put()
        return len(data)


def _check_flags(flags: Any) -> None:
    if as_int(flags, "flags", 0, (1 << 31) - 1):
        invalid(f"flags is {flags}, expected 0: states are whole")


@returns(0)
def llama_state_seq_get_size_ext(ctx: int, seq_id: int, flags: int) -> int:
    """Do what llama_state_seq_get_size does; flags must be 0."""
    _check_flags(flags)
    return llama_state_seq_get_size(ctx, seq_id)


@returns(0)
def llama_state_seq_get_data_ext(ctx: int, dst: Any, size: int, seq_id: int, flags: int) -> int:
    """Do what llama_state_seq_get_data does; flags must be 0."""
    _check_flags(flags)
    return llama_state_seq_get_data(ctx, dst, size, seq_id)


@returns(0)
def llama_state_seq_set_data_ext(
    ctx: int, src: Any, size: int, dest_seq_id: int, flags: int
) -> int:
    """Do what llama_state_seq_set_data does; flags must be 0."""
    _check_flags(flags)
    return llama_state_seq_set_data(ctx, src, size, dest_seq_id)
