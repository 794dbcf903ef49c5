"""Strings as a file has them are the list that they stand for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tamis.formats.strings import LENGTH, Strings

# Few letters, so that texts repeat and lie within others; a zero and half a character too.
TEXTS = st.lists(st.text(st.sampled_from("ab\0é日\udce6"), max_size=4), max_size=12)


@given(TEXTS)
def test_they_are_a_list(texts):
    strings = Strings.of(texts)
    assert len(strings) == len(texts)
    assert strings == texts
    assert list(reversed(strings)) == texts[::-1]
    assert [strings[i] for i in range(-len(texts), len(texts))] == texts * 2
    assert strings[1:9:2] == texts[1:9:2]
    raws = [text.encode("utf-8", "surrogateescape") for text in texts]
    assert list(strings.raws()) == raws == [strings.raw(i) for i in range(len(texts))]


@given(TEXTS, TEXTS)
def test_texts_are_found_where_a_list_has_them_last(texts, wanted):
    strings = Strings.of(texts)
    last = {text: i for i, text in enumerate(texts)}
    assert strings.places(wanted) == {text: last[text] for text in wanted if text in last}
    assert all((text in strings) == (text in last) for text in wanted)


def test_a_text_within_a_string_is_not_one():
    inner = (LENGTH.pack(1) + b"a").decode()
    assert Strings.of([inner]).places(["a"]) == {}
    assert Strings.of(["a", inner, "b"]).places(["a"]) == {"a": 0}


def test_an_index_outside_is_an_error():
    strings = Strings.of(["a", "b"])
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"{index} of 2"):
            strings[index]
