"""Pictures in requests: where they come from, what is allowed, and the ids that stand for them.

Strangers' pictures are decoded in the process that `http.helper` forks for a request. The process
that runs the model gets tiles of pixels, whose sizes the encoder's family has chosen.
"""

import base64
import binascii
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote, urlsplit

from tamis.bindings.serve.errors import ApiError, invalid
from tamis.text import picture_marks

if TYPE_CHECKING:
    import numpy as np

    from tamis.vision.families.load import Cutter

MARKER = "<__media__>"  # stands for a picture in a prompt_string, as in llama.cpp
MAX_PICTURES = 256  # of a request
MOST_FILE = 32 << 20  # bytes of a file that is fetched
MOST_TILES = 256 << 20  # bytes of the pixels of a request after preprocessing
SECONDS = 10.0  # that a URL's host may be silent
_IMAGES = ("image", "input_image", "image_url")  # types of parts of messages
Tile = tuple[int, int, str]  # height, width, base64 of uint8 [height, width, 3]


class Rules(NamedTuple):
    """Whether pictures are read, and what they may be fetched from."""

    mmproj: str = ""  # the file of the encoder; "": pictures are refused
    folder: str = ""  # the only folder of file:// URLs; "": these are refused
    hosts: tuple[str, ...] = ()  # of http(s) URLs: lower case, with ":port" where it is unusual


NONE = Rules()


class NeedsHelper(Exception):
    """The request has a picture, which this process does not decode."""


class Media:
    """The pictures of one request after the other. One call at a time."""

    def __init__(self, rules: Rules = NONE, cutter: "Cutter | None" = None) -> None:
        """Take the rules; cutter: None where pictures are not decoded: see `NeedsHelper`."""
        self._rules, self._cutter = rules, cutter
        self._numbers: dict[tuple[str, str], int] = {}
        self._pieces: list[list[str | tuple[bytes, int]]] = []
        self._tiles: dict[bytes, Tile] = {}
        self._n_byte = self._n_picture = 0

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The tiles of all pictures that were marked, each once."""
        return tuple(self._tiles.values())

    def marked(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Messages with marks in place of the parts that are pictures. Raises ApiError."""
        return [
            message | {"content": [self._part(part) for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    def _part(self, part: Any) -> Any:
        url = url_of(part)
        return part if url is None else {"type": "picture", "text": self.mark(url, "messages")}

    def mark(self, source: str, name: str) -> str:
        """The mark of a picture by its URL. Raises ApiError naming the field, NeedsHelper."""
        return self._mark("url", source, name, lambda: self._of_url(source, name))

    def mark_base64(self, data: str, name: str) -> str:
        """The mark of a picture in base64. Raises ApiError naming the field, NeedsHelper."""
        return self._mark("base64", data, name, lambda: decoded(data, name))

    def filled(self, text: str, pictures: Any, name: str) -> str:
        """A text with the marks of pictures in base64 in place of MARKER, in order."""
        if not isinstance(pictures, list) or not all(isinstance(p, str) for p in pictures):
            raise invalid("multimodal_data is no list of texts in base64", name)
        n = text.count(MARKER)
        if n != len(pictures):
            raise invalid(
                f"{name} has {n} {MARKER} and {len(pictures)} pictures in multimodal_data: write "
                f"{MARKER} where each belongs",
                name,
            )
        texts = text.split(MARKER)
        marks = [self.mark_base64(data, name) for data in pictures]
        return "".join(a + b for a, b in zip(texts, [*marks, ""], strict=True))

    def ids_of(
        self, encode_parts: Callable[[Sequence[tuple[str, bool]]], list[int]]
    ) -> Callable[[int], list[int]]:
        """A function from a mark's number to the ids of its picture."""

        def ids(number: int) -> list[int]:
            from tamis.vision.held import row_ids

            found: list[int] = []
            for piece in self._pieces[number]:
                own = encode_parts([(piece, True)]) if isinstance(piece, str) else row_ids(*piece)
                found += own
            return found

        return ids

    def _mark(self, kind: str, source: str, name: str, read: Callable[[], bytes]) -> str:
        if not self._rules.mmproj:
            raise invalid(
                "image input is not supported: this model was started without an mmproj file, its "
                "encoder of pictures: start the server with --mmproj FILE, or leave pictures out",
                name,
            )
        if self._cutter is None:
            raise NeedsHelper
        self._n_picture += 1
        if self._n_picture > MAX_PICTURES:
            raise invalid(f"{name} has more pictures than {MAX_PICTURES}: send fewer", name)
        if (kind, source) not in self._numbers:
            self._numbers[kind, source] = self._add(self._cutter, read(), name)
        return picture_marks.mark(self._numbers[kind, source])

    def _add(self, cutter: "Cutter", data: bytes, name: str) -> int:
        from tamis.vision.decoding import PictureError, decode

        try:
            pieces = cutter.cut(decode(data))
        except PictureError as error:
            raise invalid(str(error), name) from None
        found: list[str | tuple[bytes, int]] = []
        for piece in pieces:
            if isinstance(piece, str):
                found.append(piece)
                continue
            key = cutter.key(piece)
            found.append((key, cutter.n_row(piece)))
            if key not in self._tiles:
                self._tiles[key] = packed(piece)
                self._n_byte += piece.nbytes
        if self._n_byte > MOST_TILES:
            raise invalid(
                f"the pictures have {self._n_byte} bytes of pixels, expected at most {MOST_TILES}: "
                "send fewer, or smaller ones",
                name,
            )
        self._pieces.append(found)
        return len(self._pieces) - 1

    def _of_url(self, url: str, name: str) -> bytes:
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return self._of_data_url(url, name)
        if scheme == "file":
            return self._of_file(url, name)
        if scheme in ("http", "https"):
            return self._fetched(url, name)
        raise invalid("a picture's URL is not one of data:, file:, http: and https:", name)

    @staticmethod
    def _of_data_url(url: str, name: str) -> bytes:
        head, comma, data = url[len("data:") :].partition(",")
        kind, *more = head.lower().split(";")
        if not comma or "base64" not in more:
            raise invalid("a data: URL is not in base64: expected data:image/png;base64,...", name)
        if not kind.startswith("image/"):
            raise invalid(f"a data: URL is of type {kind[:60]!r}, expected image/...", name)
        return decoded(data, name)

    def _of_file(self, url: str, name: str) -> bytes:
        folder = self._rules.folder
        if not folder:
            raise invalid(
                "file:// URLs are not allowed: start the server with --media-path DIR", name
            )
        asked = unquote(url[len("file:") :]).lstrip("/")
        top = os.path.realpath(folder)
        # A path below the folder, or the whole path of a file in it.
        for path in (os.path.join(top, asked), "/" + asked):
            real = os.path.realpath(path)
            if os.path.commonpath([top, real]) == top and Path(real).is_file():
                with Path(real).open("rb") as file:
                    return _limited(file, name)
        raise invalid("a file:// URL is of no file in the folder of --media-path", name)

    def _fetched(self, url: str, name: str) -> bytes:
        self._check_host(url, name)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler(), _Stays(self, name))
        try:
            with opener.open(url, timeout=SECONDS) as reply:
                return _limited(reply, name)
        except ApiError:
            raise
        except urllib.error.HTTPError as error:
            raise invalid(f"a picture's URL answers with status {error.code}", name) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", error))[:200]
            raise invalid(f"a picture's URL cannot be read: {reason}", name) from None

    def _check_host(self, url: str, name: str) -> None:
        """Raise ApiError for a URL of a host that is not allowed."""
        try:
            parts = urlsplit(url)
            port, host = parts.port, (parts.hostname or "").lower()
        except ValueError:
            raise invalid("a picture's URL is malformed", name) from None
        usual = {"http": 80, "https": 443}.get(parts.scheme.lower())
        asked = host if port in (None, usual) else f"{host}:{port}"
        if usual is None or not host or asked not in self._rules.hosts:
            raise invalid(
                "a picture's URL is of a host that is not allowed: send the picture as a data: "
                f"URL, or start the server with --media-url {asked[:100] or 'HOST'}",
                name,
            )


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows redirections to allowed hosts only."""

    def __init__(self, media: Media, name: str) -> None:
        self._media, self._name = media, name

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        self._media._check_host(newurl, self._name)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def url_of(part: Any, name: str = "messages") -> str | None:
    """The URL of a part of a message that is a picture, else None. Raises ApiError naming a field.

    OpenAI's chat has an object with a url, its Responses a text.
    """
    if not isinstance(part, dict) or part.get("type") not in _IMAGES:
        return None
    found = part.get("image_url", part.get(part["type"]))
    if isinstance(found, dict):
        found = found.get("url")
    if not isinstance(found, str):
        raise invalid("a picture has no URL: expected image_url with a url", name)
    return found


def part_of_base64(data: str, kind: str = "image/*") -> dict[str, Any]:
    """A part of OpenAI's messages for a picture in base64; kind: its type."""
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def decoded(data: str, name: str) -> bytes:
    """The bytes of a text in base64. Raises ApiError."""
    try:
        found = base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError):
        raise invalid("a picture is no base64", name) from None
    if not found:
        raise invalid("a picture has no bytes", name)
    return found


def packed(tile: "np.ndarray") -> Tile:
    """A tile as a record for JSON."""
    height, width = tile.shape[:2]
    return height, width, base64.b64encode(tile.tobytes()).decode()


def unpacked(record: Sequence[Any]) -> "np.ndarray":
    """The tile of a record of `packed`. Raises ValueError, TypeError if it is malformed."""
    import numpy as np

    height, width, data = record
    return np.frombuffer(base64.b64decode(data), np.uint8).reshape(int(height), int(width), 3)


def _limited(file: Any, name: str) -> bytes:
    """The bytes of a file of a limited size. Raises ApiError."""
    data: bytes = file.read(MOST_FILE + 1)
    if len(data) > MOST_FILE:
        raise invalid(f"a picture has more than {MOST_FILE} bytes: make it smaller", name)
    return data
