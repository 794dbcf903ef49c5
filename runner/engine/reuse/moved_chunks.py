"""Reuse of what a session holds at other positions than a prompt has it (llama.cpp's cache reuse).

Keys are re-rotated exactly; they and the values stay what they were after the tokens that are gone,
so the answer is near that of a prompt that is read whole, not the same.
"""

from collections.abc import Sequence

import numpy as np

from tamis.engine.session import Session


def move_chunks(session: Session, ids: Sequence[int], first: int, least: int) -> int:
    """Move chunks of a prompt that a session holds further on down to their positions in it.

    first: the length of the common prefix. Tokens in between are removed. Chunks are of at least
    `least` tokens, the earliest first. Returns the number of the prompt's tokens that the session
    then begins with; what it holds after these is for the caller to truncate. Sessions with
    recurrent layers are left as they are. Raises KVFileError.
    """
    tokens, prompt = np.asarray(session.tokens, np.int64), np.asarray(ids, np.int64)
    if session.has_states or tokens.min(initial=0) < 0:  # pictures stay where they are
        return first
    while len(prompt) - first >= least:
        start = _found(tokens, prompt[first : first + least], first + 1)
        if start is None:
            break
        session.remove(first, start)
        tokens = np.concatenate([tokens[:first], tokens[start:]])
        n = min(len(tokens), len(prompt)) - first
        differs = np.flatnonzero(tokens[first : first + n] != prompt[first : first + n])
        first += int(differs[0]) if len(differs) else n
    return first


def _found(tokens: np.ndarray, wanted: np.ndarray, first: int) -> int | None:
    """The earliest position from `first` on at which tokens are the wanted ones."""
    if len(tokens) - first < len(wanted):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(tokens[first:], len(wanted))
    at = first + np.flatnonzero(windows[:, 0] == wanted[0])
    return next((int(i) for i in at if np.array_equal(tokens[i : i + len(wanted)], wanted)), None)
