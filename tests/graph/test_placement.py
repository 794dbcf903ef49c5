"""Layers on two devices: the same numbers as on one, and errors that say which of them is full.

The second device is a CPU whose kernels see copies of the arrays only, as a GPU's do: what Python
does not send there, or does not fetch, is missing in the results.

Then the same with keys, values and attention on the first device: only rows move.
"""

import ctypes

import numpy as np
import pytest
from cuda_stand_in import Library, StandIn
from freezing import ETF
from method_roles import in_its_roles
from precompiled import compile_for
from tier_cases import METHODS, OTHERS
from tiny_models import TinySpec, write_tiny_model
from two_devices import GIB, N_LAYER, Apart, loaded

from tamis import Llama
from tamis.bindings import llama as flat
from tamis.bindings.flat.context import using
from tamis.cli import main
from tamis.engine import engine as engine_module
from tamis.engine.engine import Engine
from tamis.evals.plan import origin_of
from tamis.graph.topk_logits import Best
from tamis.jit_kernels.backends import cuda as cuda_backend
from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.backends.split import SplitBackend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE, zeros
from tamis.sampling.chain import Sampler, SamplerError, SamplerParams
from tamis.select.notation import MethodError

# HShare's layers share sets with each other; no GPU has its ops.
# auto reads everything where some layers' attention is on a GPU.
SPLIT = [text for text in (*METHODS, *OTHERS) if not text.startswith(("hshare", "auto"))]
PARTED = [
    *(in_its_roles(text) for text in (*METHODS, *OTHERS)),
    {"prefill": f"{ETF},kv=reuse"},
    {"prefill": f"{ETF},kv=project"},
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("places") / "m.gguf"
    return write_tiny_model(path, TinySpec("llama", "F32", layers=N_LAYER, n_ctx=64 * PAGE))


@pytest.fixture(scope="module")
def whole(path):
    engine = Engine.load(path, n_threads=2)
    compile_for(engine, [{"n_ctx": PAGE} | how for how in PARTED], 9, 9)
    yield engine
    engine.close()


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(engine_module, "open_gpu", Apart)


def ids_of(n):
    return np.random.default_rng(7).integers(3, 60, n)


def steps(session, ids):
    return np.array([session.decode(int(token)) for token in ids])


@pytest.mark.parametrize("n", [2, -1])
def test_what_is_run_again_for_its_queries_leaves_keys_as_they_were(path, gpu, n):
    engine = loaded(path, n)
    read = engine.session(n_ctx=2 * PAGE, prefill="window:sink=1,recent=4")
    read.prefill(ids_of(90))
    learns = engine.session(n_ctx=2 * PAGE, attn=next(t for t in SPLIT if t.startswith("lfps")))
    learns.copy(read)
    for found, expected in zip(learns._arrays(), read._arrays(), strict=True):
        np.testing.assert_array_equal(found, expected)
    engine.close()


def test_page_tables_are_sent_only_where_they_changed(path, gpu, monkeypatch):
    engine, sent, send = loaded(path, -1), [], Apart.send

    def noted(backend, *arrays):
        sent.extend(arrays)
        send(backend, *arrays)

    monkeypatch.setattr(Apart, "send", noted)
    session = engine.session(n_ctx=4 * PAGE, n_ubatch=32)
    (stage,) = session._stages

    def told():
        """How often the page table was sent, and what was sent with it."""
        n, others = sum(a is stage.kv.tables[0] for a in sent), {a.nbytes for a in sent}
        sent.clear()
        return n, others - {stage.kv.tables[0].nbytes}

    record = stage.ws.step.nbytes
    session.prefill(ids_of(PAGE - 2))
    assert told()[0] == 1
    for n in (0, 0, 1, 0):  # the third token is on a page of its own
        session.decode(5)
        assert told() == (n, {record + 4})
    session.truncate(PAGE - 1)
    one, *_ = steps(session, [5, 5])
    fork = engine.session(n_ctx=4 * PAGE, n_ubatch=32)
    fork.copy(session)
    session.truncate(PAGE - 1)
    sent.clear()
    np.testing.assert_array_equal(session.decode(5), one)
    assert told()[0] == 1  # what the fork has, too, is written to a page of its own
    engine.close()


@pytest.mark.parametrize("n", [0, 1, 4, N_LAYER, N_LAYER + 1, -1])
def test_it_is_the_last_layers_and_then_the_output_as_in_llama_cpp(path, gpu, n):
    engine = loaded(path, n)
    found = [(p.device, list(p.layers), p.embedding, p.output) for p in engine.places]
    engine.close()
    everything = list(range(N_LAYER)), True, True
    first = N_LAYER - n
    assert found == {0: [("cpu", *everything)]}.get(n) or found == (
        [("cuda", *everything)]
        if n in (-1, N_LAYER + 1)
        else [
            ("cpu", everything[0][:first], True, True),
            ("cuda", everything[0][first:], False, False),
        ]
    )


@pytest.mark.parametrize("n", [1, 4, N_LAYER, -1])
def test_numbers_are_those_of_one_device_to_the_bit(path, whole, gpu, n, tmp_path):
    ids, engine = ids_of(150), loaded(path, n)
    one, two = (e.session(n_ctx=256, n_ubatch=32) for e in (whole, engine))
    for session in (one, two):
        session.prefill(ids[:70])
        session.truncate(50)
    found = [[*session.logits(ids[50:90]), steps(session, ids[90:99])] for session in (one, two)]
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    hidden = [np.concatenate(list(session.hidden(ids[99:140]))) for session in (one, two)]
    np.testing.assert_array_equal(*hidden)
    # What one saves, the other goes on with, and a copy too.
    for source, target in ((one, two), (two, one)):
        source.save(tmp_path / "s")
        target.truncate(0)
        target.load(tmp_path / "s")
        np.testing.assert_array_equal(target.decode(9), source.decode(9))
    other = engine.session(n_ctx=256, n_ubatch=32)
    other.copy(two)
    np.testing.assert_array_equal(other.decode(9), one.decode(9))
    engine.close()


@pytest.mark.parametrize("text", SPLIT)
def test_a_method_needs_not_know_of_it(path, whole, gpu, text):
    ids, engine = ids_of(420), loaded(path, 2)
    found = []
    for each in (whole, engine):
        # A GPU's copies of keys have no kernels here.
        session = each.session(n_ctx=512, n_ubatch=128, key_copy=0, **in_its_roles(text))
        session.prefill(ids[:300])
        before = steps(session, ids[300:320])
        session.truncate(290)
        session.prefill(ids[290:400])
        found.append((before, steps(session, ids[400:])))
    engine.close()
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("n", [2, -1])
@pytest.mark.parametrize("text", [t for t in SPLIT if t.startswith(("dense", "quest", "lfps"))])
def test_tokens_are_removed_from_the_middle_there_too(path, whole, gpu, text, n, monkeypatch):
    ids, engine, found = ids_of(340), loaded(path, n), []
    for each in (whole, engine):
        session = each.session(n_ctx=512, n_ubatch=128, **in_its_roles(text))
        session.prefill(ids[:300])
        with monkeypatch.context() as patch:
            patch.setattr(session, "recall", lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):  # all is moved by then, and goes back
                session.remove(9, 200)
        session.remove(100, 250)
        logits = steps(session, ids[300:309])
        found.append((logits, session.prefill(ids[309:]), *session._arrays()))
    engine.close()
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_cpus_share_may_be_on_disk(path, whole, gpu, tmp_path):
    engine = loaded(path, 2)
    in_memory, plan = (e.memory_plan(32 * PAGE) for e in (whole, engine))
    assert plan.kv == in_memory.kv
    kv_ram = in_memory.kv // 3
    plans = engine.memory_plans(32 * PAGE, kv_ram=kv_ram)
    assert {device: plan.disk > 0 for device, plan in plans.items()} == {"cpu": True, "cuda": False}
    session = engine.session(n_ctx=32 * PAGE, n_ubatch=64, kv_ram=kv_ram, kv_dir=tmp_path)
    ids, other = ids_of(1000), whole.session(n_ctx=32 * PAGE, n_ubatch=64)
    np.testing.assert_array_equal(session.prefill(ids), other.prefill(ids))
    np.testing.assert_array_equal(steps(session, ids[:5]), steps(other, ids[:5]))
    assert session.kv_counts.n_written > 0
    with pytest.raises(ValueError, match="keeps the whole KV cache in its memory"):
        loaded(path, -1).session(kv_ram=kv_ram, kv_dir=tmp_path)
    engine.close()


def test_a_full_device_is_named_with_its_layers(path, gpu, monkeypatch):
    monkeypatch.setattr(Apart, "memory", 1 << 20)
    with pytest.raises(MemoryError, match=r"on cuda \(layers 4 to 5\), free: .* n_gpu_layers"):
        loaded(path, 2).session(n_ctx=1 << 16)
    with pytest.raises(MemoryError, match="on cuda, free"):
        loaded(path, -1).session(n_ctx=1 << 16)
    monkeypatch.setattr(Apart, "memory", 1 << 60)
    monkeypatch.setattr(CpuBackend, "free_bytes", lambda *_: 1 << 20)
    with pytest.raises(MemoryError, match=r"on cpu \(layers 0 to 3\), free: .*kv_dir"):
        loaded(path, 2).session(n_ctx=1 << 16)
    engine = loaded(path, 2)
    plan = engine.memory_plan(1 << 16)
    assert plan.available < plan.kv + plan.workspace  # it fits only where each part does
    assert plan.weights == engine.model.weights.n_bytes


def test_what_needs_one_device_is_refused_by_name(path, gpu):
    engine = loaded(path, 2)
    with pytest.raises(ValueError, match="audit needs all layers on one device"):
        engine.session(audit=2)
    with pytest.raises(MethodError, match="copies keys of layer 3 to the next"):
        engine.session(prefill="cpe:kv=reuse")
    engine.close()


def test_programs_ask_for_it_by_llama_cpps_names(path, whole, gpu, capsys):
    arguments = ["bench", "-m", str(path), "-p", "0", "-n", "2", "-r", "1", "--json", "-t", "2"]
    assert main([*arguments, "-ngl", "2"]) == 0
    assert main([*arguments, "--device", "cpu", "-ngl", "2"]) == 2
    assert "-ngl 2 puts layers on the GPU" in capsys.readouterr().err
    llama = Llama(str(path), n_gpu_layers=4, n_threads=2, n_ctx=128, verbose=False)
    assert [list(place.layers) for place in llama._engine.places] == [[0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize("options", [{"temp": 0}, {"top_k": 5, "seed": 3}, {"top_k": 0, "seed": 3}])
@pytest.mark.parametrize("n", [2, N_LAYER, -1])
def test_an_answer_is_sampled_where_the_logits_are(path, whole, gpu, options, n):
    engine, params = loaded(path, n), SamplerParams(**options)
    one, two = (e.session(n_ctx=256, n_ubatch=32) for e in (whole, engine))
    sampler, expected = Sampler(params, whole.hp.n_vocab), []
    logits = one.prefill(ids_of(20))
    for token in ids_of(20):
        sampler.accept(token)
    for _ in range(30):
        token = sampler.sample(logits)
        expected.append((token, sampler.logprob(logits, token)))
        sampler.accept(token)
        if token in whole.tokenizer.eog:
            break
        logits = one.decode(token)
    found = [(p.token_id, p.logprob) for p in two.generate(ids_of(20), params, max_tokens=30)]
    engine.close()
    assert [token for token, _ in found] == [token for token, _ in expected]
    # Their logarithm is of a float32 sum.
    np.testing.assert_allclose(*([p for _, p in rows] for rows in (found, expected)), atol=1e-5)


def test_what_comes_of_a_step_is_written_where_python_reads_it(path, whole, elsewhere):
    engine = loaded(path, -1)
    session = engine.session(n_ctx=256, n_ubatch=32)
    session.prefill(ids_of(20))
    moved = []
    for step in (session.decode, lambda token: session.decode_best(token, 3), session.decode):
        engine.backend.moved()
        step(5)
        moved.append(engine.backend.moved()[1])
    engine.close()
    assert moved == [0, 0, 0]


def test_logits_of_a_step_are_the_callers_as_long_as_it_has_a_part_of_them(path, whole, elsewhere):
    engine = loaded(path, -1)
    session, other = (e.session(n_ctx=256, n_ubatch=32) for e in (engine, whole))
    for s in (session, other):
        s.prefill(ids_of(20))
    n, held, expected, moved = whole.hp.n_vocab, [], [], []
    for token in range(5):  # of the first ones, a slice is kept and a pointer
        engine.backend.moved()
        found = session.decode(token)
        expected.append(other.decode(token))
        moved.append(engine.backend.moved()[1])
        pointer = found.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        held.append([found[7:90], pointer, found][min(token, 2)])
        del found, pointer
    assert moved == [0, 0, *(3 * [4 * n])]
    for found, own in zip((held[0], held[1][:n], *held[2:]), expected, strict=True):
        np.testing.assert_array_equal(found, own[7:90] if found is held[0] else own)
    del held[0], held[0]
    for token in range(9):  # what one step gave is held during the next
        engine.backend.moved()
        found = session.decode(token)
        np.testing.assert_array_equal(found, other.decode(token))
        assert engine.backend.moved()[1] == 0
    engine.close()
    del session
    found[:] = 0  # it is its caller's


def test_where_no_memory_can_be_mapped_what_comes_of_a_step_is_copied(
    path, whole, elsewhere, monkeypatch
):
    def refused(_, array):
        raise MemoryError(f"{array.nbytes} bytes")

    monkeypatch.setattr(Elsewhere, "mapped", refused)
    engine = loaded(path, -1)
    session, other = (e.session(n_ctx=256, n_ubatch=32) for e in (engine, whole))
    for s in (session, other):
        s.prefill(ids_of(20))
    engine.backend.moved()
    np.testing.assert_array_equal(session.decode(5), other.decode(5))
    for found, own in zip(session.decode_best(6, 3), other.decode_best(6, 3), strict=True):
        np.testing.assert_array_equal(found, own)
    assert engine.backend.moved()[1] == 4 * whole.hp.n_vocab + 4 * (3 + 3 + 2)
    engine.close()


def test_logits_that_are_no_numbers_are_an_error_here_too(path, whole):
    session = whole.session(n_ctx=256)
    session.prefill(ids_of(20))
    assert len(session.decode_best(5, 3)) == len(Best._fields)
    assert len(session.decode_best(5, None)) == whole.hp.n_vocab
    run = session.forward.best

    def broken(n):
        session.forward._ws.logits[0, 7] = np.nan
        return run(n)

    session.forward.best = broken
    with pytest.raises(SamplerError, match="the logit of token 7 is nan"):
        list(session.generate([5], SamplerParams(temp=0), max_tokens=3))


# --- keys, values and attention on the CPU, layers elsewhere --------------------------------------
class Link(StandIn):
    """Counts the bytes that go each way."""

    def __init__(self):
        super().__init__()
        self.fetched = 0

    def download(self, host, address, n_bytes):
        self.fetched += n_bytes
        super().download(host, address, n_bytes)


class Elsewhere(Apart):
    """As a GPU, it has an f16 KV cache only, and not many ops: those over rows."""

    kv_types = ("f16",)

    def __init__(self, n_thread=2):
        super().__init__(n_thread)
        self._device, self.ops = Link(), set()

    def link(self, program):
        self.ops |= {call.spec.op for call in program.calls}
        return super().link(program)

    def moved(self):
        """Bytes sent and fetched since the last call."""
        found = self._device.copied, self._device.fetched
        self._device.copied = self._device.fetched = 0
        return found

    def has(self, array):
        return self._copy(array) is not None

    def spoil(self, array):
        copy = self._copy(array)
        ctypes.memset(copy.at(array.ctypes.data), 0xFF, array.nbytes)


@pytest.fixture
def elsewhere(monkeypatch):
    monkeypatch.setattr(engine_module, "open_gpu", Elsewhere)


def parted(path, n_gpu_layers=-1):
    return Engine.load(
        path, n_threads=2, device="cuda", n_gpu_layers=n_gpu_layers, offload_kqv=False
    )


def opened(engine, **options):
    """A session on both devices, each of which has rows of its own side only."""
    session = engine.session(**options)
    for stage in session._stages:
        if isinstance(stage.backend, SplitBackend):
            chunks = [linked.program for linked, _ in stage._prefills.values()]
            transfers = [transfer for program in chunks for transfer in program.transfers]
            moving = [rows for transfer in transfers for rows in transfer.rows]
            for rows in (stage.ws.x, stage.ws.logits, *moving):
                if stage.backend.rows.has(rows):
                    stage.backend.rows.spoil(rows)
            for rows in moving[:3]:  # q, k and v of every layer
                rows.fill(np.nan)
    return session


@pytest.mark.parametrize("how", PARTED, ids=lambda how: "-".join(how.values()))
def test_a_method_needs_not_know_where_keys_are(path, whole, elsewhere, how):
    ids, engine, found = ids_of(330), parted(path), []
    for session in (
        whole.session(n_ctx=512, n_ubatch=128, **how),
        opened(engine, n_ctx=512, n_ubatch=128, **how),
    ):
        session.prefill(ids[:300])
        before = steps(session, ids[300:310])
        session.truncate(290)
        found.append((before, session.prefill(ids[290:320]), steps(session, ids[320:])))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
    engine.close()


@pytest.mark.parametrize("n", [2, N_LAYER, -1])
def test_sessions_are_kept_copied_and_gone_on_with(path, whole, elsewhere, n, tmp_path):
    ids, engine = ids_of(150), parted(path, n)
    sizes = {"n_ctx": 256, "n_ubatch": 32, "attn": "lfps"}
    one, two = whole.session(**sizes), opened(engine, **sizes)
    found = [np.concatenate(list(session.logits(ids[:90]))) for session in (one, two)]
    np.testing.assert_array_equal(*found)
    hidden = [np.concatenate(list(session.hidden(ids[90:140]))) for session in (one, two)]
    np.testing.assert_array_equal(*hidden)
    again = []
    for source in (one, two):  # lfps starts anew, from the queries of tokens that are run again
        source.save(tmp_path / "s")
        for target in (whole.session(**sizes), opened(engine, **sizes)):
            target.load(tmp_path / "s")
            again.append(steps(target, ids[:3]))
    for each in again[1:]:
        np.testing.assert_array_equal(each, again[0])
    fork = opened(engine, **sizes)
    fork.copy(two)
    if n == -1:  # of one cache, a fork has the same pages up to those tokens
        np.testing.assert_array_equal(fork._kv.tables[0][:1], two._kv.tables[0][:1])
    np.testing.assert_array_equal(steps(fork, ids[:3]), again[0])
    texts = [
        [piece.token_id for piece in s.generate(ids[:2], SamplerParams(temp=0), max_tokens=4)]
        for s in (one, two)
    ]
    assert texts[0] == texts[1]
    engine.close()


@pytest.mark.parametrize(
    "attn",
    ["dense", "lfps", *(f"tactic:c=16,local=64,period=4,segment={n}" for n in (128, 512))],
)
def test_rows_move_and_no_key_of_the_context(path, elsewhere, attn):
    engine = parted(path)
    session = engine.session(n_ctx=512, n_ubatch=64, attn=attn)
    hp, ws, rows = engine.hp, session._stages[0].ws, engine.backend.rows
    session.prefill(ids_of(40))
    session.decode(5)
    moved = []
    for n_past in (41, 400):
        session.prefill(ids_of(n_past - session.n_past)) if n_past > session.n_past else None
        rows.moved()
        for _ in range(3):
            session.decode(5)
        moved.append(rows.moved())
    sent = ws.step.nbytes + ws.ids[:1].nbytes + 4 * hp.n_layer * hp.n_embd_q
    fetched = 4 * hp.n_layer * (hp.n_embd_q + 2 * hp.n_embd_kv) + 4 * hp.n_vocab
    assert moved == 2 * [(3 * sent, 3 * fetched)]
    rows.moved()
    session.prefill(ids_of(50))
    sent = ws.step.nbytes + ws.ids[:50].nbytes + 50 * 4 * hp.n_layer * hp.n_embd_q
    # One row's logits: its number goes to the head, and to each layer that no rows are frozen.
    sent += ws.head_rows.nbytes + ws.head_step.nbytes
    fetched = 50 * 4 * hp.n_layer * (hp.n_embd_q + 2 * hp.n_embd_kv) + 4 * hp.n_vocab
    assert rows.moved() == (sent, fetched)
    view, cos = session._kv.view(0), ws.rows("cos.0", hp.n_rot // 2)
    assert not any(map(rows.has, (view.k, view.v, view.k_table, cos, ws.partial)))
    assert rows.ops == {ops.EMBED, ops.PACK_ROWS, ops.MATMUL}
    engine.close()


def test_the_whole_kv_cache_may_be_on_disk(path, whole, elsewhere, tmp_path):
    engine, ids = parted(path), ids_of(700)
    kv_ram = whole.memory_plan(32 * PAGE).kv // 3
    sizes = {"n_ctx": 32 * PAGE, "n_ubatch": 64, "attn": "lfps"}
    session = opened(engine, kv_ram=kv_ram, kv_dir=tmp_path, **sizes)
    other = whole.session(**sizes)
    np.testing.assert_array_equal(session.prefill(ids), other.prefill(ids))
    np.testing.assert_array_equal(steps(session, ids[:5]), steps(other, ids[:5]))
    assert session.kv_counts.n_written > 0
    engine.close()
    with pytest.raises(ValueError, match=r"kv_ram needs all layers on one .* out n_gpu_layers"):
        parted(path, 2).session(n_ctx=32 * PAGE, n_ubatch=64, kv_ram=kv_ram, kv_dir=tmp_path)


def test_a_gpu_gets_kernels_and_arrays_of_its_own_side_only(path, monkeypatch):
    asked = set()

    class Asked(Library):
        def load(self, specs, progress=None):
            asked.update(spec.op for spec in specs)

    monkeypatch.setattr(cuda_backend, "Device", StandIn)
    monkeypatch.setattr(cuda_backend, "PtxLibrary", Asked)
    monkeypatch.setattr(engine_module, "open_gpu", cuda_backend.CudaBackend)
    engine = parted(path)
    session = engine.session(n_ctx=512, n_ubatch=64, attn="hshare:budget=99", prefill=ETF)
    session.prefill(ids_of(100))
    session.decode(5)
    head = {ops.LOGIT_PARTS, ops.LOGIT_BEST}
    assert asked == {ops.EMBED, ops.PACK_ROWS, ops.MATMUL, ops.COPY_ROWS} | head
    view = session._kv.view(0)
    gpu = engine.backend.rows
    assert [gpu._mirror(array) is None for array in (view.k, view.v, view.k_table)] == [True] * 3
    att = session._stages[0].ws.rows("att", engine.hp.n_head, engine.hp.head_dim)
    assert gpu._mirror(att) is not None
    engine.close()


def test_layers_that_share_sets_are_not_torn_apart(path, elsewhere):
    engine = parted(path, 2)
    with pytest.raises(MethodError, match=r"layers share sets, .* leave out n_gpu_layers"):
        engine.session(n_ctx=256, attn="hshare:budget=99")
    engine.close()


def test_steps_can_be_audited_where_keys_are(path, whole, elsewhere):
    ids, engine = ids_of(120), parted(path)
    options = {"n_ctx": 256, "attn": "topk:k=64", "audit": 2}
    audits = []
    for session in (whole.session(**options), opened(engine, **options)):
        session.prefill(ids[:100])
        steps(session, ids[100:])
        audits.append(session.audit)
    np.testing.assert_array_equal(audits[0].samples, audits[1].samples)
    assert audits[0].n_bytes() == audits[1].n_bytes()
    engine.close()


def test_auto_is_metered_where_a_gpu_keeps_the_keys_too(path, whole, gpu):
    ids, engine, found = ids_of(80), loaded(path, n_gpu_layers=-1), []
    for each in (whole, engine):
        assert each.auto_stays_dense() == ""
        assert each.session(n_ctx=128, attn="auto").mass is None
        session = each.session(n_ctx=128, attn="auto:least=0,mass=0")
        session.prefill(ids[:79])
        session.decode(ids[79])
        found.append(session.mass)
    assert found[0] == found[1]
    assert found[0].n_step == 1
    assert engine.auto_least() > whole.auto_least()
    engine.close()


def test_each_device_is_asked_for_what_it_holds(path, whole, elsewhere, monkeypatch):
    n_ctx, engine = 1 << 16, parted(path)
    alone, plans = whole.memory_plan(n_ctx), engine.memory_plans(n_ctx)
    assert {d: (p.weights, p.kv) for d, p in plans.items()} == {
        "cuda": (alone.weights, 0),
        "cpu": (0, alone.kv),
    }
    monkeypatch.setattr(Apart, "memory", plans["cuda"].weights + plans["cuda"].workspace)
    engine.session(n_ctx=n_ctx, n_ubatch=256)  # no room for the KV cache
    kept = Engine.load(path, n_threads=2, device="cuda")
    with pytest.raises(MemoryError, match=r"on cuda, free.* or the KV .* with offload_kqv=False"):
        kept.session(n_ctx=n_ctx, n_ubatch=256)
    kept.with_kv_on_host().session(n_ctx=n_ctx, n_ubatch=256)
    with pytest.raises(ValueError, match=r"leave out kv_ram, or .* with offload_kqv=False"):
        kept.session(n_ctx=256, n_ubatch=32, kv_ram=GIB, kv_dir=path.parent)
    monkeypatch.setattr(CpuBackend, "free_bytes", lambda *_: 1 << 20)
    with pytest.raises(MemoryError, match=r"on cpu \(layers 0 to 5\), free: .*kv_dir"):
        engine.session(n_ctx=n_ctx, n_ubatch=256)
    monkeypatch.setattr(Apart, "memory", 1 << 10)
    with pytest.raises(MemoryError, match=r"on cuda \(layers 0 to 5\), .* with n_gpu_layers$"):
        engine.session(n_ctx=n_ctx, n_ubatch=256)
    assert origin_of(engine, "")["device"] != origin_of(kept, "")["device"]
    for each in (engine, kept):
        each.close()


def test_a_gpu_with_room_computes_more_tokens_of_a_prompt_at_once(path, whole, gpu, monkeypatch):
    def chunk(engine, n_ctx, **options):
        session = engine.session(n_ctx=n_ctx, **options)
        n = session.n_ubatch
        plan = engine.memory_plan(n_ctx, **options)
        assert plan.workspace == engine.memory_plan(n_ctx, **options | {"n_ubatch": n}).workspace
        return n

    n_ctx, on_gpu, split, kept = 8192, loaded(path, -1), loaded(path, 2), parted(path)
    assert [chunk(on_gpu, n) for n in (64, 512, 1000, n_ctx)] == [512, 512, 1000, 2048]
    assert [chunk(engine, n_ctx) for engine in (whole, split, kept)] == [512] * 3
    assert chunk(on_gpu, n_ctx, n_ubatch=64) == 64
    assert chunk(on_gpu, n_ctx, kv_vram=GIB) == 512
    more, less = (on_gpu.memory_plan(n_ctx, n) for n in (2048, 512))
    needed = [plan.weights + plan.kv + plan.workspace for plan in (more, less)]
    monkeypatch.setattr(Apart, "memory", needed[0])
    assert chunk(on_gpu, n_ctx) == 2048
    monkeypatch.setattr(Apart, "memory", needed[0] - 1)
    assert chunk(on_gpu, n_ctx) == 512
    monkeypatch.setattr(Apart, "memory", needed[1] - 1)
    with pytest.raises(MemoryError, match="lower n_ctx"):
        on_gpu.session(n_ctx=n_ctx)
    for each in (on_gpu, split, kept):
        each.close()


def test_programs_leave_keys_on_the_cpu_by_llama_cpps_names(path, elsewhere, monkeypatch):
    arguments = ["bench", "-m", str(path), "-p", "0", "-n", "2", "-r", "1", "--json", "-t", "2"]
    opened, load = [], Engine.load
    monkeypatch.setattr(
        Engine, "load", lambda *a, **how: opened.append(load(*a, **how)) or opened[-1]
    )
    for flags in (["-ngl", "99", "-nkvo"], ["--device", "cuda"], ["--no-kv-offload"]):
        assert main([*arguments, *flags]) == 0
    found = [(each.places[0].device, each.places[0].kv_device) for each in opened]
    assert found == [("cuda", "cpu"), ("cuda", "cuda"), ("cpu", "cpu")]
    # A KV cache on the CPU may be of its types.
    assert [each.backend.kv_types for each in opened[:2]] == [
        CpuBackend.kv_types,
        Elsewhere.kv_types,
    ]
    how = {"n_gpu_layers": -1, "n_threads": 2, "n_ctx": 128, "verbose": False}
    for offload_kqv, device in ((True, "cuda"), (False, "cpu")):
        llama = Llama(str(path), offload_kqv=offload_kqv, **how)
        assert [place.kv_device for place in llama._engine.places] == [device]


def test_a_context_of_the_flat_api_asks_for_it(path, elsewhere):
    params = flat.llama_model_default_params()
    params.n_gpu_layers, params.n_threads = -1, 2
    model = flat.llama_model_load_from_file(str(path), params)
    how, plans = flat.llama_context_default_params(), []
    how.n_ctx = how.n_ubatch = 256
    for how.offload_kqv in (True, False):
        ctx = flat.llama_init_from_model(model, how)
        batch = flat.llama_batch_get_one(np.arange(3, 9, dtype=np.int32), 6)
        assert flat.llama_decode(ctx, batch) == flat.LLAMA_OK
        with using(ctx) as context:
            (kv_device,) = (stage.place.kv_device for stage in context.session(0)._stages)
        plans.append((kv_device, flat.tamis_memory_plan(model, how).workspace))
        assert flat.llama_free(ctx) == flat.LLAMA_OK
    assert plans == [("cuda", plans[0][1]), ("cpu", 2 * plans[0][1])]  # room on each device
    assert flat.llama_model_free(model) == flat.LLAMA_OK


def test_rows_are_copied_only_where_a_replay_meets_the_transfer():
    """A replay that starts behind a transfer, as after a page was fetched, repeats none."""
    step, moved = np.array([1, 0, 0, 0, 0]), []

    class Noted:
        n_thread, n_part, kv_types, strips, clock = 1, 1, (), False, None

        def __init__(self, name):
            self.name = name

        def link(self, program):
            return len(program)

        def run(self, linked, first=0, last=None):
            moved.append((self.name, first, last))

        def send(self, *arrays):
            moved.append((self.name, "sent", arrays[0].shape))

        def fetch(self, *arrays):
            moved.append((self.name, "fetched", arrays[0].shape))

    x, program = zeros((4, 8), np.float32), Program()
    for rows in (None, x, x):
        if rows is not None:
            program.transfer(step, rows)
        for _ in range(2):
            program.add(ops.GATE, ("silu",), step=step, gate=x, up=x, y=x, n=8)
    split = SplitBackend(Noted("rows"), Noted("own"))
    linked = split.link(program)
    assert linked.sides == (4, 2)
    split.run(linked, 1, 3)
    one = (1, 8)
    expected = [("rows", 1, 2), ("rows", "fetched", one), ("own", "sent", one), ("own", 0, 1)]
    assert moved == expected
    moved.clear()
    split.run(linked, 3)
    expected = [("own", 1, 2), ("own", "fetched", one), ("rows", "sent", one), ("rows", 2, 4)]
    assert moved == expected
