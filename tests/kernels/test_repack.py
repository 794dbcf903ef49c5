"""Weights in strips: the same model, and what has no strips or no room stays as it is."""

import os
import threading

import numpy as np
import pytest
from tiny_models import TinySpec, write_tiny_model

from tamis.engine.engine import Engine
from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf import GGUFFile
from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import QTensor
from tamis.model.repack import Copies, Filling, in_strips


class Scripted:
    """A backend that runs nothing: it counts, and fails where the test asks for it."""

    strips = True

    def __init__(self, free=1 << 40, fails_at=None, waits=False):
        self.free, self.fails_at, self.waits, self.ran = free, fails_at, waits, []
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def free_bytes(self):
        return self.free

    def link(self, program):
        return program

    def run(self, linked, first, last):
        self.begun.set()
        if self.waits:
            self.goes_on.wait()
        if first == self.fails_at:
            raise MemoryError("as told")
        self.ran.append(first)


def matrix(type, n_out, n_in):
    size = n_out * n_in // GGMLType[type].block_size * GGMLType[type].type_size
    return QTensor(np.zeros(size, np.uint8), type, n_out, n_in)


def logits(path, monkeypatch, strips):
    monkeypatch.setattr(CpuBackend, "strips", strips)
    # Rows as they are have no tiles of 8 bits.
    engine = Engine.load(path, n_threads=2, precision="exact")
    blk = engine.model.weights.blk
    types = {w.matrix().type for w in (blk[0].attn_q, blk[1].ffn_up)}
    session = engine.session(n_ctx=64)
    found = [session.prefill(list(range(1, 30))), session.decode(3), *session.logits([4, 5, 6, 7])]
    engine.close()
    return types, found


@pytest.mark.parametrize("spec", [TinySpec(type_="Q4_0"), TinySpec("qwen2", type_="Q6_K")])
def test_a_model_gives_the_same_logits_from_strips(spec, tmp_path, monkeypatch):
    path = write_tiny_model(tmp_path / "tiny.gguf", spec)
    (rows_type, rows), (strip_type, strips) = (
        logits(path, monkeypatch, strips) for strips in (False, True)
    )
    assert rows_type == {spec.type_}
    assert strip_type == {ops.strip_type(spec.type_, exact=True)}
    for a, b in zip(rows, strips, strict=True):
        # Sums in another order; an activation near a tie of its 15 bits may go either way.
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * np.abs(a).max())


def test_what_has_no_strips_stays_as_it_is():
    given = [
        matrix("Q4_0", 32, 128), matrix("F16", 32, 128), matrix("BF16", 32, 256),
        matrix("Q4_0", 40, 128), matrix("Q4_0", 32, 96), matrix("Q4_K", 16, 256),
    ]  # fmt: skip
    found, program = in_strips(given, Scripted())[:2]
    assert [w.type for w in found] == ["Q4_0x16", "F16", "BF16", "Q4_0", "Q4_0", "Q4_Kx16"]
    assert [w.data.nbytes for w in found[::5]] == [32 * 4 * 18, 16 * 148]
    assert len(program) == 2
    assert all(a is b for a, b in zip(found[1:5], given[1:5], strict=True))


def test_all_stay_as_they_are_where_memory_is_short():
    given = [matrix("Q4_0", 1 << 12, 1 << 12)]
    found, program = in_strips(given, Scripted(free=10 << 20))[:2]
    assert found == given
    assert len(program) == 0


def test_a_matrix_is_copied_in_parts_as_in_one(monkeypatch):
    rng, copies = np.random.default_rng(0), []
    given = [QTensor(rng.integers(0, 256, 80 * 36, np.uint8), "Q4_0", 80, 64)]
    backend = CpuBackend(2)
    for part, n in ((1, 5), (33 * 36, 3), (1 << 20, 1)):
        monkeypatch.setattr("tamis.model.repack.PART", part)
        found, program = in_strips(given, backend)[:2]
        assert len(program) == n
        backend.run(backend.link(program))
        copies.append(found[0].data)
    backend.close()
    assert copies[0].any()
    for other in copies[1:]:
        np.testing.assert_array_equal(other, copies[0])


def filling(n, backend):
    program = Program()
    for _ in range(n):
        program.add(ops.REPACK, ("Q4_0",), w=None, strips=None, n_in=64, n_out=16)
    return Filling(backend, Copies([], program), lambda: backend.ran.append(9))


def test_filling_runs_every_op_once():
    backend = Scripted()
    thread = filling(3, backend)
    thread.finish()
    thread.finish()
    assert backend.ran == [0, 9, 1, 9, 2, 9]


def test_an_error_of_the_thread_is_raised_at_each_end():
    backend = Scripted(fails_at=1)
    thread = filling(3, backend)
    for _ in range(2):
        with pytest.raises(MemoryError, match="as told"):
            thread.finish()
    assert backend.ran == [0, 9]


def test_a_stopped_one_leaves_the_rest():
    backend = Scripted(waits=True)
    thread = filling(3, backend)
    backend.begun.wait()
    stop = threading.Thread(target=thread.stop)
    stop.start()
    while not thread._stopped:
        pass
    backend.goes_on.set()
    stop.join()
    thread.finish()
    assert backend.ran == [0, 9]


def test_a_child_of_fork_runs_what_its_parent_had_not(tmp_path):
    backend = Scripted(waits=True)
    thread = filling(3, backend)
    backend.begun.wait()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        backend.waits = False
        thread.finish()
        os.write(writer, bytes(backend.ran))
        os._exit(0)
    backend.goes_on.set()
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader, 10) == bytes([0, 9, 1, 9, 2, 9])
    thread.finish()
    assert backend.ran == [0, 9, 1, 9, 2, 9]


def test_pages_of_a_file_come_back_when_they_are_read_again(tmp_path):
    file = GGUFFile(write_tiny_model(tmp_path / "tiny.gguf", TinySpec(type_="Q8_0")))
    before = file.data("token_embd.weight").copy()
    file.release_pages()
    np.testing.assert_array_equal(file.data("token_embd.weight"), before)
