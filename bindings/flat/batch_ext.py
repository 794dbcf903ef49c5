"""llama.h's extended batches: tokens are added one by one, each with the outputs asked of it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from tamis.bindings.flat.buffers import as_array, as_int
from tamis.bindings.flat.constants import LLAMA_PROCESS_TYPE_DECODE
from tamis.bindings.flat.context import Context, using
from tamis.bindings.flat.handles import TABLE
from tamis.bindings.flat.params import LLAMA_TOKEN_NULL, llama_batch
from tamis.bindings.flat.status import LLAMA_OK, LLAMA_UNSUPPORTED, Refusal, invalid, returns

# what the functions that add a token return instead of an index
FULL, NO_TOKEN, NO_SEQUENCE = -1, -2, -3


class Entry:
    """A token: its sequences, its position (None: not set yet), whether its logits are wanted."""

    def __init__(self, token: int, seq: int) -> None:
        self.token, self.seqs, self.wanted = token, [seq], False
        self.pos: int | None = None


class BatchExt:
    """The tokens of one llama_process."""

    def __init__(self, context: Context) -> None:
        self.n_most, self.n_seq_max = context.n_batch, context.n_seq_max
        self.n_vocab = context.model.engine.hp.n_vocab
        self.entries: list[Entry] = []

    def as_batch(self) -> llama_batch:
        """The batch as llama_decode takes it. Raises Refusal if something is missing."""
        for i, entry in enumerate(self.entries):
            if entry.token == LLAMA_TOKEN_NULL or entry.pos is None:
                invalid(f"entry {i} has no {'position' if entry.pos is None else 'token'}")
        return llama_batch(
            n_tokens=len(self.entries),
            token=np.array([e.token for e in self.entries], np.int32),
            pos=np.array([e.pos for e in self.entries], np.int32),
            n_seq_id=np.array([len(e.seqs) for e in self.entries], np.int32),
            seq_id=[np.array(e.seqs, np.int32) for e in self.entries],
            logits=np.array([e.wanted for e in self.entries], np.int8),
        )


@returns(0)
def llama_batch_ext_init(ctx: int) -> int:
    """An empty batch of a context."""
    with using(ctx) as context:
        return TABLE.add(BatchExt(context))


@returns()
def llama_batch_ext_free(batch: int) -> int:
    """Free a batch."""
    TABLE.remove(batch, BatchExt)
    return LLAMA_OK


@returns()
def llama_batch_ext_clear(batch: int) -> int:
    """Clear the tokens of a batch."""
    TABLE.get(batch, BatchExt).entries.clear()
    return LLAMA_OK


@returns(NO_TOKEN)
def llama_batch_ext_add(batch: int, seq_id: int) -> int:
    """Add an entry without a token. It is of use with input embeddings only, which are refused."""
    return _add(batch, seq_id, LLAMA_TOKEN_NULL)


@returns(NO_TOKEN)
def llama_batch_ext_add_token(batch: int, seq_id: int, id: int) -> int:
    """Add a token; its index. -1: the batch is full, -2: no such token, -3: no such sequence."""
    as_int(id, "id", 0, TABLE.get(batch, BatchExt).n_vocab - 1)
    return _add(batch, seq_id, id)


@returns(NO_TOKEN)
def llama_batch_ext_add_embd(batch: int, seq_id: int, embd: Any) -> int:
    """Always -2: input embeddings are not supported."""
    raise Refusal(LLAMA_UNSUPPORTED, "input embeddings are not supported")


def _add(batch: int, seq_id: int, token: int) -> int:
    found = TABLE.get(batch, BatchExt)
    if len(found.entries) >= found.n_most:
        return FULL
    if not isinstance(seq_id, int) or not 0 <= seq_id < found.n_seq_max:
        return NO_SEQUENCE
    found.entries.append(Entry(token, seq_id))
    return len(found.entries) - 1


def _set(batch: int, idx: int, change: Callable[[BatchExt, Entry], None]) -> bool:
    found = TABLE.get(batch, BatchExt)
    change(found, found.entries[as_int(idx, "idx", 0, len(found.entries) - 1)])
    return True


@returns(False)
def llama_batch_ext_add_seq(batch: int, idx: int, seq_id: int) -> bool:
    """Add a token to another sequence, too, at the same position."""

    def change(found: BatchExt, entry: Entry) -> None:
        entry.seqs.append(as_int(seq_id, "seq_id", 0, found.n_seq_max - 1))

    return _set(batch, idx, change)


@returns(False)
def llama_batch_ext_set_pos(batch: int, idx: int, pos: Any) -> bool:
    """Set a token's position; pos: a buffer of one element."""
    value = int(as_array(pos, np.int32, "pos", 1)[0])

    def change(found: BatchExt, entry: Entry) -> None:
        entry.pos = value

    return _set(batch, idx, change)


@returns(False)
def llama_batch_ext_set_output_logits(batch: int, idx: int, value: bool) -> bool:
    """Set whether a token's output is wanted."""

    def change(found: BatchExt, entry: Entry) -> None:
        entry.wanted = bool(value)

    return _set(batch, idx, change)


llama_batch_ext_set_output_embd = llama_batch_ext_set_output_logits


@returns(False)
def llama_batch_ext_set_embd_token(batch: int, idx: int, embd: Any) -> bool:
    """False: input embeddings are not supported."""
    raise Refusal(LLAMA_UNSUPPORTED, "input embeddings are not supported")


@returns(False)
def llama_batch_ext_set_embd_state(batch: int, idx: int, embd: Any) -> bool:
    """False: hidden states of another stage are not supported."""
    raise Refusal(LLAMA_UNSUPPORTED, "hidden states of another stage are not supported")


@returns()
def llama_process(ctx: int, type: int, batch: int) -> int:
    """Run a batch's tokens, as llama_decode does; type must be LLAMA_PROCESS_TYPE_DECODE."""
    if type != LLAMA_PROCESS_TYPE_DECODE:
        raise Refusal(LLAMA_UNSUPPORTED, "no architecture here has an encoder beside a decoder")
    found = TABLE.get(batch, BatchExt)
    with using(ctx) as context:
        context.decode(found.as_batch())
    return LLAMA_OK
