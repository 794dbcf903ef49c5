"""Every architecture against llama.cpp's logits of a tiny random model, however it is run.

Each model is read whole and in one other way, which changes from model to model; `--whole-kit` runs
all five ways of each. `--device cuda` runs them on a GPU.
"""

import math

import kit_models
import pytest
from kit_models import golden, specs, token_ids, write_kit_model
from kit_runs import HOW, far_off, run

from tamis.arch.load import known, load_model
from tamis.engine.engine import Engine
from tamis.engine.session import ContextError
from tamis.formats.gguf import GGUFError, GGUFFile
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.select.notation import MethodError

REFUSED = {"refact-moe"}  # llama.cpp leaves its experts out: there are none such
# Of the positions of a block llama.cpp takes some: see a test of their own.
APART = {f"qwen4exp-blocks{top}-moe" for top in (8, 16, 32)}
NAMES = sorted(
    name
    for name, spec in specs().items()
    if spec["arch"] in known()
    and name not in REFUSED | APART
    and not spec.get("encoder")
    and not spec.get("pooling")
)
ENCODERS = sorted(name for name, spec in specs().items() if spec.get("encoder"))
POOLED = sorted(name for name, spec in specs().items() if spec.get("pooling"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Which models are run how."""
    if metafunc.function is not test_logits_are_llama_cpps:
        return
    every = metafunc.config.getoption("--whole-kit")
    pairs = [
        (name, how)
        for i, name in enumerate(NAMES)
        for how in (HOW if every else (HOW[0], HOW[1 + i % (len(HOW) - 1)]))
    ]
    metafunc.parametrize(("model", "how"), pairs, indirect=["model"], scope="module")


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("kit") / "m.gguf"
    device = request.config.getoption("--device")
    engine = Engine.load(write_kit_model(request.param, path), n_threads=2, device=device)
    yield request.param, engine
    engine.close()


@pytest.mark.slow
def test_logits_are_llama_cpps(model, how, tmp_path):
    name, engine = model
    found, expected = run(engine, token_ids(name), how, tmp_path), golden(name)
    # Of a batch the first twelve steps.
    expected = expected[40:52] if how == "batch" else expected[-len(found) :]
    # Two experts may be nearly equal: rounding then chooses, and later positions see it.
    bad = far_off(found, expected)
    assert bad.sum() <= (len(bad) // 2 if name.endswith("-moe") else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dense", "top", "n_same"),
    [
        ("deepseek32", 16, 16),
        ("deepseek4", 8, 35),  # entries of 4 positions
        ("qwen4exp", 16, 16),
        ("dots3note", 16, 16),
        ("glm-dsa", 16, 16),
        ("glm5-next", 16, 16),
        ("hy_v4", 16, 16),
        ("minimax-m3", 8, 32),  # blocks of 4 positions
    ],
)
def test_dense_attention_gives_other_logits_than_an_indexers_choice(dense, top, n_same, tmp_path):
    dense, name = f"{dense}-moe", f"{dense}-top{top}-moe"  # the first one's chooses everything
    engine = Engine.load(write_kit_model(dense, tmp_path / "m.gguf"), n_threads=2)
    found = run(engine, token_ids(name), "whole", tmp_path)
    engine.close()
    bad = far_off(found, golden(name))
    assert not bad[:n_same].any()  # while there are no more positions than are chosen
    assert bad[n_same:].sum() > len(bad) // 2


@pytest.mark.parametrize("name", ["deepseek32-top16-moe"])
def test_a_method_beside_an_indexer_is_refused(name, tmp_path):
    engine = Engine.load(write_kit_model(name, tmp_path / "m.gguf"), n_threads=1)
    with pytest.raises(MethodError, match="chooses the keys"):
        engine.session(n_ctx=128, attn="window:recent=16")
    with pytest.raises(ValueError, match="one latent"):
        engine.session(n_ctx=128, type_v="q8_0")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_has_no_meaning_is_refused_by_name(name, tmp_path):
    with pytest.raises(GGUFError, match="expert_count"):
        Engine.load(write_kit_model(name, tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama4-moe", "attention.sliding_window", 0),  # llama.cpp stops there
        ("dots3note-moe", "attention.kv_lora_rank_swa", 256),
        ("deepseek4-moe", "hash_layer_count", 1),
        ("deepseek4-moe", "attention.compress_ratios", [0, 0, 4, 64]),
        ("hrm_text-dense", "hrm.h_cycles", 1),
        ("minimax-m3-moe", "attention.indexer.head_count", 1),
        ("qwen4exp-moe", "ple.layers", [0, 1]),
        ("qwen4exp-moe", "ple.head_offsets", [0, 128, 256, 385]),
        ("qwen4exp-moe", "rope.dimension_sections", [8, 8, 8, 104]),
        ("glm5-next-moe", "attention.indexer.kpool_select_tail", False),
        ("qwen4exp-moe", "attention.indexer.top_k", 10),
        ("minimax-m3-moe", "attention.indexer.key_length", 40),
        # llama.cpp loads these experts, and leaves the layer without a feed-forward part.
        ("ernie4_5-moe-moe", "interleave_moe_layer_step", 3),
        ("llama4-moe", "expert_group_count", 2),
        ("deepseek2-groups-moe", "expert_used_count", 9),
        ("cogvlm-dense", "rope.freq_base", 5000.0),
        ("cogvlm-dense", "rope.scaling.type", "yarn"),
        ("gemma4-dense", "attention.head_count_kv", [2, 2, 1, 2, 2, 1, 4, 1]),
        ("lfm2-dense", "attention.causal", False),
        ("gemma3-dense", "attention.causal", False),
        ("deepseek4-moe", "attention.key_length_swa", 48),
        ("deepseek32-moe", "attention.kv_lora_rank", 520),  # no index begins there
    ],
)
def test_a_value_that_makes_another_graph_is_refused_by_name(name, key, value, tmp_path):
    path = write_kit_model(name, tmp_path / "m.gguf", {key: value})
    # Of layers whose experts a token's id chooses the file lacks the table.
    others = {"hrm.h_cycles": "block_count", "hash_layer_count": "ffn_gate_tid2eid"}
    named = others.get(key, key)
    with pytest.raises(GGUFError, match=named):
        Engine.load(path)


@pytest.mark.parametrize("name", ["kimi-linear-moe", "hy_v3-moe", "step35-moe", "glm4moe-moe"])
def test_experts_without_the_shared_one_that_their_graph_reads_are_refused(name, tmp_path):
    """llama.cpp loads such a file, and adds the activation of what the expert would read."""
    with pytest.raises(GGUFError, match=r"missing.*ffn_gate_shexp"):
        Engine.load(write_kit_model(name, tmp_path / "m.gguf", without="shexp"))


def test_groups_of_grovemoe_that_are_chosen_by_sigmoids_are_refused(tmp_path):
    """Its experts weigh what softmax makes of their logits: one score chooses, another weighs."""
    groups = {"expert_group_count": 2, "expert_group_used_count": 1, "expert_used_count": 1}
    path = write_kit_model("grovemoe-moe", tmp_path / "m.gguf", groups)
    with pytest.raises(GGUFError, match="expert_group_count"):
        Engine.load(path)


@pytest.mark.parametrize("name", ["rwkv7-dense", "arwkv7-dense"])
def test_heads_of_a_state_that_are_not_whole_vectors_are_refused(name, tmp_path):
    """The kernel that steps the state advances whole vectors of its columns."""
    path = write_kit_model(name, tmp_path / "m.gguf", {"wkv.head_size": 4})
    with pytest.raises(GGUFError, match=r"is 4, expected a multiple of 16.*wkv\.head_size"):
        Engine.load(path)


def test_two_rotary_widths_of_laguna_whose_first_layer_has_a_window_are_refused(tmp_path):
    n = specs()["laguna-moe"]["kv"]["laguna.block_count"][1]
    changed = {
        "rope.dimension_count_swa": 16,
        "attention.sliding_window_pattern": [1] + [0] * (n - 1),
    }
    path = write_kit_model("laguna-moe", tmp_path / "m.gguf", changed)
    with pytest.raises(GGUFError, match="dimension_count_swa"):
        Engine.load(path)


def recorded(path, monkeypatch):
    """The model of a file, and the ops of its graph with their fields."""
    calls, add = [], Program.add

    def noted(self, op, constants=(), **fields):
        calls.append((op, fields))
        return add(self, op, constants, **fields)

    monkeypatch.setattr(Program, "add", noted)
    return load_model(GGUFFile(path)), calls


def test_gates_of_a_dense_layer_have_the_limit_of_an_expert_for_all_rows(tmp_path, monkeypatch):
    name = "bailingmoe3-moe"  # its first layer is dense
    n_layer = specs()[name]["kv"]["bailingmoe3.block_count"][1]
    changed = {"swiglu_clamp_shexp": [3.0, *[0.0] * (n_layer - 1)]}
    _, calls = recorded(write_kit_model(name, tmp_path / "m.gguf", changed), monkeypatch)
    limits = {fields["limit"] for op, fields in calls if op is ops.GATE_CLAMPED}
    assert 3.0 in limits


@pytest.mark.parametrize("name", ["mistral4-moe", "glm-dsa-moe", "deepseek2-moe"])
def test_a_linear_scale_of_positions_scales_the_scores_of_latent_attention(name, tmp_path):
    """llama.cpp takes back a factor of YaRN that a linear scale has not."""
    changed = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    plain = load_model(GGUFFile(write_kit_model(name, tmp_path / "a.gguf"))).hp
    scaled = load_model(GGUFFile(write_kit_model(name, tmp_path / "b.gguf", changed))).hp
    assert scaled.attention_scale == plain.attention_scale * (1.0 + 0.1 * math.log(2.0)) ** 2


def test_deepseek_4_rotates_what_the_key_of_windows_says(tmp_path):
    """All of its layers have one; the widths of its rows are whole steps of the kernels."""
    path = write_kit_model("deepseek4-moe", tmp_path / "m.gguf", {"rope.dimension_count_swa": 16})
    assert load_model(GGUFFile(path)).hp.n_rot == 16
    narrow = write_kit_model("deepseek4-narrow-moe", tmp_path / "n.gguf")
    hp = load_model(GGUFFile(narrow)).hp
    assert (hp.compressed.width, hp.head_dim % 16) == (40, 0)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("ernie4_5-moe-moe", "expert_weights_scale", 2.5),
        ("deepseek-moe", "attention.scale", 0.05),
        ("deepseek32-moe", "attention.temperature_scale", 0.1),
        ("glm-dsa-moe", "attention.temperature_scale", 0.1),
        ("glm-dsa-moe", "rope.scaling.yarn_log_multiplier", 0.05),
    ],
)
def test_a_key_that_llama_cpp_does_not_read_there_changes_nothing(name, key, value, tmp_path):
    """Files have them where a program wrote all keys that it knows of any architecture."""
    scaled = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    scaled |= {"rope.scaling.original_context_length": 32, "attention.temperature_length": 16}
    plain = load_model(GGUFFile(write_kit_model(name, tmp_path / "a.gguf", scaled))).hp
    path = write_kit_model(name, tmp_path / "b.gguf", scaled | {key: value})
    assert load_model(GGUFFile(path)).hp == plain


def test_biases_of_some_of_a_joint_matrix_are_refused(tmp_path, monkeypatch):
    """llama.cpp loads them, and adds none."""
    spec = specs()["nomic-bert-dense"]
    n = {t[0]: t[1] for t in spec["tensors"]}["blk.0.attn_output.weight"][1]
    more = spec | {"tensors": [*spec["tensors"], ["blk.0.attn_q.bias", [n], 0]]}
    monkeypatch.setattr(kit_models, "specs", lambda: {"one": more})
    path = write_kit_model("one", tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match=r"expected attn_q.bias, attn_k.bias, attn_v.bias, or none"):
        Engine.load(path)


def test_attention_of_deci_without_a_feed_forward_part_is_refused(tmp_path):
    """llama.cpp leaves out such a layer."""
    changed = {"feed_forward_length": [160, 96, 0, 128]}
    path = write_kit_model("deci-layers-dense", tmp_path / "m.gguf", changed, without="blk.2.ffn")
    with pytest.raises(GGUFError, match="feed_forward_length"):
        Engine.load(path)


@pytest.mark.slow
@pytest.mark.parametrize("top", [8, 16, 32])
def test_blocks_are_chosen_whole_and_what_follows_them_is_attended_to(top, tmp_path):
    """Where a block ends 3 positions before its end, llama.cpp has no room for parts of a block.

    Elsewhere it adds up to 3 positions of the next best one, in the order of its sorting.
    """
    name = f"qwen4exp-blocks{top}-moe"
    engine = Engine.load(write_kit_model(name, tmp_path / "m.gguf"), n_threads=2)
    bad = far_off(run(engine, token_ids(name), "whole", tmp_path), golden(name))
    engine.close()
    assert not bad[: top + 3].any()
    assert not bad[2::4].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", ENCODERS)
def test_rows_of_encoders_are_llama_cpps(name, tmp_path):
    engine = Engine.load(write_kit_model(name, tmp_path / "m.gguf"), n_threads=2)
    session, ids, expected = engine.session(n_ctx=128), token_ids(name), golden(name)
    for _ in range(2):
        found = session.embed(ids, "none")
        assert not far_off(found, expected).any()
        session.truncate(0)
    with pytest.raises(ValueError, match="embeds"):
        session.prefill(ids)
    short = engine.session(n_ctx=128, n_ubatch=64)
    with pytest.raises(ContextError, match="n_ubatch"):
        next(short.hidden(ids))
    engine.close()


@pytest.mark.parametrize("name", POOLED)
def test_what_stands_for_a_text_is_llama_cpps(name, tmp_path):
    engine = Engine.load(write_kit_model(name, tmp_path / "m.gguf"), n_threads=2)
    session, ids, expected = engine.session(n_ctx=128), token_ids(name), golden(f"{name} pooled")
    for _ in range(2):  # the text of before is replaced
        found = session.embed(ids)
        assert found.shape == expected.shape
        assert not far_off(found[None], expected[None]).any()
    if not engine.model.heads.ranks:
        with pytest.raises(ValueError, match="no head that ranks"):
            session.embed(ids, "rank")
    engine.close()
