"""Pictures in chats of a Llama."""

import base64

import pytest

from tamis.bindings.compat import Llama
from tamis.bindings.drop_in.pictures import MTMDChatHandler, load_image, marked
from tests.support.kit_models import write_kit_model
from tests.support.mmproj_files import write_mmproj
from tests.vision.test_encoders import WIDTH, picture, png

URL = "data:image/png;base64," + base64.b64encode(png(picture(80, 60, 1))).decode()


def asked(url, text="what"):
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "url", ["http://a/b.png", "file:///a.png", "a.png", "data:text/plain;base64,YQ==", ""]
)
def test_only_data_is_loaded(url):
    with pytest.raises(ValueError, match="expected data:image/png;base64"):
        load_image(url)


def test_what_is_no_base64_is_refused():
    with pytest.raises(ValueError, match="no base64"):
        load_image("data:image/png;base64,%")


def test_parts_that_are_pictures_get_marks():
    given = [*asked("u"), {"role": "user", "content": "text"}]
    given[0]["content"].append({"type": "image_url", "image_url": "v"})
    found = marked(given, lambda url: f"<{url}>")
    kinds = [part["text"] for part in found[0]["content"]]
    assert kinds == ["<u>", "what", "<v>"]
    assert found[1] == given[1]
    with pytest.raises(ValueError, match="no URL"):
        marked([{"role": "user", "content": [{"type": "image_url"}]}], str)


class Fetching(MTMDChatHandler):
    """Loads pictures by names of its own."""

    def load_image(self, image_url):
        return png(picture(80, 60, 1)) if image_url == "own:1" else super().load_image(image_url)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("projector", "model"), [("gemma3", "gemma3-dense"), ("qwen2vl_merger", "qwen2vl-dense")]
)
def test_a_llama_sees(tmp_path, projector, model):
    path = str(write_kit_model(model, tmp_path / "model.gguf"))
    handler = Fetching(str(write_mmproj(tmp_path / "mmproj.gguf", projector, WIDTH)))
    how = {"max_tokens": 3, "temperature": 0.0}
    with Llama(path, n_ctx=256, n_batch=32, chat_format="chatml", chat_handler=handler) as llama:
        first = llama.create_chat_completion(asked(URL), **how)
        own = llama.create_chat_completion(asked("own:1"), **how)
        assert own["choices"][0]["message"] == first["choices"][0]["message"]
        assert own["usage"] == first["usage"]
        more = llama.create_chat_completion(asked(URL, "\n\n\n"), **how)
        assert more["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]
        assert [*llama.create_chat_completion(asked(URL), stream=True, **how)]
        with pytest.raises(ValueError, match="expected data:"):
            llama.create_chat_completion(asked("http://a"), **how)
    with (
        Llama(path, n_ctx=256, chat_format="chatml") as llama,
        pytest.raises(ValueError, match="MTMDChatHandler"),
    ):
        llama.create_chat_completion(asked(URL), **how)
