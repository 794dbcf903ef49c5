import re
from itertools import pairwise

import pytest
from golden_data import MODELS
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.formats.gguf import GGUFFile
from tamis.formats.vocab import Vocab
from tamis.text.detokenize import TextStream
from tamis.text.tokenizer import tokenizer_for

BAD = "\ufffd"


def stream(pieces, stop=()):
    """All that comes out, and what stopped it."""
    s = TextStream(stop=stop)
    return [*map(s.push, pieces), s.finish()], s.stopped


def cut(data, places):
    """Cut bytes at some places (taken modulo their length)."""
    ends = sorted({p % (len(data) + 1) for p in places} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(ends)]


def test_a_character_comes_out_when_its_last_byte_is_there():
    s = TextStream()
    assert [s.push(bytes([b])) for b in "é€😀".encode()] == ["", "é", "", "", "€", *[""] * 3, "😀"]
    assert s.finish() == ""


def test_bytes_that_are_not_utf8_become_replacement_characters():
    assert stream([b"a\xff", b"b\x80"]) == (["a" + BAD, "b" + BAD, ""], None)
    assert stream([b"a\xf0\x9f"]) == (["a", BAD], None)  # the rest of the emoji never came


def test_text_that_may_be_a_stop_string_is_held_back():
    s = TextStream(stop=("</s>",))
    assert [s.push(p) for p in (b"ab<", b"/", b"x<", b"<", b"/s")] == ["ab", "", "</x", "<", ""]
    assert s.stopped is None
    assert s.finish() == "</s"


def test_a_stop_string_over_several_pieces_ends_the_text():
    out, stopped = stream([b"one STO", b"P", b" two"], stop=("STOP",))
    assert out == ["one ", "", "", ""]
    assert stopped == "STOP"


def test_the_stop_string_that_is_complete_first_counts():
    assert stream([b"baa"], stop=("baa", "a")) == (["b", ""], "a")
    assert stream([b"b", b"aa"], stop=("baa", "a")) == (["", "b", ""], "a")
    assert stream([b"xaby"], stop=("b", "ab")) == (["x", ""], "ab")
    assert stream([b"xa", b"by"], stop=("abc", "b")) == (["x", "a", ""], "b")
    assert stream([b"xabc"], stop=("abc", "ab")) == (["x", ""], "ab")


def test_a_stop_string_inside_a_possible_longer_one():
    # "aab" might still come when "ab" cannot: nothing of it is lost
    assert stream([b"aa", b"a", b"b!"], stop=("aab",)) == (["", "a", "", ""], "aab")


def test_a_stop_string_may_end_in_the_middle_of_bytes_of_a_later_character():
    out, stopped = stream(["x€".encode() + "é".encode()[:1], "é".encode()[1:]], stop=("€",))
    assert (out, stopped) == (["x", "", ""], "€")


def test_arguments():
    with pytest.raises(TypeError, match="sequence"):
        TextStream(stop="abc")
    with pytest.raises(ValueError, match="empty"):
        TextStream(stop=("a", ""))


@given(st.text(), st.lists(st.integers(0, 1000)))
def test_any_cut_of_a_text_gives_the_text(text, places):
    text = text.encode("utf-8", "replace").decode()
    assert "".join(stream(cut(text.encode(), places))[0]) == text


@given(st.binary(), st.lists(st.integers(0, 1000)))
def test_any_cut_of_any_bytes_gives_what_decoding_at_once_gives(data, places):
    assert "".join(stream(cut(data, places))[0]) == data.decode("utf-8", "replace")


@given(
    st.text("abé", max_size=20),
    st.lists(st.text("abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 1000)),
)
def test_any_cut_gives_the_text_before_the_first_stop_string(text, stop, places):
    out, stopped = stream(cut(text.encode(), places), stop=stop)
    if stopped is None:
        assert "".join(out) == text
        assert not any(s in text for s in stop)
    else:
        end = text.index(stopped)
        assert "".join(out) == text[:end]
        assert not any(s in text[: end + len(stopped) - 1] for s in stop)


TEXT = st.text("abé😀", max_size=20)
STOPS = st.lists(st.text("abé😀", min_size=1, max_size=4), min_size=1, max_size=3)


@given(TEXT, STOPS, st.lists(st.integers(0, 1000)))
def test_all_is_out_but_what_may_yet_be_a_stop_string_or_a_character(text, stop, places):
    """After each piece: the whole characters so far, without the beginning of a stop string."""
    s, out, data = TextStream(stop=stop), "", b""
    beginnings = {s[:n] for s in stop for n in range(len(s))}
    for piece in cut(text.encode(), places):
        out, data = out + s.push(piece), data + piece
        if s.stopped is not None:
            break
        whole = data.decode(errors="ignore")
        held = max((b for b in beginnings if whole.endswith(b)), key=len)
        assert out == whole.removesuffix(held)
    assert not any(word in out for word in stop)
    assert out + s.finish() == (text if s.stopped is None else out)


@given(st.binary(max_size=30), STOPS, st.lists(st.integers(0, 1000)))
def test_of_any_bytes_no_stop_string_comes_out(data, stop, places):
    out, stopped = stream(cut(data, places), stop=stop)
    before = re.split("|".join(map(re.escape, stop)), data.decode("utf-8", "replace"))
    assert not any(word in "".join(out) for word in stop)
    assert (stopped is None) == (len(before) == 1)
    for text in out:
        text.encode()  # no half of anything


@pytest.mark.model
@pytest.mark.parametrize("name", sorted(MODELS.values()))
def test_tokens_of_real_models_stream_in_whole_characters(model_path, name):
    with GGUFFile(model_path(name)) as f:
        tokenizer = tokenizer_for(Vocab.from_gguf(f))

    @settings(max_examples=200, deadline=None)
    @given(st.text(), st.lists(st.integers(0, tokenizer.n_vocab - 1)))
    def check(text, ids):
        encoded = tokenizer.encode(text, add_special=False)
        out, _ = stream(map(tokenizer.piece, encoded))
        if tokenizer.decode(encoded) == text:  # SmolLM2 has no tokens for some bytes
            assert "".join(out) == text
            assert not any(BAD in piece for piece in out) or BAD in text
        out, _ = stream(map(tokenizer.piece, ids))  # any tokens, as a model may choose them
        assert "".join(out) == b"".join(map(tokenizer.piece, ids)).decode("utf-8", "replace")

    check()
