"""The layer that predicts the token after next: its logits, and answers drafted by it."""

import copy

import gguf
import kit_models
import numpy as np
import pytest
from kit_models import specs, token_ids, write_kit_model

from tamis.engine import drafting
from tamis.engine.drafting import Drafting, NextDraft
from tamis.engine.engine import Engine
from tamis.formats.gguf import GGUFFile
from tamis.sampling.chain import SamplerParams

NAMES = ["glm4moe-moe", "qwen35-dense", "deepseek2-moe"]
N = 64  # tokens


def next_tensors(n):
    """Those that such a layer has beside a usual one's, of n elements a row."""
    norms = [[f"nextn.{name}.weight", [n], 0] for name in ("enorm", "hnorm", "shared_head_norm")]
    return [["nextn.eh_proj.weight", [2 * n, n], 0], *norms]


def with_next(name):
    """The spec of a model with one more layer, like its last one with attention; and its number."""
    spec = copy.deepcopy(specs()[name])
    kv, arch = spec["kv"], spec["arch"]
    il, n = kv[f"{arch}.block_count"][1], kv[f"{arch}.embedding_length"][1]
    like = (
        max(i for i in range(il) if f"blk.{i}.attn_k_norm.weight" in names(spec))
        if (arch == "qwen35")
        else il - 1
    )
    begin = f"blk.{like}."
    own = [[t[0].removeprefix(begin), *t[1:]] for t in spec["tensors"] if t[0].startswith(begin)]
    spec["tensors"] += [[f"blk.{il}.{t[0]}", *t[1:]] for t in own + next_tensors(n)]
    kv[f"{arch}.block_count"][1] = il + 1
    kv[f"{arch}.nextn_predict_layers"] = [[4], 1]
    return spec, il


def names(spec):
    return [tensor[0] for tensor in spec["tensors"]]


@pytest.fixture(scope="module", params=NAMES)
def model(request, tmp_path_factory):
    spec, il = with_next(request.param)
    folder = tmp_path_factory.mktemp("next")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kit_models, "specs", lambda: {"next": spec})
        path = write_kit_model("next", folder / "m.gguf")
    with Engine.load(path, n_threads=1) as engine:
        yield request.param, spec, il, engine


def alone(path, spec, il, rows):
    """A model of that layer alone, whose token i has an embedding that is row i."""
    arch, begin = spec["arch"], f"blk.{il}."
    writer = gguf.GGUFWriter(path, arch)
    changed = {f"{arch}.block_count": [[4], 1], f"{arch}.nextn_predict_layers": [[4], 0]}
    if arch == "qwen35":
        changed[f"{arch}.full_attention_interval"] = [[4], 1]
        changed.pop(f"{arch}.attention.recurrent_layers", None)
    for key, (types, value) in (spec["kv"] | changed).items():
        if key == f"{arch}.attention.recurrent_layers":
            continue
        element = gguf.GGUFValueType(types[1]) if len(types) == 2 else None
        writer.add_key_value(key, value, gguf.GGUFValueType(types[0]), element)
    kit_models._write_vocab(writer, len(rows))
    for name, shape, _ in spec["tensors"]:
        if name.startswith(begin) and ".nextn." not in name:
            writer.add_tensor(name.replace(begin, "blk.0."), kit_models._values(name, shape))
        elif not name.startswith("blk.") and name not in (
            "token_embd.weight",
            "output_norm.weight",
        ):
            writer.add_tensor(name, kit_models._values(name, shape))
    writer.add_tensor("token_embd.weight", rows)
    norm = f"{begin}nextn.shared_head_norm.weight"
    writer.add_tensor("output_norm.weight", kit_models._values(norm, [rows.shape[1]]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def normed(x, w, eps):
    return x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + eps) * w


def test_its_logits_are_those_of_a_model_of_that_layer_alone(model, tmp_path):
    name, spec, il, engine = model
    ids = token_ids(name)[:N]
    hidden = np.concatenate(list(engine.session(n_ctx=128).hidden(ids)))[:-1].astype(np.float64)
    draft = NextDraft(engine, 128)
    draft._rows[: N - 1] = hidden
    found = np.concatenate(list(draft._session.logits(ids[1:])))
    values = {t: kit_models._values(t, shape).astype(np.float64) for t, shape, _ in spec["tensors"]}
    own = {t.split("nextn.")[1]: v for t, v in values.items() if f"blk.{il}.nextn." in t}
    embedded = values["token_embd.weight"][ids[1:]]
    eps = engine.hp.rms_eps
    both = [
        normed(embedded, own["enorm.weight"], eps),
        normed(hidden, own["hnorm.weight"], eps),
    ]
    rows = np.zeros_like(values["token_embd.weight"], np.float32)
    rows[: N - 1] = np.concatenate(both, axis=1) @ own["eh_proj.weight"].T
    with Engine.load(alone(tmp_path / "a.gguf", spec, il, rows), n_threads=1) as other:
        expected = np.concatenate(list(other.session(n_ctx=128).logits(range(N - 1))))
    error = np.square(found - expected).mean(axis=1) / np.square(expected).mean(axis=1)
    assert np.median(error) < 1e-6
    assert (error > 1e-4).sum() <= (N // 4 if name.endswith("-moe") else 0)  # equal experts


def test_an_answer_drafted_by_it_is_the_one_without(model, monkeypatch):
    name, _, _, engine = model
    monkeypatch.setattr(drafting, "LEAST", 0.0)
    ids = token_ids(name)[:20]

    def answer(writer):
        greedy = SamplerParams(temp=0)
        return [piece.token_id for piece in writer.generate(ids, greedy, max_tokens=20)]

    with engine.session(n_ctx=128, n_ubatch=16) as session:
        plain = answer(session)
        session.truncate(0)
        writer = Drafting(session, NextDraft(engine, 128), 3)
        assert answer(writer) == plain
        assert writer.n_drafted > 0
        held = session.tokens
        first = writer._draft.propose(held, 3)
        again = NextDraft(engine, 128)  # which reads all at once what the other read in pieces
        session.truncate(0)
        again.saw(0, np.concatenate(list(session.hidden(held))))
        assert again.propose(held, 3) == first


def test_a_file_without_such_a_layer_is_refused(tmp_path):
    path = write_kit_model("glm4moe-moe", tmp_path / "m.gguf")
    with Engine.load(path, n_threads=1) as engine, pytest.raises(ValueError, match="no layer that"):
        NextDraft(engine, 64)
    assert GGUFFile(path).metadata["glm4moe.nextn_predict_layers"] == 0
