"""Encoders of pictures and the logits of texts after them, against llama.cpp's mtmd."""

import io

import gguf
import numpy as np
import pytest
from PIL import Image

from tamis.engine.engine import Engine
from tamis.vision.family import Rows
from tests.support.kit_models import write_kit_model
from tests.support.kit_runs import nmse
from tests.support.mmproj_files import write_mmproj
from tests.support.mtmd_oracle import MARKER, MtmdOracle

pytestmark = pytest.mark.slow
MODELS = {
    "gemma3": "gemma3-dense",
    "qwen2vl_merger": "qwen2vl-dense",
    "qwen2.5vl_merger": "qwen2vl-dense",
    "qwen3vl_merger": "qwen3vl-dense",
    "pixtral": "mistral3-dense",
    "idefics3": "llama-dense",
    "internvl": "qwen2-dense",
}
NO_LOGITS = ("idefics3",)  # mtmd does not go on without the tokens of its marks

WIDTH = 256  # of the rows of these models
NEW_LINE = 2  # its id in the vocabulary of the kit
# Rows: mtmd's products and its table of GELU are float16's. Logits: of float32 rows.
MOST = 1e-4


def picture(width: int, height: int, seed: int) -> np.ndarray:
    """Coarse random squares, so that resampling does not leave a plain gray."""
    squares = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.kron(squares[::8, ::8], np.ones((8, 8, 1), np.uint8))[:height, :width]


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def mtmd():
    pytest.importorskip("xllamacpp", reason="mtmd is in the wheel xllamacpp, no dependency of ours")
    return MtmdOracle()


@pytest.fixture(scope="module", params=MODELS)
def files(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    model = write_kit_model(MODELS[request.param], folder / "model.gguf")
    return model, write_mmproj(folder / "mmproj-model.gguf", request.param, WIDTH)


@pytest.fixture(scope="module")
def engine(files):
    model, mmproj = files
    with_pictures = Engine.load(model, mmproj=mmproj, prepare=False)
    yield with_pictures
    with_pictures.close()


@pytest.mark.parametrize("size", [(80, 60), (56, 56), (200, 100), (30, 90)])
def test_rows_of_a_picture_are_mtmds(mtmd, files, engine, size):
    pixels = picture(*size, seed=size[0])
    seen = mtmd.see(*files, MARKER, [pixels])
    expected = [rows for rows in seen.chunks if not isinstance(rows, list)]
    found = [part.values for part in engine.encoder.embed_pixels(pixels) if isinstance(part, Rows)]
    assert [x.shape for x in found] == [x.shape for x in expected]
    for own, other in zip(found, expected, strict=True):
        assert np.square(own - other).mean() / np.square(other).mean() < MOST


@pytest.mark.parametrize("before", [0, 2, 6])
def test_logits_after_two_pictures_are_mtmds(mtmd, files, engine, before):
    if engine.encoder.params.projector in NO_LOGITS:
        pytest.skip("mtmd needs tokens that the kit's vocabulary lacks")
    a, b = picture(80, 60, 1), picture(100, 140, 2)
    lines = ["\n" * before, "\n", "\n\n"]
    seen = mtmd.see(*files, MARKER.join(lines), [a, b])
    ids = [NEW_LINE] * before + engine.picture_ids(png(a)) + [NEW_LINE]
    ids += engine.picture_ids(png(b)) + [NEW_LINE] * 2
    with engine.session(n_ctx=256) as session:
        found = session.prefill(ids)
        assert session.n_past == len(ids)
    assert nmse(found[None], seen.logits[None]).max() < MOST
    assert int(found.argmax()) == int(seen.logits.argmax())


def test_a_picture_is_recognised_as_a_prefix(engine):
    ids = engine.picture_ids(png(picture(80, 60, 1)))
    assert ids == engine.picture_ids(png(picture(80, 60, 1)))
    assert ids != engine.picture_ids(png(picture(80, 60, 3)))
    with engine.session(n_ctx=256) as session:
        whole = session.prefill([2, 2, *ids, 2, 2])
        session.truncate(2 + len(ids))
        assert np.array_equal(session.tokens, [2, 2, *ids])
        assert np.allclose(session.prefill([2, 2]), whole, atol=1e-4)


def test_a_cut_picture_is_refused_where_its_rows_see_each_other(engine):
    if engine.encoder.family.causal:
        pytest.skip("rows of these pictures see only earlier ones: a part of them is a prefix")
    ids = engine.picture_ids(png(picture(80, 60, 1)))
    with engine.session(n_ctx=256) as session, pytest.raises(ValueError, match="see each other"):
        session.prefill([2, *ids[:-1], 2])


def test_a_picture_without_an_encoder_is_an_error(files):
    with_text = Engine.load(files[0], prepare=False)
    with pytest.raises(ValueError, match="without an encoder of pictures"):
        with_text.embed_image(png(picture(80, 60, 1)))
    with_text.close()


def test_rows_of_early_layers_are_mtmds(mtmd, tmp_path):
    """Qwen3-VL's further rows, and logits of a text model that adds them to its first layer."""
    model = write_kit_model("qwen3vl-dense", tmp_path / "model.gguf")
    field = gguf.GGUFReader(model, "r+").fields["qwen3vl.n_deepstack_layers"]
    field.parts[field.data[0]][0] = 1  # in the file, which is mapped
    arrays = {"vision.is_deepstack_layers": [True, False, False]}
    more = {"deep": (0,), "arrays": arrays}
    mmproj = write_mmproj(tmp_path / "mmproj.gguf", "qwen3vl_merger", WIDTH, more)
    a, b = picture(80, 60, 1), picture(100, 140, 2)
    with Engine.load(model, mmproj=mmproj, prepare=False) as engine:
        seen = mtmd.see(model, mmproj, "\n\n".join([MARKER, MARKER, ""]), [a, b])
        rows_of = [x for x in seen.chunks if not isinstance(x, list)]
        for pixels, expected in zip((a, b), rows_of, strict=True):
            rows = engine.embed_image(png(pixels))
            assert rows.shape == expected.shape == (len(rows), 2 * WIDTH)
            assert nmse(rows.T, expected.T).max() < MOST
        ids = engine.picture_ids(png(a)) + [NEW_LINE] * 2
        ids += engine.picture_ids(png(b)) + [NEW_LINE] * 2
        with engine.session(n_ctx=256) as session:
            assert nmse(session.prefill(ids)[None], seen.logits[None]).max() < MOST
