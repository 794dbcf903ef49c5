"""Keys and values in the host's memory with frames on a device: the same logits, to the bit.

The device is a CPU whose kernels see copies of arrays, as a GPU's do, but the home itself: see
test_places.py.
"""

import numpy as np
import pytest
from precompiled import compile_for
from test_kv_tier import METHODS, OTHERS, check_same, ids_of
from test_places import Apart, loaded
from test_selectors import in_its_roles
from tiny_models import TinySpec, like_qwen2, write_tiny_model

from tamis import engine as engine_module
from tamis.engine import Engine
from tamis.jit_kernels import ops
from tamis.jit_kernels.types import PAGE
from tamis.kv.host import HostKV

N_LAYER, N_CTX = 4, 32 * PAGE
GPU_METHODS = [
    "dense", "window:recent=64", "quest:budget=256,page=16", "hip:k=128,b_k=16,l_d=1",
    "tactic:c=16,local=64,period=4,segment=512", "cpe", "lfps", "topk:k=64",
]  # fmt: skip


class WithHome(Apart):
    """Its kernels see arrays that are mapped themselves."""

    memory = 1 << 40

    def __init__(self, n_thread=2):
        super().__init__(n_thread)
        self.homes = []

    def mapped(self, array, /):
        self.homes.append((array.ctypes.data, array.nbytes))
        return array

    def _copy(self, array, make=False):
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        if (root.ctypes.data, root.nbytes) in self.homes:
            return Itself() if make else None
        return super()._copy(array, make)


class Itself:
    """The place of an array that is not copied."""

    def at(self, host):
        return host


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("host") / "m.gguf"
    return write_tiny_model(path, TinySpec("llama", "F32", layers=N_LAYER, n_ctx=2 * N_CTX))


@pytest.fixture(scope="module")
def whole(path):
    engine = Engine.load(path, n_threads=2)
    texts = (*GPU_METHODS, *OTHERS)
    compile_for(engine, [{"n_ctx": PAGE} | in_its_roles(text) for text in texts], 9, 9)
    yield engine
    engine.close()


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(engine_module, "CudaBackend", WithHome)


def least(engine, n_ctx=N_CTX, n_ubatch=128, n_layer=N_LAYER, **types):
    """The least kv_vram: a layer's pages, those of a chunk in all layers, one that is nobody's."""
    page = engine.memory_plan(PAGE, **types).kv // engine.hp.n_layer
    return page * (1 + n_layer * (n_ubatch // PAGE + 1) + -(-n_ctx // PAGE // 16) * 16)


@pytest.mark.parametrize("attn", GPU_METHODS)
def test_logits_are_those_of_a_session_in_memory(path, whole, gpu, attn):
    engine = loaded(path, -1)
    how = {"n_ctx": N_CTX, "n_ubatch": 128, "attn": attn}
    tiered, other = engine.session(kv_vram=least(engine), **how), whole.session(**how)
    assert isinstance(tiered._kv, HostKV)
    check_same(tiered, other, 1500, 40)
    counts = tiered.kv_counts
    assert counts.n_miss > 0
    assert counts.n_hit > counts.n_miss
    engine.close()
