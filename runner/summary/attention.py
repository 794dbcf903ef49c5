"""How much an answer's tokens attend to the passages that support it: evidence by attention.

The answer is decoded once more, token by token, with dense attention whose weights are summed over
the tokens of each passage. That takes NumPy on the CPU and float16 keys in memory.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from tamis.select.in_numpy import NumpySelector
from tamis.summary.words import Span

if TYPE_CHECKING:
    from tamis.engine.engine import Engine
    from tamis.engine.session import Session
    from tamis.text.tokenizer import Tokenizer


class Attention(TypedDict):
    """Dense attention of an answer's tokens to a passage, of weights that sum to 1 over all tokens.

    mass: the mean over answer tokens, layers and heads; even: what it would be if all tokens had
    equal weight; layer, head: those with the largest mean mass, head_mass.
    """

    mass: float
    even: float
    layer: int
    head: int
    head_mass: float


class _Weights:
    """Sums attention's weights over spans of tokens, for each call: a layer of a decode step."""

    def __init__(self, spans: Sequence[range], scale: float) -> None:
        self._spans, self._scale = spans, scale
        self.sums: list[np.ndarray] = []  # f32 [n_head, n_span] each
        self.n_kv: list[int] = []

    def __call__(self, q: np.ndarray, k: np.ndarray) -> np.ndarray:
        n_kv, n_head_kv, _ = k.shape
        grouped = q.reshape(n_head_kv, -1, q.shape[-1])  # [n_head_kv, group, head_dim]
        scores = self._scale * np.einsum("hgd,nhd->hgn", grouped, k, optimize=True)
        weights = np.exp(scores - scores.max(-1, keepdims=True)).reshape(len(q), n_kv)
        weights /= weights.sum(-1, keepdims=True)
        sums = [weights[:, each.start : each.stop].sum(-1) for each in self._spans]
        self.sums.append(np.stack(sums, -1))
        self.n_kv.append(n_kv)
        return np.arange(n_kv)


def attention(
    engine: "Engine", held: "Session", tokens: Sequence[int], spans: Sequence[range]
) -> list[Attention]:
    """The attention of an answer's tokens to each span of positions before them.

    held: a session that holds the prompt but its last token, which stays as it is. tokens: that one
    and those of the answer but its last, the queries from which the answer was chosen. Raises
    ValueError for keys that NumPy cannot read.
    """
    weights = _Weights(spans, engine.hp.scale)
    n_ctx = held.n_past + len(tokens)
    with engine.session(n_ctx=n_ctx, attn=NumpySelector(weights)) as probe:
        probe.copy(held)
        for token in tokens:
            probe.decode(token)
    layers = [i for i in engine.model.kv_layers if not engine.model.window(i)]
    sums = np.stack(weights.sums).reshape(len(tokens), len(layers), -1, len(spans)).mean(0)
    n_kv = np.mean(weights.n_kv)
    found = []
    for i, span in enumerate(spans):
        layer, head = np.unravel_index(sums[..., i].argmax(), sums.shape[:2])
        found.append(
            Attention(
                mass=round(float(sums[..., i].mean()), 5),
                even=round(float(len(span) / n_kv), 5),
                layer=layers[int(layer)],
                head=int(head),
                head_mass=round(float(sums[layer, head, i]), 4),
            )
        )
    return found


def positions(
    tokenizer: "Tokenizer", ids: Sequence[int], text: str, spans: Sequence[Span]
) -> list[range] | None:
    """The positions in a prompt `ids` of characters of a text in it.

    None if the prompt does not spell the text, as where a tokenizer changes it.
    """
    pieces = [tokenizer.piece(i, special=True) for i in ids]
    ends = np.cumsum([len(piece) for piece in pieces])
    first = b"".join(pieces).find(text.encode())
    if first < 0:
        return None
    found = []
    for span in spans:
        start = first + len(text[: span.start].encode())
        end = start + len(text[span.start : span.end].encode())
        low = int(np.searchsorted(ends, start, side="right"))
        found.append(range(low, int(np.searchsorted(ends, end, side="left")) + 1))
    return found
