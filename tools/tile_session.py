"""Make a long saved session out of a short one: its tokens repeated, at new positions.

Methods are compared at contexts that would take hours to read: the KV cache of a real text is
repeated, its keys re-rotated by the model's RoPE frequencies to their new positions. The result is
not a language model's context any more, so this is for speed and for audits of one step, not for
perplexity.

    python -m tamis.tools.tile_session -m MODEL -n 131072 short.session long.session
"""

import argparse

import numpy as np

from tamis.engine.engine import Engine
from tamis.engine.session import Session
from tamis.fetch import registry as models
from tamis.kv.rerotate import Pairs


def tile(session: Session, n_tokens: int) -> None:
    """Repeat the tokens of `session` until it holds n_tokens."""
    model, kv, n_held = session._loaded.model, session._kv, session.n_past
    starts = range(0, n_tokens, n_held)
    for layer in range(model.hp.n_layer):
        k, v = kv.read(layer, n_held)
        basis = session._bases.get(layer)
        pairs = Pairs(model.frequencies(layer).inv_freq, model.arch.neox, basis)
        keys = [pairs.moved(k, start, kv.types.k) for start in starts]
        values = [v] * len(starts)
        kv.write(layer, np.concatenate(keys)[:n_tokens], np.concatenate(values)[:n_tokens])
    session._tokens = (session.tokens * len(starts))[:n_tokens]


def main() -> None:
    """Read the arguments and write the file."""
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
