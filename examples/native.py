"""The native API: load, chat, stream, compare methods on one prefill, audit, export what was read.

usage: python examples/native.py [MODEL]
"""

import sys

import numpy as np

from tamis import Engine, NumpySelector, SamplerParams
from tamis.fetch import registry


def best_half(q: np.ndarray, k: np.ndarray) -> list[np.ndarray]:
    """Of each KV head the keys with the largest scores of its query heads, half of all."""
    heads = q.reshape(k.shape[1], -1, k.shape[2])  # [n_head_kv, group, head_dim]
    scores = np.einsum("hgd,nhd->hgn", heads, k).max(1)
    return [np.argsort(row)[-max(1, len(row) // 2) :] for row in scores]


def main() -> None:
    """Answer a question, then decode 16 tokens with three methods from the same prompt."""
    with Engine.load(sys.argv[1] if sys.argv[1:] else registry.pull("smollm2")) as engine:
        prompt = engine.encode_chat([{"role": "user", "content": "Name three rivers. " * 20}])
        with engine.session(n_ctx=2048) as session:
            for piece in session.generate(prompt, SamplerParams(temp=0), max_tokens=24):
                print(piece.text, end="", flush=True)
            print()
        base = engine.session(n_ctx=2048)
        base.prefill(prompt)
        for method in ("dense", "tactic", NumpySelector(best_half)):
            with engine.session(n_ctx=2048, attn=method, audit=4) as session:
                session.copy(base)
                token = prompt[-1]
                for _ in range(16):
                    token = int(session.decode(token).argmax())
                read = session.selected(engine.hp.n_layer - 1)
                np.savez_compressed("selected.npz", mask=read.mask)
                mass = session.audit.total().mass
                name = method if isinstance(method, str) else "best_half"
                print(
                    f"{name:<10} retained mass {mass:.3f}, keys read {read.mask.sum(1).mean():.0f}"
                )


if __name__ == "__main__":
    main()
