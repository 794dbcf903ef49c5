"""Sessions that show what matrices are multiplied with, or have other matrices: calibration."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from tamis.engine.engine import Engine
from tamis.engine.session import Session
from tamis.jit_kernels.contract.types import QTensor
from tamis.kv.types import KVOptions, KVTypes
from tamis.model.weights import Tensor, Tensors, Watch, Weights
from tamis.select.dense import Dense


def watched(engine: Engine, watch: Watch, wanted: Callable[[str], bool], n_ctx: int) -> Session:
    """A session of dense attention, on the CPU, that calls `watch` before each product.

    wanted: which matrices of layers, by the file's names. Raises ValueError if the model is on a
    GPU, and as Engine.session.
    """

    def seen(tensor: Tensor) -> Tensor:
        return replace(tensor, watch=watch) if wanted(tensor.whole) else tensor

    engine.finish_repacking()
    weights = engine.loaded.model.weights
    return _session(engine, replace(weights, blk=tuple(_each(b, seen) for b in weights.blk)), n_ctx)


def with_tensors(engine: Engine, matrices: Mapping[str, QTensor], n_ctx: int) -> Session:
    """A session of dense attention, on the CPU, with other matrices, by the file's names.

    Raises ValueError if the model is on a GPU, and as Engine.session.
    """
    taken: dict[str, int] = {}  # rows, of matrices that tensors are parts of

    def changed(tensor: Tensor) -> Tensor:
        new = matrices.get(tensor.whole)
        if new is None or not isinstance(tensor.data, QTensor):
            return tensor
        n_out = tensor.data.n_out
        if n_out == new.n_out:
            return replace(tensor, data=new)
        first, row = taken.get(tensor.whole, 0), new.data.size // new.n_out
        taken[tensor.whole] = first + n_out
        part = new.data[row * first : row * (first + n_out)]
        return replace(tensor, data=new._replace(data=part, n_out=n_out))

    engine.finish_repacking()
    old = engine.loaded.model.weights
    weights = replace(
        old,
        token_embd=changed(old.token_embd),
        output=changed(old.output),
        top=_each(old.top, changed),
        blk=tuple(_each(blk, changed) for blk in old.blk),
    )
    return _session(engine, weights, n_ctx)


def _each(tensors: Tensors, change: Callable[[Tensor], Tensor]) -> Tensors:
    return Tensors({name: change(tensor) for name, tensor in tensors.items()})


def _session(engine: Engine, weights: Weights, n_ctx: int) -> Session:
    if any(not place.backend.on_host for place in engine.places):
        raise ValueError("calibration runs on the CPU: leave out n_gpu_layers")
    loaded = replace(engine.loaded, model=replace(engine.loaded.model, weights=weights))
    kv = KVOptions(KVTypes("f16", "f16"), None)
    return Session(loaded, n_ctx=n_ctx, n_ubatch=min(n_ctx, 512), selector=Dense(), kv=kv)
