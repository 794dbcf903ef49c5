"""Session files of sequences with pictures: they go on without the pictures."""

import numpy as np
import pytest

from tamis.engine.engine import Engine
from tamis.engine.session_file import SessionFile, SessionFileError, write
from tests.support.kit_models import write_kit_model
from tests.support.mmproj_files import write_mmproj
from tests.vision.test_encoders import WIDTH, picture, png

pytestmark = pytest.mark.slow
MODELS = {"gemma3": "gemma3-dense", "qwen2vl_merger": "qwen2vl-dense"}  # the second in a grid
TEXT = [5, 6, 7]


@pytest.fixture(scope="module", params=MODELS)
def files(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sessions")
    model = write_kit_model(MODELS[request.param], folder / "model.gguf")
    return model, write_mmproj(folder / "mmproj-model.gguf", request.param, WIDTH)


@pytest.fixture(scope="module")
def saved(files, tmp_path_factory):
    """A file of a session with two pictures, and the logits after more text."""
    path = tmp_path_factory.mktemp("saved") / "a.session"
    with Engine.load(files[0], mmproj=files[1], prepare=False) as engine:
        ids = [2, *engine.picture_ids(png(picture(80, 60, 1))), 3]
        ids += [*engine.picture_ids(png(picture(60, 60, 2))), 4]
        with engine.session(n_ctx=256) as session:
            session.prefill(ids)
            session.save(path)
            return path, ids, session.prefill(TEXT)


def test_a_conversation_goes_on_without_its_pictures(files, saved):
    path, ids, logits = saved
    with Engine.load(files[0], prepare=False) as engine, engine.session(n_ctx=256) as session:
        session.load(path)
        assert session.tokens == ids
        assert np.array_equal(session.prefill(TEXT), logits)
        again = path.with_name("b.session")
        session.truncate(len(ids))
        session.save(again)
        session.truncate(0)
        session.load(again)
        assert np.array_equal(session.prefill(TEXT), logits)


def test_the_same_picture_is_a_prefix_of_what_was_loaded(files, saved):
    path, ids, _ = saved
    with Engine.load(files[0], mmproj=files[1], prepare=False) as engine:
        assert engine.picture_ids(png(picture(80, 60, 1))) == ids[1 : ids.index(3)]
        with engine.session(n_ctx=256) as session:
            session.load(path)
            session.truncate(1)
            first = ids[1 : ids.index(3) + 1]
            session.prefill(first)
            assert session.tokens == [2, *first]
            with pytest.raises(ValueError, match="encode the picture again"):
                session.prefill(ids[len(first) + 1 :])


@pytest.mark.parametrize(
    "grids", [[[0, 0]], [[3, 1]], [[3, -4]], [[3, -1], [3, -1]], [[999, -1]], [3], "x", [[3.0, 0]]]
)
def test_damaged_grids_are_refused(files, saved, grids):
    path, ids, logits = saved
    bad = path.with_name("bad.session")
    with SessionFile(path) as good:
        header = good.header | {"grids": grids}
        arrays = [np.array(x) for x in good.arrays([size for size, _ in good._table])]
    write(bad, header, arrays)
    with Engine.load(files[0], prepare=False) as engine, engine.session(n_ctx=256) as session:
        session.load(path)
        with pytest.raises(SessionFileError, match="grid"):
            session.load(bad)
        assert session.tokens == ids
        assert np.array_equal(session.prefill(TEXT), logits)


def test_a_method_that_learns_from_the_last_tokens_reads_a_held_picture_again(files):
    with Engine.load(files[0], mmproj=files[1], prepare=False) as engine:
        ids = [2, *engine.picture_ids(png(picture(80, 60, 1)))]
        with engine.session(n_ctx=256, attn="snapkv") as session:
            session.prefill(ids)
            assert session._stages[0].state.n_recall
            session.recall()
        engine.loaded.pictures._at.clear()
        with engine.session(n_ctx=256, attn="snapkv") as session:
            session._tokens = ids
            with pytest.raises(ValueError, match="a picture that is not held"):
                session.recall()
            session._tokens = []
