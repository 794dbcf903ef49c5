"""A user's text as a template sees it: every method gives what str's does, character for character.

And each character of a result is still the user's: none comes out as the template's.
"""

import pytest

from tamis.text.tagged_text import UserText, has_veiled, parts, unveil, veil

LOW, HIGH = "a\U0003fffd", "\U000e0001\U0010ffff"  # planes 0 to 3, and 14 to 16
TEXT = "<|a|>bc<|a|>\n<|a|> d"
CALLS = [
    ("split", "<|a|>"), ("split", "<|a|>", 1), ("split", "<|a|>", 0), ("split", None, 1),
    ("split",), ("rsplit", "<|a|>"), ("rsplit", "<|a|>", 1), ("rsplit", None, 1), ("rsplit",),
    ("partition", "<|a|>"), ("rpartition", "<|a|>"), ("partition", "none"),
    ("rpartition", "none"), ("splitlines",), ("splitlines", True),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("text", [TEXT, "bc", "<|a|>", "", "x<|a|>", " a b  c "])
def test_pieces_are_those_of_str_and_the_users(text, call):
    name, *args = call
    pieces = getattr(UserText(veil(text)), name)(*args)
    assert list(map(unveil, pieces)) == list(getattr(text, name)(*args))
    for piece in pieces:
        assert not any(is_template for part, is_template in parts(str(piece)) if part.strip())


@pytest.mark.parametrize("part", ["<|a|>", " d", "c", "", "none", TEXT])
def test_ends_are_cut_off_where_they_are(part):
    for text in (TEXT, TEXT[::-1], "c", ""):
        for cut in ("removeprefix", "removesuffix", "lstrip", "rstrip", "strip"):
            found = getattr(UserText(veil(text)), cut)(part)
            assert unveil(found) == getattr(text, cut)(part), (cut, text)


@pytest.mark.parametrize("count", [-1, 0, 1, 2])
@pytest.mark.parametrize(("old", "new"), [("<|a|>", "<|b|>"), ("bc", ""), ("", "-"), ("z", "y")])
def test_what_replaces_is_whose_it_was(old, new, count):
    found = UserText(veil(TEXT)).replace(old, new, count)
    assert unveil(found) == TEXT.replace(old, new, count)
    of_template = "".join(part for part, is_template in parts(str(found)) if is_template)
    n = unveil(found).count(new) if new and new != "y" else 0
    assert of_template.count(new) == n if n else not of_template.strip()


@pytest.mark.parametrize("text", [LOW, HIGH, (LOW + HIGH) * 9, "a b", "x" * 16, "x" * 17])
def test_veils_come_off_as_they_were_put_on(text):
    assert unveil(veil(text)) == text
    assert has_veiled(veil(text))
    assert not has_veiled(text)
    assert len(veil(text)) == len(text)
    assert parts(veil(text)) == [(text, False)]


@pytest.mark.parametrize("code", [0x40000, 0xDFFFF])
def test_code_points_that_have_no_character_are_refused(code):
    with pytest.raises(ValueError, match=f"U\\+{code:X} is not a character"):
        veil("a" + chr(code))
    for beside in (0x3FFFF, 0xE0000):
        assert unveil(veil(chr(beside))) == chr(beside)


def test_parts_are_cut_where_the_writer_changes():
    whole = "<|a|>" + veil("one two") + "<|b|>" + veil(" x ") + " "
    assert parts(whole) == [
        ("<|a|>", True), ("one two", False), ("<|b|> ", True), ("x", False), ("  ", True)
    ]  # fmt: skip
