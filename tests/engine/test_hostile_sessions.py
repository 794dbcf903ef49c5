"""Session files with right checksums and wrong contents: an error, and the session as it was."""

import json

import numpy as np
import pytest
from guarded import fork_and_wait
from precompiled import compile_for
from tiny_models import TinySpec, write_tiny_model

from tamis.engine import session_file
from tamis.engine.engine import Engine
from tamis.engine.session import ContextError, SessionFileError
from tamis.jit_kernels.contract.types import kv_row
from tamis.kv.convert import all_finite

METHODS = ["dense", "snapkv:budget=60,window=8", "h2o:budget=60,s=16", "lfps", "tactic:c=4,local=8"]
IDS = list(range(3, 43))


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "m.gguf"
    engine = Engine.load(write_tiny_model(path, TinySpec("llama", "F32")), n_threads=1)
    compile_for(engine, [{"n_ctx": 256, "attn": attn} for attn in METHODS], 40, 3)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
    """Header and arrays of a right file."""
    path = tmp_path_factory.mktemp("saved") / "s"
    session = engine.session(256)
    session.prefill(IDS)
    session.save(path)
    hp = engine.hp
    row = len(IDS) * hp.n_head_kv * hp.head_dim * 2
    with session_file.SessionFile(path) as file:
        return file.header, list(file.arrays([row] * 2 * hp.n_layer))


def changed(**values):
    return lambda header, arrays: (header | values, arrays)


WRONG = {
    "a token beyond the vocabulary": changed(tokens=[*IDS[:-1], 2**31 - 1]),
    "all tokens beyond": changed(tokens=[2**31 - 1] * len(IDS)),
    "a token of 64 bits": changed(tokens=[*IDS[:-1], 2**63]),
    "a negative token": changed(tokens=[-1, *IDS[1:]]),
    "a negative token that is said to be nothing": changed(tokens=[-1, *IDS[1:]], compressed=1),
    "a compressed token of 64 bits": changed(tokens=[-(2**31) - 1, *IDS[1:]], compressed=True),
    "a token that is a fraction": changed(tokens=[1.5, *IDS[1:]]),
    "a token that is a switch": changed(tokens=[True, *IDS[1:]]),
    "a token that is a text": changed(tokens=["3", *IDS[1:]]),
    "tokens in a text": changed(tokens="3" * len(IDS)),
    "no tokens": lambda header, arrays: ({k: header[k] for k in ("model", "kv")}, arrays),
    "more tokens than rows": changed(tokens=[*IDS, 3]),
    "fewer tokens than rows": changed(tokens=IDS[:-1]),
    "none of the rows": lambda header, arrays: (header, []),
    "a row short": lambda header, arrays: (header, [*arrays[:-1], arrays[-1][:-2]]),
    "an array more": lambda header, arrays: (header, [*arrays, arrays[0]]),
    "one array of all": lambda header, arrays: (header, [np.concatenate(arrays)]),
    "rows of another type": changed(kv=["q8_0", "q8_0"]),
    "a type that is none": changed(kv=["f16", "f15"]),
    "types that are no texts": changed(kv=[[], {}]),
    "three types": changed(kv=["f16", "f16", "f16"]),
    "types that are a number": changed(kv=7),
    "no model": lambda header, arrays: ({k: header[k] for k in ("tokens", "kv")}, arrays),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("attn", METHODS[:3])
def test_contents_that_are_wrong_are_refused_and_change_nothing(
    engine, saved, tmp_path, attn, wrong
):
    def check():
        header, arrays = WRONG[wrong](*saved)
        session_file.write(tmp_path / "s", json.loads(json.dumps(header)), arrays)
        session, other = engine.session(256, attn=attn), engine.session(256, attn=attn)
        for each in (session, other):
            each.prefill(IDS[::-1])
        with pytest.raises(SessionFileError, match=r"save the session again|for another model"):
            session.load(tmp_path / "s")
        assert session.tokens == IDS[::-1]
        for token in (5, 6, 7):
            np.testing.assert_array_equal(session.decode(token), other.decode(token))

    fork_and_wait(check)  # what is wrong used to end the process


def test_more_tokens_than_the_context_has_room_for_are_refused(engine, saved, tmp_path):
    session_file.write(tmp_path / "s", *saved)
    session = engine.session(32)
    session.prefill([3, 4])
    with pytest.raises(ContextError, match=r"holds 40 tokens, n_ctx is 32"):
        session.load(tmp_path / "s")
    assert session.tokens == [3, 4]


@pytest.mark.parametrize("bits", [0x7E00, 0x7C00, 0xFC00, 0xFFFF])
@pytest.mark.parametrize("at", [0, -1])
def test_a_kv_cache_of_nan_or_infinity_is_refused(engine, saved, tmp_path, bits, at):
    header, arrays = saved
    arrays = [array.copy() for array in arrays]
    arrays[at].view(np.uint16)[7] = bits
    session_file.write(tmp_path / "s", header, arrays)
    session = engine.session(256)
    session.prefill([3, 4])
    with pytest.raises(SessionFileError, match="not numbers"):
        session.load(tmp_path / "s")
    assert session.tokens == [3, 4]


@pytest.mark.parametrize("bits", [0x7E00, 0x7C00, 0xFC00])
@pytest.mark.parametrize("type", ["f16", "q8_0", "q4_0"])
def test_one_element_or_scale_that_is_no_number_is_found(type, bits):
    rows = np.zeros((5, 2), kv_row(type, 64))
    assert all_finite(rows)
    (rows if type == "f16" else rows["d"]).view(np.uint16)[3, 1, 1] = bits
    assert not all_finite(rows)


@pytest.mark.parametrize("attn", METHODS)
def test_a_load_that_fails_half_way_leaves_the_session_as_it_was(
    engine, saved, tmp_path, attn, monkeypatch
):
    session_file.write(tmp_path / "s", *saved)
    session, other = engine.session(256, attn=attn), engine.session(256, attn=attn)
    for each in (session, other):
        each.prefill(IDS[::-1])
    write, left = session._kv.write, iter([0])

    def fail(*arguments):
        write(*arguments)
        if next(left, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr(session._kv, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        session.load(tmp_path / "s")
    monkeypatch.undo()
    assert session.tokens == IDS[::-1]
    for token in (5, 6, 7):
        np.testing.assert_allclose(session.decode(token), other.decode(token), atol=1e-5)
