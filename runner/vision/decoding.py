"""Pictures of strangers, decoded to RGB by Pillow; their sizes are checked before."""

import importlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

# Formats that are opened. SVG is a program, and the others of Pillow's are rare and little tested.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM", "TIFF")
MOST_BYTES = 32 << 20  # of a file
MOST_PIXELS = 64 << 20  # of a picture: 192 MiB as RGB
MOST_SIDE = 1 << 15
_RAW_16 = ("I", "I;16", "I;16B", "I;16L", "I;16N")  # modes of 16-bit gray
_FLOAT = "F"


class PictureError(ValueError):
    """The picture cannot be used; the message says why, and what to do."""


def decode(data: bytes) -> np.ndarray:
    """The pixels of a picture's first frame, uint8 [height, width, 3], upright.

    An EXIF orientation is applied, transparent pixels lie on white, 16-bit samples keep their high
    bytes, and CMYK becomes RGB. Raises PictureError; ImportError without the extra `vision`.
    """
    if len(data) > MOST_BYTES:
        raise PictureError(
            f"the picture has {len(data)} bytes, expected at most {MOST_BYTES}: make it smaller"
        )
    if _is_svg(data):
        raise PictureError("the picture is SVG, which is not drawn: convert it to PNG")
    with _opened(data) as image:
        _check_size(*image.size)
        try:
            image.seek(0)
            image.load()
            return np.asarray(_rgb(_upright(image)), np.uint8)
        except (OSError, ValueError, SyntaxError, EOFError, MemoryError) as error:
            raise PictureError(f"the picture is damaged: {error}: save it again") from None
        except Exception as error:  # decoders of many formats raise what they like
            what = f"{type(error).__name__}: {error}"
            raise PictureError(f"the picture is damaged: {what}: save it again") from None


def warm() -> None:
    """Import what `decode` needs. Without Pillow nothing: `decode` says so."""
    with suppress(ImportError):
        from PIL import Image

        Image.init()
        importlib.import_module("PIL.ImageOps")


def size_of(data: bytes) -> tuple[int, int]:
    """The width and height that a picture's header says. Raises PictureError."""
    with _opened(data) as image:
        width, height = image.size
    return width, height


@contextmanager
def _opened(data: bytes) -> Iterator[Any]:
    """The picture with its header read. Raises PictureError for what is none."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise ImportError("pictures need Pillow: pip install 'tamis[vision]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sizes, which are checked here, and of odd metadata
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError:
            known = ", ".join(FORMATS)
            raise PictureError(f"the file is no picture of a known format ({known})") from None
        except Image.DecompressionBombError:
            raise PictureError(_too_large("more pixels than any picture has")) from None
        except Exception as error:
            raise PictureError(f"the picture is damaged: {error}: save it again") from None
        with image:
            yield image


def _check_size(width: int, height: int) -> None:
    """Raise PictureError for a picture without pixels, or with too many."""
    if width < 1 or height < 1:
        raise PictureError(f"the picture is {width} x {height}, it has no pixels")
    if width * height > MOST_PIXELS or max(width, height) > MOST_SIDE:
        raise PictureError(_too_large(f"{width} x {height} pixels"))


def _too_large(what: str) -> str:
    return (
        f"the picture has {what}, expected at most {MOST_PIXELS} in all and {MOST_SIDE} a side: "
        "make it smaller"
    )


def _is_svg(data: bytes) -> bool:
    head = data[:4096].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return head.startswith((b"<svg", b"<?xml", b"<!doctype svg")) or b"<svg" in head[:1024]


def _upright(image: Any) -> Any:
    """The picture turned as its EXIF data asks; damaged EXIF data is ignored."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def _rgb(image: Any) -> Any:
    """The picture in RGB, on white where it is transparent."""
    from PIL import Image

    if image.mode in _RAW_16:
        samples = np.asarray(image).astype(np.int64)
        high = samples >> 8 if samples.max(initial=0) > 255 else samples
        image = Image.fromarray(np.clip(high, 0, 255).astype(np.uint8))
    elif image.mode == _FLOAT:
        samples = np.nan_to_num(np.asarray(image), nan=0.0, posinf=255.0, neginf=0.0)
        image = Image.fromarray(np.clip(samples, 0, 255).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        clear = image.convert("RGBA")
        white = Image.new("RGBA", clear.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, clear)
    return image.convert("RGB")
