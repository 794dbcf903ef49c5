"""Reuse of chunks at other positions: what is found, moved and left."""

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.engine.reuse.moved_chunks import move_chunks


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("m") / "m.gguf", TinySpec())
    engine = Engine.load(path, n_threads=1)
    yield engine
    engine.close()


A, B, C, D = (list(range(n, n + 20)) for n in (5, 40, 80, 120))


@pytest.mark.parametrize(
    ("held", "prompt", "least", "n"),
    [
        ([*A, *B, *C], [*A, *C, 9], 8, 40),
        ([*A, *B, *C], [*A, *C, 9], 21, 20),  # too short
        ([*A, *B, *C, *B, *D], [*A, *C, *D], 8, 60),  # two parts are gone
        ([*A, *B, *C[:9]], [*A, *C], 8, 29),
        ([*A, *B], [*A, *C], 8, 20),
        ([*A, *C], [*A, *B, *C], 8, 20),  # what comes in between is new: nothing moves up
    ],
)
def test_the_earliest_chunks_move_to_their_places(engine, held, prompt, least, n):
    session = engine.session(n_ctx=128, n_ubatch=32)
    session.prefill(held)
    assert move_chunks(session, prompt, 20, least) == n
    assert session.tokens[:n] == prompt[:n]


def test_what_moves_is_what_a_context_shift_leaves(engine):
    found = []
    for shift in (True, False):
        session = engine.session(n_ctx=128, n_ubatch=32)
        session.prefill([*A, *B, *C])
        if shift:
            session.remove(20, 40)
        else:
            move_chunks(session, [*A, *C], 20, 8)
        found.append(session.decode(3))
    np.testing.assert_array_equal(*found)
