"""The tiny model of fuzz targets, its engine, and the folder of their files."""

import functools
import tempfile
from pathlib import Path

from tamis.engine.engine import Engine
from tamis.engine.session import Session
from tamis.tools.random_model import Shape, write_random_model

SHAPE = Shape(1, 2, 1, 16, 32, 64, 300, 256)
METHODS = ("dense", "snapkv:budget=60,window=8", "h2o:budget=60,s=16")
_holders: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def folder() -> Path:
    """The folder that targets write their files to; it is deleted when the process ends."""
    holder = tempfile.TemporaryDirectory(prefix="tamis-fuzz-")
    _holders.append(holder)
    return Path(holder.name)


@functools.cache
def model() -> Path:
    """The path of a random model of one layer."""
    path = folder() / "model.gguf"
    write_random_model(path, SHAPE, "Q8_0")
    return path


@functools.cache
def engine() -> Engine:
    """The engine of the tiny model; the kernels of sessions of METHODS are compiled."""
    loaded = Engine.load(model(), n_threads=1)
    for attn in METHODS:
        two_tokens(loaded.session(64, 16, attn))
    return loaded


def two_tokens(session: Session) -> None:
    """Compute a prompt of two tokens and one more token in a session of the tiny model."""
    logits = session.prefill([3, 4])
    assert logits.shape == (session._loaded.hp.n_vocab,)
    session.decode(5)
