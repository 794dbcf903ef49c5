"""Methods on keys that are no numbers: they choose something, and end."""

import numpy as np
import pytest
from guarded import fork_and_wait
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine

TACTIC = "tactic:recent=16,sink=4"
METHODS = [
    f"{TACTIC},segment=32,c=8",
    f"{TACTIC},segment=0,rows=head",
    f"{TACTIC},sample=64,outside=apart",
    f"{TACTIC},sample=64,rows=joint",
    "snapkv",
    "h2o",
    "quest",
]
N_PROMPT = 400


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec())
    engine = Engine.load(path, n_threads=2)
    yield engine
    engine.close()


@pytest.mark.parametrize("method", METHODS)
def test_a_method_chooses_something_among_keys_that_are_no_numbers(engine, method):
    prompt = [5 + i % 280 for i in range(N_PROMPT)]
    right = engine.session(512, 32, method)  # compiles what is missing
    right.prefill(prompt)
    right.decode(7)

    def work():
        for value, step in ((np.nan, 1), (np.nan, 97), (np.inf, 97)):
            session = engine.session(512, 32, method)
            session.prefill(prompt)
            for pages in session._stages[0].kv.arrays:
                pages[:64].reshape(-1)[::step] = value  # those that there can be
            for _ in range(3):
                session.decode(9)
                for layer in range(engine.hp.n_layer):
                    chosen = session.selected(layer)
                    assert len(chosen.positions) in (engine.hp.n_head_kv, engine.hp.n_head)
                    for row, mask in zip(chosen.positions, chosen.mask, strict=True):
                        assert 0 < len(row) <= session.n_past
                        assert (np.diff(row) > 0).all()
                        assert 0 <= row[0] <= row[-1] < session.n_past
                        assert np.flatnonzero(mask).tolist() == row.tolist()

    fork_and_wait(work)
