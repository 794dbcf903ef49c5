"""Make a long saved session out of a short one: its tokens over and over, at fresh positions.

Methods are compared at contexts that would take hours to read: keys and values of a real text are
repeated, the keys turned by the model's rotary frequencies to where they now stand. What attends
to them is no language model any more, so this is for speed and for audits of one step, not for
perplexity.

    python -m tamis.tools.tile_session -m MODEL -n 131072 short.session long.session
"""

import argparse

import numpy as np

from tamis import models
from tamis.engine import Engine
from tamis.rope import RopeFrequencies
from tamis.session import Session


def turned(k: np.ndarray, rope: RopeFrequencies, n_tokens: int, *, neox: bool) -> np.ndarray:
    """Keys f16 [n, n_head_kv, head_dim], turned as if they stood n_tokens later.

    neox: whether pairs are (i, i + n_rot / 2) or (2i, 2i + 1), see ROPE_APPEND.
    """
    n_half = len(rope.inv_freq)
    first = slice(0, n_half) if neox else slice(0, 2 * n_half, 2)
    second = slice(n_half, 2 * n_half) if neox else slice(1, 2 * n_half, 2)
    cos, sin = np.cos(n_tokens * rope.inv_freq), np.sin(n_tokens * rope.inv_freq)
    out, x, y = k.copy(), k[..., first].astype(np.float64), k[..., second].astype(np.float64)
    out[..., first], out[..., second] = x * cos - y * sin, x * sin + y * cos
    return out


def tile(session: Session, n_tokens: int) -> None:
    """Repeat what `session` holds until it holds n_tokens."""
    model, kv, n_held = session._engine.model, session._kv, session.n_past
    starts = range(0, n_tokens, n_held)
    for layer in range(model.hp.n_layer):
        k, v = kv.read(layer, n_held)
        rope = model.rope_window if model.window(layer) else model.rope
        keys = [turned(k, rope, start, neox=model.arch.neox) for start in starts]
        values = [v] * len(starts)
        kv.write(layer, np.concatenate(keys)[:n_tokens], np.concatenate(values)[:n_tokens])
    session._tokens = (session.tokens * len(starts))[:n_tokens]


def main() -> None:
    """Read the arguments, make the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="path or name; see tamis models")
    parser.add_argument("-n", "--n-tokens", type=int, required=True)
    parser.add_argument("short")
    parser.add_argument("long")
    arguments = parser.parse_args()
    session = Engine.load(models.resolve(arguments.model)).session(n_ctx=arguments.n_tokens)
    session.load(arguments.short)
    tile(session, arguments.n_tokens)
    session.save(arguments.long)


if __name__ == "__main__":
    main()
