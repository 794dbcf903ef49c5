"""The divergence of next-token distributions that types of the KV cache cause.

    python -m tamis.tools.kv_divergence -m MODEL [-n 1024] [--text FILE]

KL to those of an f16 cache, in nats, of all tokens of a text but its first; all are read with
14-bit activations, whose rounding is far below that of the types. The text is Python's help by
default.
"""

import argparse
import pydoc_data.topics
from pathlib import Path

import numpy as np

from tamis.engine.engine import Engine
from tamis.fetch import registry

FIRST = 32  # tokens that are not counted
TYPES = (("q8_0", "q8_0"), ("q4_0", "q4_0"), ("q4_0", "f16"), ("f16", "q4_0"))


def log_probabilities(engine: Engine, ids: list[int], type_k: str, type_v: str) -> np.ndarray:
    """Of all tokens from FIRST on, float32 [n, n_vocab]."""
    session = engine.session(n_ctx=len(ids), n_ubatch=64, type_k=type_k, type_v=type_v)
    session.prefill(ids[:FIRST])
    rows = np.concatenate([rows.copy() for rows in session.logits(ids[FIRST:])])
    rows -= rows.max(-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(-1, keepdims=True))
    session.close()
    return rows


def main() -> None:
    """Print a line for each pair of types."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-n", "--n-tokens", type=int, default=1024)
    parser.add_argument("--text", type=Path)
    arguments = parser.parse_args()
    topics = pydoc_data.topics.topics
    text = arguments.text.read_text() if arguments.text else "".join(list(topics.values())[5:25])
    engine = Engine.load(registry.resolve(arguments.model), precision="exact")
    ids = engine.encode(text)[: arguments.n_tokens]
    true = log_probabilities(engine, ids, "f16", "f16")
    for type_k, type_v in TYPES:
        found = log_probabilities(engine, ids, type_k, type_v)
        kl = np.array(
            [float((np.exp(a) * (a - b)).sum()) for a, b in zip(true, found, strict=True)]
        )
        same = float((true.argmax(-1) == found.argmax(-1)).mean())
        median, p95 = np.percentile(kl, [50, 95])
        print(
            f"{type_k}/{type_v}: mean KL {kl.mean():.5f}, median {median:.5f}, p95 {p95:.4f}, "
            f"most {kl.max():.3f}, same top token {same:.3f}, of {len(kl)} tokens"
        )
    engine.close()


if __name__ == "__main__":
    main()
