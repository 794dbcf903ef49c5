"""Pictures of strangers: what is decoded, and what is refused with the reason."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tamis.vision import decoding
from tamis.vision.decoding import PictureError, decode

RNG = np.random.default_rng(5)
PIXELS = RNG.integers(0, 256, (6, 9, 3), dtype=np.uint8)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_of_size(width: int, height: int) -> bytes:
    """A PNG file whose header says this size, and which has next to no data."""

    def part(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = part(b"IHDR", head) + part(b"IDAT", zlib.compress(bytes(10))) + part(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


@pytest.mark.parametrize("kind", ["PNG", "BMP", "PPM", "TIFF"])
def test_lossless_formats_keep_their_pixels(kind):
    assert (decode(saved(Image.fromarray(PIXELS), kind)) == PIXELS).all()


def test_transparent_pixels_lie_on_white():
    clear = np.dstack([PIXELS, np.full(PIXELS.shape[:2], 0, np.uint8)])
    assert (decode(saved(Image.fromarray(clear), "PNG")) == 255).all()


def test_sixteen_bit_gray_keeps_its_high_bytes():
    gray = np.array([[0, 256, 65535]], np.uint16)
    assert decode(saved(Image.fromarray(gray), "PNG"))[0, :, 0].tolist() == [0, 1, 255]


def test_cmyk_becomes_rgb():
    white = Image.new("CMYK", (4, 3), (0, 0, 0, 0))
    assert (decode(saved(white, "JPEG")) > 250).all()


def test_an_exif_orientation_is_applied():
    image, exif = Image.fromarray(PIXELS), Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert (decode(saved(image, "PNG", exif=exif)) == np.rot90(PIXELS, -1)).all()


def test_the_first_frame_of_an_animation_is_taken():
    frames = [Image.new("RGB", (5, 4), color) for color in ("red", "blue", "lime")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data)[0, 0].tolist() == [255, 0, 0]


def test_a_size_is_checked_before_decoding(monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(PictureError, match="more pixels than any picture has, expected at most"):
        decode(png_of_size(30000, 30000))
    with pytest.raises(PictureError, match="expected at most"):
        decode(png_of_size(40000, 1))
    with pytest.raises(PictureError, match="9000 x 9000 pixels, expected at most"):
        decode(png_of_size(9000, 9000))


def test_more_bytes_than_a_picture_has_are_refused(monkeypatch):
    monkeypatch.setattr(decoding, "MOST_BYTES", 10)
    with pytest.raises(PictureError, match="11 bytes, expected at most 10"):
        decode(bytes(11))


@pytest.mark.parametrize(
    "text", ["<svg xmlns='http://www.w3.org/2000/svg'/>", "<?xml version='1.0'?><svg/>", " <SVG>"]
)
def test_svg_is_refused(text):
    with pytest.raises(PictureError, match="SVG"):
        decode(text.encode())


@pytest.mark.parametrize("data", [b"", b"GIF89a", b"no picture", bytes(100), b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_picture_is_refused(data):
    with pytest.raises(PictureError):
        decode(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_damaged_files_decode_or_are_refused(kind):
    """40 of each format, cut off or with changed bytes: no other error, and no endless loop."""
    whole = saved(Image.fromarray(np.kron(PIXELS, np.ones((4, 4, 1), np.uint8))), kind)
    rng = np.random.default_rng(len(whole))
    for i in range(40):
        data = bytearray(whole)
        if i % 2:
            for at in rng.integers(0, len(data), 1 + i // 4):
                data[at] = rng.integers(256)
        else:
            data = data[: rng.integers(len(data))]
        try:
            found = decode(bytes(data))
        except PictureError:
            continue
        assert found.shape[2:] == (3,)
