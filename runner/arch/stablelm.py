"""StableLM: LayerNorm; the parts are parallel if there is no second norm."""

from collections.abc import Mapping

from tamis.graph.context import Graph
from tamis.graph.layer import layer as one_by_one
from tamis.graph.layer import parallel
from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def layer(g: Graph, il: int) -> None:
    """Record layer il, which adds to g.x."""
    (one_by_one if g.weights(il).ffn_norm else parallel)(g, il)


def tensors(hp: HParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of a layer's tensors."""
    return {
        "attn_q_norm": (hp.n_head, hp.head_dim),
        "attn_k_norm": (hp.n_head_kv, hp.head_dim),
    }


ARCH = Arch(neox=True, norm="layer", layer=layer, tensors=tensors)
