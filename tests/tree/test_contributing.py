"""The worked examples of CONTRIBUTING.md run as files outside of the tree."""

import re

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.formats.gguf import GGUFFile


@pytest.fixture
def installed(root, tmp_path, monkeypatch):
    """A package on the path with the files of CONTRIBUTING.md and their entry points."""
    text = (root / "CONTRIBUTING.md").read_text()
    files = re.findall(r"<!-- file: (\w+\.py) -->\n```python\n(.*?)```", text, flags=re.S)
    assert [name for name, _ in files] == ["toy_method.py", "toy_arch.py"]
    for name, source in files:
        (tmp_path / name).write_text(source)
    info = tmp_path / "toys-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tamis.selectors]\nnarrowing = toy_method:Narrowing\n"
        "[tamis.architectures]\ntoy = toy_arch:ARCH\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_toy_method_reads_less_in_deeper_layers(installed):
    path = installed / "m.gguf"
    write_tiny_model(path, TinySpec("llama", layers=3))
    engine = Engine.load(path, n_threads=1)
    session = engine.session(n_ctx=256, attn="narrowing:recent=96", audit=1)
    session.prefill(np.arange(200) % 60 + 3)
    session.decode(5)
    kept = {found.layer: found.n_kept for found in session.audit.groups()}
    assert kept[0] > kept[1] > kept[2]
    engine.close()


def logits_of(path, arch, *, without_attention):
    """Logits of a tiny random model; the same weights for every architecture."""
    write_tiny_model(path, TinySpec(arch, layers=2, qk_norm=False))
    if without_attention:
        content = bytearray(path.read_bytes())
        with GGUFFile(path) as file:
            for il in range(2):
                info = file.tensors[f"blk.{il}.attn_output.weight"]
                content[info.offset : info.offset + info.n_bytes] = bytes(info.n_bytes)
        path.write_bytes(content)
    engine = Engine.load(path, n_threads=1)
    session = engine.session(n_ctx=64)
    logits = session.prefill([5, 6, 7, 8])
    session.truncate(3)
    np.testing.assert_allclose(session.decode(8), logits, atol=1e-3)
    engine.close()
    return logits


def test_the_toy_architecture_adds_both_branches_to_the_same_rows(installed):
    """Where attention adds nothing, it is a layer whose branches follow each other; else not."""
    path = installed / "m.gguf"
    for without, least, most in ((True, 0, 1e-4), (False, 1e-2, np.inf)):
        found, other = (logits_of(path, a, without_attention=without) for a in ("toy", "qwen3"))
        assert least <= np.abs(found - other).max() <= most
