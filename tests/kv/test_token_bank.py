"""The token bank of the disk tier: what decode attention reads where a part is in memory."""

import os

import numpy as np
import pytest
from precompiled import compile_for
from tier_cases import N_CTX, check_same, ids_of, session_of
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.types import UNITS
from tamis.kv.unit_file import KVFileError

METHODS = [
    "hip:k=128,b_k=2,l_d=1,local=64", "hip:k=128,b_k=16,r_m=4,rows=head", "quest:budget=256",
    "topk:k=64", "lfps", "cpe", "hip:k=128,b_k=4,rep=centre",
]  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("bank") / "m.gguf"
    write_tiny_model(path, TinySpec("llama", "F32", layers=6, n_ctx=2 * N_CTX))
    engine = Engine.load(path, n_threads=2)
    compile_for(engine, [{"n_ctx": PAGE, "attn": attn} for attn in METHODS], 9, 9)
    yield engine
    engine.close()


@pytest.mark.parametrize("attn", METHODS)
def test_logits_are_those_of_a_session_in_memory(engine, tmp_path, attn):
    tiered, whole = session_of(engine, tmp_path, 240, attn=attn), engine.session(N_CTX, 128, attn)
    check_same(tiered, whole, 3000, 70)  # a page is begun, and the one before it written
    n_hit, n_miss, n_read = tiered._kv._bank.counted
    assert n_hit > 0 < n_miss
    assert n_read > 0
    for session in (tiered, whole):
        session.truncate(2000)
    check_same(tiered, whole, 500, 5)


@pytest.mark.parametrize("unit", UNITS)
def test_units_of_the_file_may_be_smaller_and_larger(engine, tmp_path, unit):
    attn = "quest:budget=256"
    tiered = session_of(engine, tmp_path, 240, attn=attn, kv_unit=unit)
    check_same(tiered, engine.session(N_CTX, 128, attn), 2000, 8)
    assert tiered._kv._bank.counted[1] > 0


def test_what_a_step_reads_costs_no_stop_but_in_dense_layers(engine, tmp_path):
    tiered = session_of(engine, tmp_path, 240, attn=METHODS[0])
    tiered.prefill(ids_of(2000))
    for token in range(3, 6):
        tiered.decode(token)
    (stage,) = tiered.forward._stages
    program = stage.decoded[1]
    due = tiered._kv.due(program, tiered._kv.stops(program))
    assert len(due) == 1  # the first layer's attention
    assert len(tiered._kv.stops(program)) > 10


def test_dense_attention_of_all_layers_shares_no_memory_with_a_bank(engine, tmp_path):
    """Each layer reads all keys: what is kept of single tokens would be taken from them."""
    tiered = session_of(engine, tmp_path, 240)
    before = tiered.kv_counts
    check_same(tiered, engine.session(N_CTX, 128), 2000, 4)
    assert tiered._kv._bank is None
    assert before.n_chosen == 0 < tiered.kv_counts.n_chosen, "counts are those of their time"


def test_a_file_that_somebody_wrote_to_is_never_read_as_keys(engine, tmp_path):
    attn = METHODS[0]
    tiered = session_of(engine, tmp_path, 240, attn=attn)
    tiered.prefill(ids_of(3000))
    file = tiered._kv._file.handle
    os.pwrite(file, b"\5" * os.fstat(file).st_size, 0)
    with pytest.raises(KVFileError, match="context of this session is lost; start again"):
        tiered.decode(9)
    tiered.truncate(0)
    check_same(tiered, engine.session(N_CTX, 128, attn), 300)
    np.testing.assert_array_equal(tiered._kv._bank.failed(), False)
