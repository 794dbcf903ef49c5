"""Pictures in messages of a Llama, and llama_cpp's names of handlers that read them."""

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tamis.bindings.drop_in.chat import PICTURE
from tamis.bindings.drop_in.completion import Chunk

Message = Mapping[str, Any]


class MTMDChatHandler:
    """A handler that has a model's encoder of pictures: Llama(path, chat_handler=handler).

    The conversation is written by the model's own template, and the mmproj file says how pictures
    are cut, so that the handlers of all families are one. Override `load_image` for other URLs than
    data: URLs; none is fetched here.
    """

    def __init__(self, clip_model_path: str, verbose: bool = True, **_: Any) -> None:
        """Take the path of an mmproj file, which the Llama opens."""
        self.clip_model_path, self.verbose = clip_model_path, verbose

    def __call__(self, *, llama: Any, **given: Any) -> Chunk | Iterator[Chunk]:
        """A chat completion, or an iterator of its chunks."""
        found: Chunk | Iterator[Chunk] = llama._chat(given)
        return found

    def load_image(self, image_url: str) -> bytes:
        """The bytes of a picture's file. Raises ValueError for what is no data: URL."""
        return load_image(image_url)


def load_image(image_url: str) -> bytes:
    """The bytes of a data: URL in base64. Raises ValueError."""
    head, comma, data = image_url.partition(",")
    if not (head.startswith("data:image/") and head.endswith(";base64") and comma):
        raise ValueError(
            f"a picture's URL is {image_url[:40]!r}, expected data:image/png;base64,...: read the "
            "file and encode it, or override the chat handler's load_image"
        )
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"a picture is no base64: {error}") from None


def marked(messages: Sequence[Message], mark: Callable[[str], str]) -> list[Message]:
    """Messages with marks in place of parts that are pictures; mark: that of a URL."""
    return [
        {**message, "content": [_part(part, mark) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _part(part: Any, mark: Callable[[str], str]) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != "image_url":
        return part
    url = part.get("image_url")
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str):
        raise ValueError("a picture has no URL: expected image_url with a url")
    return {"type": PICTURE, "text": mark(url)}
