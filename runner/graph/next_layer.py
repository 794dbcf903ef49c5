"""The layer that predicts the token after next (DeepSeek-V3, 2024, arXiv 2412.19437, 2.2)."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from tamis.formats.gguf import GGUFFile
from tamis.graph.context import Graph
from tamis.graph.device_graph import measure
from tamis.graph.layer import layer as usual_layer
from tamis.graph.linear import linear, stored
from tamis.graph.norm import norm, record_norm
from tamis.graph.recurrent import Part, copied, whole
from tamis.model.model import Model
from tamis.model.weights import MissingTensor, load_layer

HIDDEN = "next_hidden"  # the buffer of the output head's input for each token, f32 [n_embd]
NEXT_TENSORS = {
    "nextn.eh_proj": "n_embd 2*n_embd",
    "nextn.enorm": "n_embd",
    "nextn.hnorm": "n_embd",
    "nextn.embed_tokens": "n_vocab n_embd",
    "nextn.shared_head_head": "n_vocab n_embd",
    "nextn.shared_head_norm": "n_embd",
}


def next_model(file: GGUFFile, model: Model) -> Model:
    """A model of that layer alone, with the embeddings and the head of the file's model.

    At position i it reads token i + 1, and in the buffer HIDDEN the head's input for token i; its
    logits are for token i + 2. Raises ValueError for a file without such a layer.
    """
    hp, arch, main = model.hp, model.arch, model.weights
    il = hp.n_layer
    if f"blk.{il}.nextn.eh_proj.weight" not in file.tensors:
        raise ValueError(
            "this file has no layer that predicts further tokens (MTP): draft in another way"
        )
    shape = replace(hp, recurrent=(), swa_layers=(0,) if hp.swa_layers else ())
    tensors = dict(arch.tensors(hp) if arch.tensors else {}) | NEXT_TENSORS
    own = load_layer(file, shape, il, tensors, arch.unread)
    embed, head, head_norm = (
        own[f"nextn.{name}"] for name in ("embed_tokens", "shared_head_head", "shared_head_norm")
    )
    weights = replace(
        main,
        token_embd=embed or main.token_embd,
        output=head or main.output,
        output_norm=head_norm or main.output_norm,
        blk=(own,),
    )
    clamps = {name: getattr(hp, name)[-1:] for name in ("clamp_experts", "clamp_shared")}
    found = replace(
        model,
        hp=replace(shape, n_layer=1, layers=(), nope_layers=(), n_layer_kv=0, **clamps),
        arch=replace(arch, layer=partial(_record, arch.layer or usual_layer)),
        weights=weights,
    )
    try:
        return replace(found, needs=measure(found))
    except MissingTensor as error:
        raise file.error("the tensor is missing", key=str(error)) from None


def _record(layer: Callable[[Graph, int], None], g: Graph, il: int) -> None:
    """Record the layer over the product of both its inputs, each normed."""
    w, n = g.weights(il), g.hp.n_embd
    both, one = g.ws.rows("next_both", 2 * n), g.ws.rows("next_normed", n)
    record_norm(g, norm(g, g.x, w["nextn.enorm"]), one)
    copied(g, whole(one), Part(both, 0, n))
    record_norm(g, norm(g, g.ws.rows(HIDDEN, n), w["nextn.hnorm"]), one)
    copied(g, whole(one), Part(both, n, n))
    stored(g, linear(g, both, w["nextn.eh_proj"]), g.x)
    layer(g, il)
