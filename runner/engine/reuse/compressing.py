"""Compression of a session's KV cache by KVzip: the keys that reconstruct the text stay.

What remains is moved together: kept keys are re-rotated exactly, by as many positions as are gone,
so that later tokens see them at their distances. See select/kvzip.py for what is kept.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tamis.engine.session import Session
from tamis.select.kvzip import KVzip, LastPrompt, chosen, importance

if TYPE_CHECKING:
    from tamis.engine.engine import Engine

REPEAT = "\n\nRepeat the text above word for word."
REPEAT_FROM = "\n\nRepeat the text above word for word, from the part that begins with: "
LONGEST = 256  # tokens of the request to repeat, with the template's


def compress(
    engine: "Engine",
    session: Session,
    how: KVzip,
    told: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Compress all that a session holds; returns the number of positions that it then has.

    Its tokens are then those of `stand_ins`, below 0: no text has them. told(done, total): is
    called with tokens repeated so far; what it raises ends this and leaves the session as it was.
    Raises ValueError for a model or a session that cannot be compressed, MemoryError, KVFileError.
    """
    session.check_compressible()
    tokens = session.tokens
    n_kept = how.n_kept(len(tokens))
    if n_kept == len(tokens):
        return n_kept
    scores = _scores(engine, session, how, told)
    session.compact([None if of is None else chosen(how, of, n_kept) for of in scores], n_kept)
    session.rename(stand_ins(tokens, how))
    return n_kept


def stand_ins(tokens: Sequence[int], how: KVzip) -> list[int]:
    """The tokens of what is kept of a text: negative numbers, other ones for every text."""
    n_kept = how.n_kept(len(tokens))
    if n_kept == len(tokens):
        return list(tokens)
    seed = np.asarray(tokens, np.int32).tobytes() + repr(how).encode()
    data = hashlib.shake_128(seed).digest(4 * n_kept)
    return (-1 - (np.frombuffer(data, np.int32) & 0x3FFFFFFF)).tolist()


def _scores(
    engine: "Engine", session: Session, how: KVzip, told: Callable[[int, int], None]
) -> list[np.ndarray | None]:
    """The importance of each layer's keys, f32 [n_head_kv, n]; None for layers with a window."""
    n, tokens = session.n_past, session.tokens
    model, end = engine.model, _end_of_message(engine)
    layers = model.kv_layers
    found: list[np.ndarray | None] = [
        None if model.window(layer) else np.empty((engine.hp.n_head_kv, n), np.float32)
        for layer in layers
    ]
    longest = how.chunk + LONGEST
    types, n_ubatch = session.kv_types, session.n_ubatch
    with engine.session(
        n_ctx=n + longest,
        n_ubatch=n_ubatch,
        prefill=LastPrompt(longest),
        type_k=types.k,
        type_v=types.v,
    ) as probe:
        probe.copy(session)
        for first in range(0, n, how.chunk):
            chunk = tokens[first : first + how.chunk]
            asked = _request(engine, tokens[max(0, first - how.hint) : first], end)
            probe.prefill([*asked, *chunk])
            for i, layer in enumerate(layers):
                if (of := found[i]) is not None:
                    own = probe.keys(i, n, probe.n_past)
                    keys = probe.keys(i, first, first + len(chunk))
                    sinks = probe.keys(i, 0, min(how.sink, first))
                    q = probe.noted_queries(layer, n, probe.n_past)
                    found_here = importance(q, keys, own, sinks, engine.hp.scale)
                    of[:, first : first + len(chunk)] = found_here
            probe.truncate(n)
            told(first + len(chunk), n)
    return found


def _request(engine: "Engine", before: Sequence[int], end: Sequence[int]) -> list[int]:
    """The tokens that ask for the text from a part on; before: the tokens before that part."""
    encode = engine.tokenizer.encode
    if not before:
        return [*encode(REPEAT, add_special=False), *end]
    return [*encode(REPEAT_FROM, add_special=False), *before, *end]


def _end_of_message(engine: "Engine") -> list[int]:
    """The template's tokens between a user's message and the answer; a line feed without one."""
    try:
        a, b = (engine.encode_chat([{"role": "user", "content": text}]) for text in ("a", "b"))
    except ValueError:
        return engine.tokenizer.encode("\n", add_special=False)
    n = next((i for i, (x, y) in enumerate(_from_end(a, b)) if x != y), min(len(a), len(b)))
    return a[len(a) - n :]


def _from_end(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(reversed(a), reversed(b), strict=False)
