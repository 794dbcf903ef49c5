"""What each method records: ops, their constants and numbers, and which memory they share.

Kernels are compared with NumPy for numbers of their own; which numbers and arrays a method gives
them, and how large these are, is written in data/recorded_ops. What a change does to a method is
read from the difference that `python tests/support/recorded_ops.py` makes of those files.
"""

import pytest
from recorded_ops import CACHES, FOLDER, TEXTS, recorded, recorded_cache

from tamis.select.notation import methods


def test_all_methods_are_recorded_and_no_others():
    assert set(TEXTS) == set(methods()) | {"per_layer"}
    files = {*TEXTS, *(f"kv_{kind}" for kind in CACHES)}
    assert {path.stem for path in FOLDER.iterdir()} == files


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_method_records_what_it_did(name):
    assert recorded(name).splitlines() == (FOLDER / f"{name}.txt").read_text().splitlines()


@pytest.mark.parametrize("kind", CACHES)
def test_what_is_read_over_a_cache_is_fetched_as_it_was(tmp_path, kind):
    found = recorded_cache(kind, tmp_path).splitlines()
    assert found == (FOLDER / f"kv_{kind}.txt").read_text().splitlines()
