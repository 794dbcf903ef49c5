"""Attention to a window of positions and to compressed entries (DeepSeek-V4).

A token has one row for all heads, which is its key and value. Each block of `ratio` positions has
an entry beside its last one: the mean of the block's rows, of a separate product, weighted by
gates. Blocks of 4 overlap: their entry also covers the rows of the block before, and an indexer
selects among them.
"""

from collections.abc import Mapping

import numpy as np

from tamis.graph.attention import append, norm_heads, record_norm_rope, rotated_by
from tamis.graph.context import Angles, Graph, Heads, Index
from tamis.graph.experts import products
from tamis.graph.linear import Product, Source, linear, linears
from tamis.graph.mixers.latent import every_head, rotary_part_first
from tamis.graph.norm import mapped, norm, ones
from tamis.graph.recurrent import Part, copied, normed_part, pooled, whole
from tamis.jit_kernels.contract import ops
from tamis.model.hparams import HParams
from tamis.model.weights import Tensor

# positions of a block that overlaps the one before; an indexer selects among such blocks
OVERLAPPING = 4


def compressed_tensors(hp: HParams) -> Mapping[str, tuple[int | str, ...]]:
    """Shapes of a layer's tensors."""
    c, n_embd, n_index = hp.compressed, hp.n_embd, hp.indexer.n_key
    n, n_entry = c.width, f"{c.width}|{2 * c.width}"
    every = "|".join(str(ratio) for ratio in sorted({*c.ratios, OVERLAPPING}) if ratio)
    return {
        "attn_sinks": (c.n_head,),
        "attn_q_a": (c.n_query, n_embd),
        "attn_q_a_norm": (c.n_query,),
        "attn_q_b": (c.n_head * n, c.n_query),
        "attn_kv": (n, n_embd),
        "attn_kv_a_norm": (n,),
        "attn_output_a": (
            f"{c.n_group}|1",
            f"{c.n_out}|{c.n_group * c.n_out}",
            c.n_head // c.n_group * n,
        ),
        "attn_output_b": (n_embd, c.n_group * c.n_out),
        "attn_compressor_kv": (n_entry, n_embd),
        "attn_compressor_gate": (n_entry, n_embd),
        "attn_compressor_ape": (every, n_entry),
        "attn_compressor_norm": (n,),
        "indexer_compressor_kv": (2 * n_index, n_embd),
        "indexer_compressor_gate": (2 * n_index, n_embd),
        "indexer_compressor_ape": (OVERLAPPING, 2 * n_index),
        "indexer_compressor_norm": (n_index,),
        "indexer.proj": (hp.indexer.n_head, n_embd),
        "indexer.attn_q_b": (hp.indexer.n_head * n_index, c.n_query),
    }


def compressed_attention(g: Graph, il: int, h: Source) -> Product:
    """Attention of the rows h to their windows, and to entries of earlier positions."""
    w, c, wide = g.weights(il), g.hp.compressed, g.hp.head_dim
    ratio, angles = c.ratios[il], g.angles(g.model.rope_of(il))
    inputs = [w.attn_q_a, w.attn_kv]
    inputs += [w.attn_compressor_kv, w.attn_compressor_gate] if ratio else []
    indexed = ratio == OVERLAPPING
    inputs += [w.indexer_compressor_kv, w.indexer_compressor_gate, w["indexer.proj"]] * indexed
    low, kv, *others = linears(g, h, *inputs)
    rows = norm(g, low, w.attn_q_a_norm)
    own, *index_q = linears(g, rows, w.attn_q_b, *[w["indexer.attn_q_b"]] * indexed)

    n_tok = len(own)
    norm_heads(g, own.reshape(n_tok, c.n_head, c.width), ones(c.width))
    q = g.ws.rows("q_entries", 2 * c.n_head * wide)  # once for windows, once for entries
    k = g.ws.rows("k_entries", 2 * wide)
    for part in range(2):
        rotary_part_first(
            g,
            Part(own, 0, c.width, c.n_head, c.width),
            Part(q, part * c.n_head * wide, c.width, c.n_head, wide),
        )
    normed_part(g, Part(kv, 0, c.width), w.attn_kv_a_norm, Part(kv, 0, c.width))
    rotary_part_first(g, whole(kv), Part(k, 0, c.width))
    index = None
    if ratio:
        names = w.attn_compressor_ape, w.attn_compressor_norm
        entries = _entries(g, il, "entries", others[0], others[1], *names)
        copied(g, whole(entries), Part(k, wide, c.width))
    if indexed:
        index = _index(g, il, index_q[0], others[2:], angles)

    queries, keys = (Heads(x.reshape(n_tok, -1, wide), angles=angles) for x in (q, k))
    finished = append(g, il, queries, keys, k, index)
    return _output(g, il, _attended(g, il, finished.x, angles))


def _index(g: Graph, il: int, q: np.ndarray, rows: list[np.ndarray], angles: Angles) -> Index:
    """The index's queries, its entries made of keys and gates, and its weights, all from `rows`."""
    w, n, n_head = g.weights(il), g.hp.indexer.n_key, g.hp.indexer.n_head
    ape, w_norm = w.indexer_compressor_ape, w.indexer_compressor_norm
    k = _entries(g, il, "index_entries", rows[0], rows[1], ape, w_norm)
    y = g.ws.rows("index_q", n * n_head)
    rotary_part_first(g, Part(q, 0, n, n_head, n), Part(y, 0, n, n_head, n))
    queries, keys = (Heads(x.reshape(len(x), -1, n), angles=angles) for x in (y, k))
    return Index(queries, keys, rows[2], g.ws.scratch, g.model.arch.index_neox)


def _attended(g: Graph, il: int, q: np.ndarray, angles: Angles) -> np.ndarray:
    """Attention of q, rotated back: the first half of f32 [n_tok, 2 * n_head, head_dim]."""
    c, wide = g.hp.compressed, g.hp.head_dim
    out, lse = g.ws.rows("att", *q.shape[1:]), g.ws.rows("lse", q.shape[1])
    g.hooks.attend(g, il, q, out, lse)
    back = mapped(g, angles.sin, g.ws.rows("sin.back", angles.sin.shape[1]), outer=-1.0)
    out = record_norm_rope(g, Heads(out, angles=Angles(angles.cos, back)))
    g.rec.program.transfer(g.rec.step, out, lse)
    g.hooks.attended(g, il)
    g.rec.program.add(
        ops.ATTEND_SINK,
        step=g.rec.step,
        sinks=g.weights(il).attn_sinks.vector(),
        lse=lse,
        out=out,
        n_head=c.n_head,
        head_dim=wide,
        n_part=2,
    )
    return out


def _output(g: Graph, il: int, out: np.ndarray) -> Product:
    """The output projection, which is one product per group of heads and then one of all."""
    w, c, n_rot = g.weights(il), g.hp.compressed, g.hp.n_rot
    n_tok, _, wide = out.shape
    flat, y = out.reshape(n_tok, -1), g.ws.rows("att_heads", c.n_head * c.width)
    n_plain, n = c.width - n_rot, c.n_head
    copied(g, Part(flat, n_rot, n_plain, n, wide), Part(y, 0, n_plain, n, c.width))
    copied(g, Part(flat, 0, n_rot, n, wide), Part(y, n_plain, n_rot, n, c.width))
    groups = every_head(n_tok, c.n_group)
    low = products(g, y.reshape(n_tok, c.n_group, -1), w.attn_output_a, groups, c.n_group)
    return linear(g, low.reshape(n_tok, -1), w.attn_output_b)


def _entries(
    g: Graph, il: int, name: str, kv: np.ndarray, gate: np.ndarray, ape: Tensor, w_norm: Tensor
) -> np.ndarray:
    """The entry of each complete block, at its last position; rotated elements come first.

    Their rotation is that of the block's first position.
    """
    n, ratio = len(w_norm.vector()), len(ape.vector())
    n_half = kv.shape[1] // n
    added = np.concatenate(np.split(ape.vector(), n_half, axis=1))  # [n_half * ratio, n]
    rows = pooled(g, il, f"{name}_pooled", kv, gate, np.ascontiguousarray(added), ratio)
    normed_part(g, Part(rows, 0, n), w_norm, Part(rows, 0, n))
    y = g.ws.rows(name, n)
    rotary_part_first(g, whole(rows), Part(y, 0, n))
    back = rotated_by(g.frequencies(g.model.rope_of(il)), len(y), 1 - ratio)
    return record_norm_rope(g, Heads(y.reshape(len(y), 1, n), angles=back)).reshape(len(y), n)
