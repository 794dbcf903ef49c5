"""MiniLM's converter: a small model's rows against BERT in NumPy float64."""

import json
import struct

import numpy as np
import pytest
from oracle import gelu_exact, layer_norm, softmax

from tamis.engine.engine import Engine
from tamis.fetch.minilm import EPS, N_HEAD, SPECIAL, convert

N_EMBD, N_FF, N_LAYER, N_CTX = 16 * N_HEAD, 64, 2, 32
WORDS = [*SPECIAL, "hello", "world", "##s", "!", "ab", "##c"]


def shapes():
    """The tensors of the source by name, as PyTorch has them."""
    norm = {"weight": (N_EMBD,), "bias": (N_EMBD,)}
    found = {
        "embeddings.word_embeddings.weight": (len(WORDS), N_EMBD),
        "embeddings.position_embeddings.weight": (N_CTX, N_EMBD),
        "embeddings.token_type_embeddings.weight": (2, N_EMBD),
        "pooler.dense.weight": (N_EMBD, N_EMBD),
    }
    modules = {"embeddings.LayerNorm": norm}
    square = {"weight": (N_EMBD, N_EMBD), "bias": (N_EMBD,)}
    for i in range(N_LAYER):
        at = f"encoder.layer.{i}."
        modules |= {f"{at}attention.self.{x}": square for x in ("query", "key", "value")}
        modules |= {f"{at}attention.output.dense": square, f"{at}output.LayerNorm": norm}
        modules |= {f"{at}attention.output.LayerNorm": norm}
        modules[f"{at}intermediate.dense"] = {"weight": (N_FF, N_EMBD), "bias": (N_FF,)}
        modules[f"{at}output.dense"] = {"weight": (N_EMBD, N_FF), "bias": (N_EMBD,)}
    for module, parts in modules.items():
        found |= {f"{module}.{kind}": shape for kind, shape in parts.items()}
    return found


def write_source(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, x in tensors.items():
        header[name] = {"dtype": "F32", "shape": x.shape, "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    data = b"".join(x.tobytes() for x in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data + "\n".join(WORDS).encode())


def bert(w, ids):
    """Rows f64 [n, n_embd] of the last layer."""
    n = len(ids)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], EPS)

    x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][:n]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(N_LAYER):
        at = f"encoder.layer.{i}."
        q, k, v = (
            linear(x, f"{at}attention.self.{part}").reshape(n, N_HEAD, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        mixed = softmax(q @ k.swapaxes(1, 2) / 4) @ v  # heads have 16 elements
        mixed = linear(mixed.swapaxes(0, 1).reshape(n, -1), f"{at}attention.output.dense")
        x = norm(x + mixed, f"{at}attention.output.LayerNorm")
        hidden = gelu_exact(linear(x, f"{at}intermediate.dense"))
        x = norm(x + linear(hidden, f"{at}output.dense"), f"{at}output.LayerNorm")
    return x


@pytest.mark.slow
def test_a_converted_model_is_bert(tmp_path):
    rng = np.random.default_rng(1)
    tensors = {
        name: (rng.standard_normal(shape) / shape[-1] ** 0.5 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes().items()
    }
    write_source(tmp_path / "source", tensors)
    convert(tmp_path / "source", tmp_path / "m.gguf")
    engine = Engine.load(tmp_path / "m.gguf", n_threads=2)
    ids = engine.tokenizer.encode("Hello worlds! abc")
    assert [WORDS[i] for i in ids] == ["[CLS]", "hello", "world", "##s", "!", "ab", "##c", "[SEP]"]
    found = np.concatenate(list(engine.session().hidden(ids)))
    engine.close()
    expected = bert({name: x.astype(np.float64) for name, x in tensors.items()}, ids)
    # K and V are float16.
    np.testing.assert_allclose(found, expected, rtol=0, atol=4e-3)
    assert np.abs(found - expected).mean() < 4e-4
