"""What `tamis run` has for long contexts, in the server: tiers, stretched positions, methods."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve_process import ServeProcess
from tiny_models import TinySpec, write_tiny_model

from tamis.bindings.serve.process import _suited
from tamis.bindings.serve.room import Room, Slots
from tamis.cli import main
from tamis.engine.engine import Engine
from tamis.engine.memory_plan import MemoryPlan
from tamis.select.notation import ANY_PREFILL, LONG

TEXT = "/completion"
N_CTX, GIB, MIB = 2048, 1 << 30, 1 << 20
METHOD = "window:recent=64"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A tiny model."""
    path = tmp_path_factory.mktemp("long") / "m.gguf"
    return write_tiny_model(path, TinySpec(n_ctx=N_CTX, layers=8))


def prompt_of(n, seed):
    draw = random.Random(seed)
    return [draw.randrange(5, 85) for _ in range(n)]


def ask(server, prompt, n=8, **fields):
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "return_tokens": True} | fields
    status, found = server.post(body, TEXT, timeout=120)
    assert status == 200, found
    return found["tokens"], found


def test_a_kv_cache_in_a_file_gives_the_tokens_of_one_in_memory(path, tmp_path):
    """Several at once, and prompts that slots no longer hold, from the prompt cache."""
    with Engine.load(path, n_threads=1) as engine:
        n_byte = engine.memory_plan(N_CTX, 128).kv // 2
        assert engine.memory_plan(N_CTX, 128, kv_ram=n_byte).disk > 0
    tier = "--kv-ram", str(n_byte), "--kv-dir", str(tmp_path)
    prompts = [prompt_of(1500, seed) for seed in range(3)]
    found = []
    for flags in ((), tier):
        how = "--cache-ram", "64MiB", "--parallel", "2", "-t", "1"
        with ServeProcess(path, tmp_path, *how, *flags) as server, ThreadPoolExecutor() as pool:
            first = list(pool.map(lambda prompt: ask(server, prompt)[0], prompts))
            turns = [p + tokens + [9, 30] for p, tokens in zip(prompts, first, strict=True)]
            again = [ask(server, turn) for turn in turns]
            assert all(reply["timings"]["cache_n"] >= 1500 for _, reply in again)
            found.append((first, [tokens for tokens, _ in again]))
    assert found[0] == found[1]


def test_positions_are_stretched_as_in_run(path, tmp_path):
    yarn = "--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-orig-ctx", "256"
    prompt = prompt_of(600, 7)
    with Engine.load(path, n_threads=1) as engine:
        plain = engine.session(n_ctx=N_CTX, n_ubatch=128).prefill(prompt).argmax()
    with ServeProcess(path, tmp_path, *yarn, "-t", "1") as server:
        stretched, _ = ask(server, prompt, 24)
    with ServeProcess(path, tmp_path, "-t", "1") as server:
        usual, _ = ask(server, prompt, 24)
    assert usual[0] == plain
    assert stretched != usual


def test_context_shift_is_what_a_request_says_of_itself(path, tmp_path):
    prompt = prompt_of(200, 3)
    with ServeProcess(path, tmp_path, "--context-shift", "-c", "256", "-t", "1") as server:
        long, reply = ask(server, prompt, 150, ignore_eos=True)
        assert len(long) == 150
        assert reply["truncated"]
        short, _ = ask(server, prompt, 150, ignore_eos=True, context_shift=False)
        assert short == long[:56]


def test_a_context_shifts_under_drafts_as_it_does_without(path, tmp_path):
    prompt, found = prompt_of(200, 3), []
    for flags in (("--spec-type", "none"), ("--spec-type", "ngram-simple"), ("-md", str(path))):
        how = "--context-shift", "-c", "256", "-t", "1"
        with ServeProcess(path, tmp_path, *how, *flags) as server:
            found.append(ask(server, prompt, 150, ignore_eos=True)[0])
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 150


def test_several_answers_are_drafted_for_by_their_own_attention(path, tmp_path):
    """Steps of a batch would read by the method that drafts: each is checked by itself."""
    prompts = [prompt_of(300, seed) for seed in range(3)]
    found = []
    for flags in ((), ("--draft-attn", METHOD, "--draft-max", "3")):
        with ServeProcess(path, tmp_path, *flags, "-t", "1") as server, ThreadPoolExecutor() as p:
            found.append([*p.map(lambda prompt: ask(server, prompt, 40)[0], prompts)])
    assert found[0] == found[1]


def test_prefill_auto_is_dense_and_then_delta(path):
    with Engine.load(path, n_threads=1) as engine:
        given = {"prefill": "auto", "n_ctx": 9}
        assert _suited(given, engine) == given | {"prefill": ANY_PREFILL}
        assert f"least={LONG}" in ANY_PREFILL
        assert _suited(given | {"prefill": "hip"}, engine)["prefill"] == "hip"


def test_timings_have_the_attention_that_steps_retained(path, tmp_path):
    with ServeProcess(path, tmp_path, "--attn", "auto:least=100", "-t", "1") as server:
        _, short = ask(server, prompt_of(20, 3))
        _, long = ask(server, prompt_of(600, 3))
    assert "attention" not in short["timings"]
    assert 0 < long["timings"]["attention"]["mass"] <= 1


def test_flags_that_lack_another_are_refused_before_the_server_listens(path, tmp_path, capsys):
    for flags, said in (
        (["--kv-ram", "1MiB"], "--kv-ram and --kv-dir go together"),
        (["--kv-ram", "1MiB", "--kv-dir", str(tmp_path / "none")], "no folder"),
        (["--rope-scaling", "yarn"], "--rope-scale"),
        (["--kv-vram", "1GiB"], "--kv-vram is memory of a GPU"),
    ):
        assert main(["serve", "-m", str(path), "--port", "0", "-t", "1", *flags]) != 0
        assert said in capsys.readouterr().err


PLAN = MemoryPlan(weights=5 * GIB, kv=2 * GIB, workspace=GIB, available=64 * GIB)


def test_one_plan_has_slots_drafts_and_the_prompt_cache():
    slots = [Slots(4, 8192, {"cpu": PLAN})]
    drafts = Slots(4, 8192, {"cpu": PLAN._replace(weights=GIB, kv=GIB, workspace=0)}, loaded=False)
    room = Room(("cpu", 16 * GIB))
    assert room.left(slots) == 4 * GIB
    assert room.left(slots, 3 * GIB) == GIB
    with pytest.raises(MemoryError, match=r"4 contexts .* cache of 5\.0 GiB take 17\.0 GiB"):
        room.left(slots, 5 * GIB)
    with pytest.raises(MemoryError, match=r"take 17\.0 GiB, free: 16\.0 GiB; lower --ctx or"):
        room.left([*slots, drafts])


def test_the_plan_counts_ram_behind_a_gpu_and_the_disk_of_all_slots():
    behind = PLAN._replace(kv=GIB, host=3 * GIB, available=9 * GIB)
    with pytest.raises(MemoryError, match=r"take 12\.0 GiB, free: 11\.0 GiB"):
        Room(("", 11 * GIB)).left([Slots(4, 9, {"cuda": behind})])
    assert Room(("", 13 * GIB)).left([Slots(4, 9, {"cuda": behind})]) == GIB
    with pytest.raises(MemoryError, match=r"take 10\.0 GiB of cuda, free: 9\.0 GiB"):
        Room(("", 99 * GIB)).left([Slots(5, 9, {"cuda": behind})])
    on_disk = PLAN._replace(disk=2 * GIB)
    with pytest.raises(MemoryError, match=r"take 8\.0 GiB in --kv-dir, free: 7\.0 GiB"):
        Room(("cpu", 99 * GIB), 7 * GIB).left([Slots(4, 9, {"cpu": on_disk})])


def test_slots_that_fit_one_by_one_and_not_together_are_refused(path, tmp_path, capsys):
    n = 1 << 20  # tokens of a context
    with Engine.load(path, n_threads=1) as engine:
        plan = engine.memory_plan(n, 128)
    many = plan.available // (plan.kv + plan.workspace) + 1
    flags = ["-c", str(n), "--parallel", str(many), "--port", "0", "-t", "1"]
    assert main(["serve", "-m", str(path), *flags]) != 0
    assert "lower --ctx or --parallel" in capsys.readouterr().err
