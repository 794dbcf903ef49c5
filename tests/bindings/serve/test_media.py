"""Pictures of a request by their URLs: what is allowed, and what stands for them."""

import base64

import numpy as np
import pytest

from tamis.bindings.serve import media
from tamis.bindings.serve.errors import ApiError
from tamis.bindings.serve.media import Media, NeedsHelper, Rules
from tamis.text import picture_marks
from tamis.vision.held import row_ids

PIXELS = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
URL = "data:image/png;base64," + base64.b64encode(b"x").decode()


class Cutter:
    """Cuts every picture into a text and one tile of two rows."""

    def cut(self, pixels):
        return ["<begin>", pixels]

    def key(self, tile):
        return tile.tobytes()

    def n_row(self, tile):
        return 2


@pytest.fixture
def seen(monkeypatch):
    from tamis.vision import decoding

    read = []

    def decode(data):
        read.append(data)
        return PIXELS

    monkeypatch.setattr(decoding, "decode", decode)
    return read


def refused(url, rules):
    with pytest.raises(ApiError) as error:
        Media(Rules("m", *rules), Cutter()).mark(url, "messages")
    assert error.value.status == 400
    assert error.value.param == "messages"
    return error.value.message


@pytest.mark.parametrize(
    ("url", "rules", "what"),
    [
        ("data:image/png;base64,=", (), "no base64"),
        ("data:image/png;base64,", (), "no bytes"),
        ("data:image/png,YQ==", (), "not in base64"),
        ("data:text/plain;base64,YQ==", (), "of type 'text/plain'"),
        ("file:///etc/passwd", (), "--media-path DIR"),
        ("file:///etc/passwd", ("/tmp",), "no file in the folder"),
        ("http://a/", (), "--media-url a"),
        ("http://a:81/", ("", ("a",)), "--media-url a:81"),
        ("http://a@b/", ("", ("a",)), "--media-url b"),
        ("http://[/", ("", ("a",)), "malformed"),
        ("gopher://a", ("", ("a",)), "is not one of"),
        ("YQ==", (), "is not one of"),
    ],
)
def test_urls_that_are_refused(url, rules, what):
    assert what in refused(url, rules)


def test_a_picture_needs_an_encoder_and_a_process_of_its_own():
    with pytest.raises(ApiError, match="start the server with --mmproj FILE"):
        Media().mark(URL, "messages")
    with pytest.raises(NeedsHelper):
        Media(Rules("m")).mark(URL, "messages")


def test_equal_pictures_are_decoded_once(seen):
    found = Media(Rules("m"), Cutter())
    part = {"type": "image_url", "image_url": {"url": URL}}
    text = {"type": "text", "text": "a"}
    messages = [{"role": "user", "content": [part, text, part]}, {"role": "user", "content": "b"}]
    marked = found.marked(messages)
    mark = {"type": "picture", "text": picture_marks.mark(0)}
    assert marked == [{"role": "user", "content": [mark, text, mark]}, messages[1]]
    assert seen == [b"x"]
    assert [media.unpacked(tile).tolist() for tile in found.tiles] == [PIXELS.tolist()]
    ids = found.ids_of(lambda parts: [len(parts[0][0])])
    assert ids(0) == [7, *row_ids(PIXELS.tobytes(), 2)]


def test_a_request_has_a_limited_number_of_pictures(seen, monkeypatch):
    monkeypatch.setattr(media, "MAX_PICTURES", 2)
    found = Media(Rules("m"), Cutter())
    for _ in range(2):
        found.mark(URL, "messages")
    with pytest.raises(ApiError, match="more pictures than 2"):
        found.mark(URL, "messages")


def test_a_request_has_limited_pixels(seen, monkeypatch):
    monkeypatch.setattr(media, "MOST_TILES", PIXELS.nbytes - 1)
    with pytest.raises(ApiError, match="12 bytes of pixels, expected at most 11"):
        Media(Rules("m"), Cutter()).mark(URL, "messages")


def test_a_prompt_has_a_mark_for_each_picture(seen):
    found = Media(Rules("m"), Cutter())
    mark = picture_marks.mark(0)
    assert found.filled("a <__media__> b", ["eA=="], "prompt") == f"a {mark} b"
    for text, pictures, what in (
        ("a", ["eA=="], "0 <__media__> and 1 pictures"),
        ("<__media__><__media__>", ["eA=="], "2 <__media__> and 1 pictures"),
        ("a", "eA==", "no list of texts"),
        ("a", [7], "no list of texts"),
    ):
        with pytest.raises(ApiError, match=what):
            found.filled(text, pictures, "prompt")


def test_files_of_a_folder_are_read_and_links_out_of_it_are_not(seen, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a b.png").write_bytes(b"own")
    (tmp_path / "c.png").write_bytes(b"other")
    (folder / "c.png").symlink_to(tmp_path / "c.png")
    found = Media(Rules("m", str(folder)), Cutter())
    for url in ("file://a%20b.png", "file:////a b.png", f"file://{folder}/a%20b.png"):
        found.mark(url, "messages")
    assert set(seen) == {b"own"}
    for url in ("file://c.png", "file://../c.png", "file://"):
        assert "no file in the folder" in refused(url, (str(folder),))


def test_files_are_limited(seen, tmp_path, monkeypatch):
    monkeypatch.setattr(media, "MOST_FILE", 3)
    (tmp_path / "a.png").write_bytes(b"four")
    assert "more than 3 bytes" in refused("file://a.png", (str(tmp_path),))
