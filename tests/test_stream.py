"""Streaming text: whole characters, stop strings across pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tamis.stream import TextStream


@given(st.text(), st.lists(st.integers(1, 5), min_size=1))
def test_any_split_into_bytes_gives_the_same_text(text, sizes):
    data, stream, out, i = text.encode(), TextStream(), "", 0
    while data:
        size = sizes[i % len(sizes)]
        out += stream.push(data[:size])
        assert "\ufffd" not in out or "\ufffd" in text
        data, i = data[size:], i + 1
    assert out + stream.finish() == text


@given(st.text("abc"), st.text("abc", min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string(text, stop):
    stream = TextStream(stop=(stop,))
    out = "".join(stream.push(c.encode()) for c in text) + stream.finish()
    assert out == text.split(stop)[0]
    assert stream.stopped == (stop if stop in text else None)


def test_a_possible_stop_string_is_held_back():
    stream = TextStream(stop=("END",))
    assert stream.push(b"one E") == "one "
    assert stream.push(b"N") == ""
    assert stream.push(b"T") == "ENT"


def test_bytes_that_are_no_character_become_a_replacement():
    stream = TextStream()
    assert stream.push(b"a\xe2\x82") == "a"
    assert stream.finish() == "\ufffd"


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="stop string is empty"):
        TextStream(stop=("",))
