"""What a layer reads late is what it was when it was taken, or an error that names the lines."""

import inspect
import re

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

import tamis.arch.llama as llama
from tamis.engine.engine import Engine
from tamis.graph.attention import append, attention, rope
from tamis.graph.linear import linear, linears
from tamis.graph.mlp import mlp
from tamis.graph.norm import add, mapped, norm
from tamis.graph.recurrent import gated, whole
from tamis.jit_kernels.contract.values import StaleValueError
from tamis.model.arch import Arch

IDS = [5, 9, 3, 7, 11, 2]


def _queries(g, il, h, w):
    q, k, v = linears(g, h, w.attn_q, w.attn_k, w.attn_v)
    return append(g, il, rope(g, il, q, w.attn_q_norm), rope(g, il, k, w.attn_k_norm), v)


def _attention(g, il, h, w):
    return linear(g, attention(g, il, _queries(g, il, h, w)), w.attn_output)


def parallel(g, il):
    """A parallel layer in the order that records: each norm is read before g.x changes."""
    w = g.weights(il)
    att = _attention(g, il, norm(g, g.x, w.attn_norm), w)
    out = mlp(g, norm(g, g.x, w.ffn_norm), w)
    add(g, att)
    add(g, out)


def norms_first(g, il):
    w = g.weights(il)
    h, f = norm(g, g.x, w.attn_norm), norm(g, g.x, w.ffn_norm)  # taken
    add(g, _attention(g, il, h, w))  # overwritten
    add(g, mlp(g, f, w))  # read


def residual_kept(g, il):
    w = g.weights(il)
    x = g.x  # taken
    add(g, _attention(g, il, norm(g, x, w.attn_norm), w))  # overwritten
    add(g, mlp(g, norm(g, x, w.ffn_norm), w))  # read


def raw_queries_after_append(g, il):
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    q, k, v = linears(g, h, w.attn_q, w.attn_k, w.attn_v)  # taken
    queries, keys = rope(g, il, q, w.attn_q_norm), rope(g, il, k, w.attn_k_norm)
    finished = append(g, il, queries, keys, v)  # overwritten
    out = attention(g, il, finished)
    add(g, linear(g, gated(g, "gated", whole(q), "silu", whole(out)), w.attn_output))  # read
    add(g, mlp(g, norm(g, g.x, w.ffn_norm), w))


def queries_changed_after_rope(g, il):
    w = g.weights(il)
    q, k, v = linears(g, norm(g, g.x, w.attn_norm), w.attn_q, w.attn_k, w.attn_v)
    queries, keys = rope(g, il, q, w.attn_q_norm), rope(g, il, k, w.attn_k_norm)  # taken
    mapped(g, q, q, "clamp")  # overwritten
    finished = append(g, il, queries, keys, v)  # read
    add(g, linear(g, attention(g, il, finished), w.attn_output))


def one_matrix_twice(g, il):
    w = g.weights(il)
    (first,) = linears(g, norm(g, g.x, w.attn_norm), w.ffn_up)  # taken
    (second,) = linears(g, norm(g, g.x, w.ffn_norm), w.ffn_up)  # overwritten
    add(g, linear(g, gated(g, "gated", whole(second), "silu", whole(first)), w.ffn_down))  # read


def one_buffer_twice(g, il):
    w = g.weights(il)
    gate, up = linears(g, norm(g, g.x, w.ffn_norm), w.ffn_gate, w.ffn_up)
    first = gated(g, "gated", whole(gate), "silu", whole(up))  # taken
    second = gated(g, "gated", whole(up), "silu", whole(gate))  # overwritten
    add(g, linear(g, second, w.ffn_down))
    add(g, linear(g, first, w.ffn_down))  # read


def source_changed_in_place(g, il):
    w = g.weights(il)
    (up,) = linears(g, norm(g, g.x, w.ffn_norm), w.ffn_up)
    out = linear(g, up, w.ffn_down)  # taken
    mapped(g, up, up, "silu")  # overwritten
    add(g, out)  # read


def attention_twice(g, il):
    w = g.weights(il)
    h = norm(g, g.x, w.attn_norm)
    first = _attention(g, il, h, w)  # taken
    second = _attention(g, il, h, w)  # overwritten
    add(g, second)
    add(g, first)  # read


STALE = [
    norms_first,
    residual_kept,
    raw_queries_after_append,
    queries_changed_after_rope,
    one_matrix_twice,
    one_buffer_twice,
    source_changed_in_place,
    attention_twice,
]


def raw_queries(g, il):
    w = g.weights(il)
    q, k, v = linears(g, norm(g, g.x, w.attn_norm), w.attn_q, w.attn_k, w.attn_v)
    out = attention(g, il, q)  # read
    append(g, il, rope(g, il, q, w.attn_q_norm), rope(g, il, k, w.attn_k_norm), v)
    add(g, linear(g, out, w.attn_output))


def heads_before_append(g, il):
    w = g.weights(il)
    q, k, v = linears(g, norm(g, g.x, w.attn_norm), w.attn_q, w.attn_k, w.attn_v)
    queries, keys = rope(g, il, q, w.attn_q_norm), rope(g, il, k, w.attn_k_norm)
    out = attention(g, il, queries)  # read
    append(g, il, queries, keys, v)
    add(g, linear(g, out, w.attn_output))


def another_layers_queries(g, il):
    w = g.weights(il)
    finished = _queries(g, il, norm(g, g.x, w.attn_norm), w)
    add(g, linear(g, attention(g, il + 1, finished), w.attn_output))  # read


@pytest.fixture
def load(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    write_tiny_model(path, TinySpec("llama", layers=2))

    def load(layer):
        monkeypatch.setattr(llama, "ARCH", Arch(neox=False, layer=layer))
        return Engine.load(path, n_threads=1)

    return load


def _line(layer, mark):
    """A line of this file as errors name it: the one of a layer with this comment."""
    lines, first = inspect.getsourcelines(layer)
    (at,) = [i for i, line in enumerate(lines, first) if line.rstrip().endswith(f"# {mark}")]
    return rf"test_values\.py:{at}\b"


@pytest.mark.parametrize("layer", STALE, ids=lambda layer: layer.__name__)
def test_a_value_that_was_overwritten_is_an_error_that_names_three_lines(load, layer):
    with pytest.raises(StaleValueError) as caught:
        load(layer)
    read, taken, overwritten = (_line(layer, m) for m in ("read", "taken", "overwritten"))
    assert re.match(
        rf"{read}.* reads \S+ as it was at {taken}.*, but \S+ overwrote it at {overwritten}",
        str(caught.value),
    )


@pytest.mark.parametrize("layer", [raw_queries, heads_before_append], ids=lambda f: f.__name__)
def test_attention_takes_only_what_append_returned(load, layer):
    with pytest.raises(TypeError, match=rf"^{_line(layer, 'read')}: attention takes the queries"):
        load(layer)


def test_attention_takes_only_queries_of_its_layer(load):
    with pytest.raises(ValueError, match=_line(another_layers_queries, "read")):
        load(another_layers_queries)


def test_a_helpers_line_follows_its_layers(load):
    def layer(g, il):
        w = g.weights(il)
        h = norm(g, g.x, w.attn_norm)
        add(g, linear(g, attention(g, il, _queries(g, il, h, w)), w.attn_output))
        _late(g, h, w)  # layer

    lines = rf"^{_line(layer, 'layer')} > {_line(_late, 'read')}:"
    with pytest.raises(StaleValueError, match=lines):
        load(layer)


def _late(g, h, w):
    linears(g, h, w.ffn_up)  # read


def test_the_order_that_records_gives_the_parallel_layer(load):
    """Logits of both branches over the same rows do not depend on what is recorded in between."""

    def with_one_norm_more(g, il):
        w = g.weights(il)
        h = norm(g, g.x, w.attn_norm)
        out = mlp(g, norm(g, g.x, w.ffn_norm), w)
        att = _attention(g, il, h, w)
        add(g, att)
        add(g, out)

    found = []
    for layer in (parallel, with_one_norm_more):
        with load(layer) as engine, engine.session(n_ctx=64) as session:
            found.append(session.prefill(IDS))
    np.testing.assert_array_equal(*found)
