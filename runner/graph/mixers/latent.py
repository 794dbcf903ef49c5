"""Multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434, 2.1), absorbed.

A token has one row for all heads: a rotated key, then a latent from which K and V are made. One
matrix per head maps queries to the latent space, and another one maps attention's output back.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from tamis.graph.attention import append, attention
from tamis.graph.context import Graph, Heads, Index
from tamis.graph.experts import products
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.norm import norm, record_layer_norm
from tamis.graph.recurrent import Part, copied, gated, normed_part, pooled
from tamis.model.hparams import HParams


def latent_tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    """Shapes of a layer's tensors."""
    n, n_embd, n_head = hp.latent, hp.n_embd, hp.n_head
    n_plain = n.n_key - hp.n_rot
    return {
        "attn_q": (n_head * n.n_key, n_embd),
        "attn_q_a": (n.n_query, n_embd),
        "attn_q_a_norm": (n.n_query,),
        "attn_q_b": (n_head * n.n_key, n.n_query),
        "attn_kv_a_mqa": (n.n_latent + hp.n_rot, n_embd),
        "attn_kv_a_norm": (n.n_latent,),
        "attn_k_b": (n_head, n.n_latent, n_plain),
        "attn_v_b": (n_head, n.n_value, n.n_latent),
        "attn_kv_b": (n_head * (n_plain + n.n_value), n.n_latent),  # in one matrix, in older files
        "attn_output": (n_embd, n_head * n.n_value),
        "attn_gate": (f"{n_head}|{n_head * n.n_value}", n_embd),  # for each head, or each element
        "attn_k_norm": (hp.n_rot,),  # of the rotated key
        "indexer.attn_q_b": (hp.indexer.n_head * hp.indexer.n_key, n.n_query),
        "indexer.attn_k": (hp.indexer.n_key, n_embd),
        "indexer.k_norm": (hp.indexer.n_key,),
        "indexer.proj": (hp.indexer.n_head, n_embd),
        "indexer_compressor_gate": (hp.indexer.n_key, n_embd),
        "indexer_compressor_ape": (hp.indexer.block, hp.indexer.n_key),
    }


def key_scaled(hp: HParams) -> dict[str, Any]:
    """Fields of HParams: the scale of scores, with YaRN's factor if it is used."""
    return {"attention_scale": hp.latent.n_key**-0.5}


def yarn_scaled(hp: HParams) -> dict[str, Any]:
    """Fields of HParams: the scale of scores, and that of cosines if YaRN stretches positions."""
    scaling, scale, stretch = hp.rope_scaling, hp.latent.n_key**-0.5, hp.rope_scaling.attn_factor
    is_yarn = scaling.kind == "yarn" and scaling.ext_factor != 0
    log = 0.1 * math.log(max(scaling.factor, 1.0) if is_yarn else scaling.factor)
    own = 1.0 + log  # YaRN's own factor of cosines
    scores = 1.0 + 10.0 * hp.yarn_log * log
    if not is_yarn or not hp.yarn_log:
        # A linear scale multiplies no cosine, but scores as YaRN's does: so does llama.cpp.
        return {"attention_scale": scale * (stretch * own * scores) ** 2}
    of_cosines = 1.0 if hp.arch == "deepseek2" else own / scores
    return {
        "attention_scale": scale * (stretch * of_cosines * scores) ** 2,
        "rope_scaling": replace(scaling, attn_factor=stretch * of_cosines / own),
    }


def latent_attention(g: Graph, il: int, h: Source) -> Product:
    """Latent attention of the rows h."""
    return linear(g, latent_attended(g, il, h), g.weights(il).attn_output)


def gated_latent_attention(g: Graph, il: int, h: Source) -> Product:
    """Do what latent_attention does; its output is multiplied by the sigmoid of a gate.

    The gate is per element or per head.
    """
    w, n_head, n = g.weights(il), g.hp.n_head, g.hp.latent.n_value
    (gate,) = linears(g, h, w.attn_gate)
    out, each = latent_attended(g, il, h), gate.shape[1] // n_head
    gates, heads = Part(gate, 0, each, n_head, each), Part(out, 0, n, n_head, n)
    return linear(g, gated(g, "gated_att", gates, "sigmoid", heads), w.attn_output)


def latent_attended(g: Graph, il: int, h: Source) -> np.ndarray:
    """The output of latent attention before its projection, f32 [n_tok, n_head * n_value]."""
    w, n_head, n_rot, width = g.weights(il), g.hp.n_head, g.hp.n_rot, g.hp.head_dim
    n_latent, n_key = g.hp.latent.n_latent, g.hp.latent.n_key
    index = None
    if w["indexer.proj"] and g.hp.indexer.top_k:
        low, kv, k, weights = linears(
            g, h, w.attn_q_a, w.attn_kv_a_mqa, w["indexer.attn_k"], w["indexer.proj"]
        )
        rows = norm(g, low, w.attn_q_a_norm)
        own, q = linears(g, rows, w.attn_q_b, w["indexer.attn_q_b"])
        gates = linears(g, h, w.indexer_compressor_gate) if g.hp.indexer.block > 1 else [None]
        index = _index(g, il, q, k, weights, gates[0])
    elif w.attn_q_a:
        low, kv = linears(g, h, w.attn_q_a, w.attn_kv_a_mqa)
        (own,) = linears(g, norm(g, low, w.attn_q_a_norm), w.attn_q_b)
    else:
        own, kv = linears(g, h, w.attn_q, w.attn_kv_a_mqa)
    heads = every_head(len(own), n_head)

    if n_key > n_rot:
        plain = gated(g, "q_plain", Part(own, 0, n_key - n_rot, n_head, n_key), "none")
        plain = plain.reshape(len(own), n_head, -1)
        absorbed = products(g, plain, w.attn_k_b, heads, n_head)
    else:
        absorbed = np.zeros((len(own), n_head, n_latent), np.float32)
    q = g.ws.rows("q_latent", n_head * width)
    if n_rot:
        copied(g, Part(own, n_key - n_rot, n_rot, n_head, n_key), Part(q, 0, n_rot, n_head, width))
    copied(
        g, Part(absorbed, 0, n_latent, n_head, n_latent), Part(q, n_rot, n_latent, n_head, width)
    )

    k = g.ws.rows("k_latent", width)
    if w.attn_k_norm:
        normed_part(g, Part(kv, n_latent, n_rot), w.attn_k_norm, Part(k, 0, n_rot))
    elif n_rot:
        copied(g, Part(kv, n_latent, n_rot), Part(k, 0, n_rot))
    normed_part(g, Part(kv, 0, n_latent), w.attn_kv_a_norm, Part(k, n_rot, n_latent))

    angles = None if g.model.is_nope(il) else g.angles(g.model.rope_of(il))
    queries, keys = (Heads(x.reshape(len(x), -1, width), angles=angles) for x in (q, k))
    queries = replace(queries, scaled=g.hp.temperature[0] > 0)
    finished = append(g, il, queries, keys, k, index)
    out = attention(g, il, finished, w.attn_sinks)
    back = gated(g, "att_latent", Part(out, n_rot, n_latent, n_head, width), "none")
    values = products(g, back.reshape(len(back), n_head, -1), w.attn_v_b, heads, n_head)
    return values.reshape(len(values), -1)


def _index(
    g: Graph, il: int, q: np.ndarray, k: np.ndarray, weights: np.ndarray, gate: np.ndarray | None
) -> Index:
    """An indexer's queries, its normed keys, and its weights, with the rotation they need.

    gate: of keys that are pooled, f32 like k.
    """
    n_key, w = g.hp.indexer.n_key, g.weights(il)["indexer.k_norm"]
    record_layer_norm(g, k, k, w.vector(), w.bias(), eps=g.hp.index_eps)
    if gate is not None:
        ape = g.weights(il).indexer_compressor_ape.vector()
        k = pooled(g, il, "index_pooled", k, gate, ape, len(ape))
    if g.hp.index_last:
        q, k = (_rotary_first(g, name, x) for name, x in (("index_q", q), ("index_k", k)))
    angles = None if g.model.is_nope(il) else g.angles(g.model.rope_of(il))
    queries, keys = (Heads(x.reshape(len(x), -1, n_key), angles=angles) for x in (q, k))
    return Index(queries, keys, weights, g.ws.scratch, g.model.arch.index_neox)


def _rotary_first(g: Graph, name: str, x: np.ndarray) -> np.ndarray:
    n, y = g.hp.indexer.n_key, g.ws.rows(name, x.shape[1])
    n_head = x.shape[1] // n
    rotary_part_first(g, Part(x, 0, n, n_head, n), Part(y, 0, n, n_head, n))
    return y


def rotary_part_first(g: Graph, x: Part, y: Part) -> None:
    """Record a copy y of the heads x in which the last n_rot elements, the rotary part, come first.

    A Part x or y has a run for each head.
    """
    n_rot, n_plain = g.hp.n_rot, x.n - g.hp.n_rot
    for of_x, of_y, n in ((n_plain, 0, n_rot), (0, n_rot, n_plain)):
        copied(g, x._replace(first=x.first + of_x, n=n), y._replace(first=y.first + of_y, n=n))


@cache
def every_head(n_tok: int, n_head: int) -> np.ndarray:
    """Return all heads for each token, as `products` takes them: int32 [n_tok, n_head]."""
    return np.tile(np.arange(n_head, dtype=np.int32), (n_tok, 1))
