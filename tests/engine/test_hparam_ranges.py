"""Hyperparameters that kernels are compiled for: what no model has is refused when it is loaded."""

from pathlib import Path

import gguf
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.formats.gguf import GGUFError, GGUFFile
from tamis.model.hparams import MAX_EXPERT_USED, MAX_GROUP, MAX_HEAD_DIM, HParams


def with_keys(path: Path, **changes: int) -> Path:
    """A tiny model of experts whose metadata says something else; the tensors stay."""
    write_tiny_model(path, TinySpec("qwen3moe", "F32", layers=1))
    reader = gguf.GGUFReader(path, "r+")
    for name, value in changes.items():
        reader.fields[f"qwen3moe.{name.replace('__', '.')}"].parts[-1][0] = value
    reader.data.flush()
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention__head_count": 4096, "attention__head_count_kv": 1},
            f"at most {MAX_GROUP} may",
        ),
        ({"attention__key_length": 65536}, f"whole number from 1 to {MAX_HEAD_DIM}"),
        ({"expert_count": 4096, "expert_used_count": 4096}, f"from 0 to {MAX_EXPERT_USED}"),
        ({"expert_count": 65536}, "whole number from 0 to 4096"),
    ],
)
def test_sizes_that_no_model_has_are_refused_with_their_key(tmp_path, changes, message):
    with (
        GGUFFile(with_keys(tmp_path / "m.gguf", **changes)) as file,
        pytest.raises(GGUFError, match=message) as error,
    ):
        HParams.from_gguf(file)
    assert error.value.key.startswith("qwen3moe.")


def test_the_largest_sizes_are_read(tmp_path):
    changes = {"attention__head_count": MAX_GROUP, "attention__head_count_kv": 1}
    with GGUFFile(with_keys(tmp_path / "m.gguf", **changes)) as file:
        assert HParams.from_gguf(file).group == MAX_GROUP
