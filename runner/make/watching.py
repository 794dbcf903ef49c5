"""Sessions that show what matrices are multiplied with, for calibration."""

from collections.abc import Callable
from dataclasses import replace

from tamis.engine.engine import Engine
from tamis.engine.session import Session
from tamis.kv.types import KVOptions, KVTypes
from tamis.model.weights import Tensor, Tensors, Watch
from tamis.select.dense import Dense


def watched(engine: Engine, watch: Watch, wanted: Callable[[str], bool], n_ctx: int) -> Session:
    """A session of dense attention, on the CPU, that calls `watch` before each product.

    wanted: which matrices of layers, by the file's names.
    Raises ValueError if the model is on a GPU, and as Engine.session.
    """
    if any(not place.backend.on_host for place in engine.places):
        raise ValueError("what is multiplied is seen on the CPU only: leave out n_gpu_layers")

    def shown(tensors: Tensors) -> Tensors:
        return Tensors({name: seen(tensor) for name, tensor in tensors.items()})

    def seen(tensor: Tensor) -> Tensor:
        return replace(tensor, watch=watch) if wanted(tensor.whole) else tensor

    engine.finish_repacking()
    model = engine.loaded.model
    weights = replace(model.weights, blk=tuple(shown(blk) for blk in model.weights.blk))
    loaded = replace(engine.loaded, model=replace(model, weights=weights))
    kv = KVOptions(KVTypes("f16", "f16"), None)
    return Session(loaded, n_ctx=n_ctx, n_ubatch=min(n_ctx, 512), selector=Dense(), kv=kv)
