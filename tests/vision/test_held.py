"""Rows of pictures among token ids: their numbers, runs, and how they are found again."""

import numpy as np
import pytest

from tamis.text import picture_marks
from tamis.vision.beside import find_mmproj
from tamis.vision.family import Rows
from tamis.vision.held import Pictures, Run, whole_pictures


def rows(name: str, n: int = 3, width: int = 2) -> Rows:
    return Rows(np.zeros((n, width), np.float32), name.encode(), (0, 0), causal=True)


def test_equal_pictures_have_equal_negative_numbers():
    pictures = Pictures()
    first, second = pictures.add(rows("a")), pictures.add(rows("b"))
    assert pictures.add(rows("a")) == first != second
    assert max(first + second) < 0
    assert min(first + second) >= -(2**31)


def test_ids_are_split_into_texts_and_pictures():
    pictures = Pictures()
    a, b = rows("a"), rows("b", 2)
    ids = [7, 8, *pictures.add(a), *pictures.add(b), 9]
    assert list(pictures.runs(ids)) == [Run(0, 2), Run(2, 5, a), Run(5, 7, b), Run(7, 8)]


def test_a_part_of_a_picture_knows_its_first_row():
    pictures, a = Pictures(), rows("a", 4)
    ids = pictures.add(a)
    assert list(pictures.runs([*ids[2:], 5])) == [Run(0, 2, a, 2), Run(2, 3)]


def test_a_picture_that_is_not_held_is_an_error():
    with pytest.raises(ValueError, match="id -5 at 1 is of no picture"):
        list(Pictures().runs([1, -5]))


def test_the_pictures_used_longest_ago_are_dropped():
    pictures = Pictures(most=2 * 3 * 2 * 4)
    first = pictures.add(rows("a"))
    pictures.add(rows("b"))
    pictures.add(rows("c"))
    with pytest.raises(ValueError, match="no picture that is held"):
        list(pictures.runs(first))


@pytest.mark.parametrize(
    ("ids", "n", "expected"), [([1, -2, -3, 4], 2, 1), ([1, -2, -3, 4], 3, 3), ([1, 2], 1, 1)]
)
def test_no_picture_is_cut(ids, n, expected):
    assert whole_pictures(ids, n) == expected


def test_marks_are_found_and_others_stay_text():
    mark = picture_marks.mark(3)
    parts = [(f"a{mark}b", False), ("<picture-0-3>", True)]
    pieces = picture_marks.split(parts)
    assert pieces == [[("a", False)], 3, [("b", False), ("<picture-0-3>", True)]]
    ids = picture_marks.encode(lambda part: [len(part)], parts, lambda number: [-number])
    assert ids == [1, -3, 2]


def test_a_template_that_drops_a_picture_is_an_error():
    with pytest.raises(ValueError, match="keeps 0 of 1 pictures"):
        picture_marks.check_kept([picture_marks.mark(0)], [("text", True)])


@pytest.mark.parametrize(
    ("model", "others", "expected"),
    [
        ("gemma-3-4b-it-Q4_K_M.gguf", ["mmproj-gemma-3-4b-it-f16.gguf"], 0),
        ("a-Q8_0.gguf", ["mmproj-b.gguf", "mmproj-a-Q8_0.gguf", "b.gguf"], 1),
        ("a.gguf", ["a.mmproj-f16.gguf"], 0),
        ("a.gguf", ["mmproj-model-f16.gguf"], 0),
        ("a.gguf", ["mmproj-b.gguf", "b.gguf"], None),
        ("a.gguf", ["mmproj-b.gguf", "mmproj-c.gguf"], None),
        ("a.gguf", [], None),
    ],
)
def test_the_encoder_beside_a_model_is_found_by_name(tmp_path, model, others, expected):
    for name in (model, *others):
        (tmp_path / name).touch()
    found = find_mmproj(tmp_path / model)
    assert found == (None if expected is None else tmp_path / others[expected])
