"""LFM2: gated short convolutions, with attention in some layers."""

from collections.abc import Mapping

from tamis.graph.context import Graph
from tamis.graph.layer import feed_forward, self_attention
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.norm import add, norm
from tamis.graph.recurrent import Part, convolved, gated, whole
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    add(g, gated_conv(g, il, h) if il in g.hp.recurrent else self_attention(g, il, h))
    add(g, feed_forward(g, il, norm(g, g.x, w.ffn_norm)))


def gated_conv(g: Graph, il: int, h: Source) -> Product:
    """Record C * conv(B * x), where B, C and x are parts of one product of the rows h."""
    w, n = g.weights(il), g.hp.n_embd
    (bcx,) = linears(g, h, w["shortconv.in_proj"])
    product = gated(g, "bx", Part(bcx, 0, n), "none", Part(bcx, 2 * n, n))
    out = convolved(g, il, whole(product), w["shortconv.conv"], activation="none")
    return linear(g, gated(g, "bx", Part(bcx, n, n), "none", whole(out)), w["shortconv.out_proj"])


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    return {
        "shortconv.in_proj": (3 * hp.n_embd, hp.n_embd),
        "shortconv.conv": (hp.n_embd, hp.ssm.n_tap),
        "shortconv.out_proj": (hp.n_embd, hp.n_embd),
    }


# A sliding window in the file holds for all attention layers.
ARCH = Arch(neox=True, layer=layer, tensors=tensors, full_attention_every=1 << 20)
