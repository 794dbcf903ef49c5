"""A model file that is written to or cut off while it is in use is noticed before it is read."""

import os

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.formats.gguf import GGUFError, GGUFFile


@pytest.fixture
def path(tmp_path):
    return write_tiny_model(tmp_path / "m.gguf", TinySpec("llama", "F32", n_ctx=256))


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def grow(path):
    with path.open("ab") as file:
        file.write(b"\0")


def overwrite(path):
    with path.open("r+b") as file:
        file.seek(-8, 2)
        file.write(b"\1\2\3\4")
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [(cut, "cut off or grown from"), (grow, "cut off"), (overwrite, "written")],
)
def test_a_session_says_that_its_model_has_changed_and_goes_no_further(path, change, message):
    engine = Engine.load(path, n_threads=1)
    session = engine.session(256)
    session.prefill([3, 4, 5])
    change(path)
    for call in (lambda: session.prefill([6]), lambda: session.decode(6)):
        with pytest.raises(GGUFError, match=f"{message}.*while it was in use: load the model"):
            call()
    assert session.tokens == [3, 4, 5]
    engine.close()


def test_a_change_between_two_chunks_of_a_prompt_is_noticed(path):
    engine = Engine.load(path, n_threads=1)
    session = engine.session(256, 8)
    with pytest.raises(GGUFError, match="load the model again"):
        session.prefill([3] * 64, lambda done, total: cut(path))
    assert session.n_past == 0
    engine.close()


def test_a_file_that_is_replaced_or_renamed_is_as_it_was(path):
    engine = Engine.load(path, n_threads=1)
    session = engine.session(256)
    before = session.prefill([3, 4, 5])
    path.rename(path.with_name("moved"))
    path.write_bytes(b"another file")
    session.truncate(0)
    np.testing.assert_array_equal(session.prefill([3, 4, 5]), before)
    engine.close()


def test_a_file_leaves_no_descriptor_behind(path):
    before = len(os.listdir("/proc/self/fd"))
    with GGUFFile(path):
        assert len(os.listdir("/proc/self/fd")) > before
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("at", [*range(16)])
def test_a_files_identity_is_of_places_all_over_its_weights(path, at):
    """Sixteen of 4 KiB, evenly spaced to the end: bytes that changed without a trace in its times.

    The first and the last byte of a place count.
    """
    with GGUFFile(path) as file:
        before = file.identity()
    status = path.stat()
    begin = at * (status.st_size - 4096) // 15
    with path.open("r+b") as file:
        for place in (begin, begin + 4095) if at else (begin + 4095,):
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 1]))
            file.flush()
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            with GGUFFile(path) as other:
                assert other.identity() != before
            file.seek(place)
            file.write(byte)
            file.flush()
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            with GGUFFile(path) as other:
                assert other.identity() == before
