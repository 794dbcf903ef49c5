"""Placement of layers: all on one device, or the first on the CPU and the last on a GPU.

The token embedding is on the CPU, unless everything is on the GPU. The KV cache and attention of a
GPU's layers are on the GPU, too, or on the CPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tamis.jit_kernels.backends.base import Backend
from tamis.model.hparams import HParams
from tamis.model.model import Model
from tamis.model.weights import Weights


class Place(NamedTuple):
    """A device and the parts of the model that run there."""

    backend: Backend
    layers: range
    embedding: bool  # whether the token embedding is there
    output: bool  # whether the output head is there
    host: Backend | None = None  # the CPU's backend, if the device is another one

    @property
    def device(self) -> str:
        """The name of the device that its layers run on."""
        return self.backend.name

    @property
    def kv_backend(self) -> Backend:
        """The backend of its KV cache, which runs selection and attention."""
        return self.backend.sides[1]

    @property
    def kv_device(self) -> str:
        """The name of that device."""
        return self.kv_backend.name

    @property
    def runners(self) -> dict[str, Backend]:
        """Its backends by device: that of the layers first, then that of their KV cache."""
        return {side.name: side for side in self.backend.sides}

    def with_kv_on_host(self) -> "Place":
        """The same layers, with KV cache and attention on the CPU."""
        if self.host is None:
            return self
        from tamis.jit_kernels.backends.split import SplitBackend

        return self._replace(backend=SplitBackend(self.backend, self.host), host=None)

    def n_kv_layer(self, model: Model) -> int:
        """The number of its layers that have a KV cache."""
        return sum(layer in self.layers for layer in model.kv_layers)

    def kv_shapes(self, model: Model) -> list[tuple[HParams, list[int]]]:
        """The shapes of its layers with a KV cache, grouped by equal heads.

        Each comes with the indices of its layers among all of these, counted from 0.
        """
        own = [layer for layer in model.kv_layers if layer in self.layers]
        apart = [i for i, layer in enumerate(own) if model.hp.has_own_heads(layer)]
        rest = sorted(set(range(len(own))) - set(apart))
        kinds = zip(model.hp.kinds, (rest, apart), strict=False)
        found = [(replace(hp, n_layer=len(some)), some) for hp, some in kinds if some]
        return found or [(replace(model.hp, n_layer=0), [])]

    def weight_bytes(self, weights: Weights) -> int:
        """Bytes of the matrices that run here."""
        found = [weights.output.matrix()] if self.output else []
        for layer in weights.blk[self.layers.start : self.layers.stop]:
            found += layer.matrices()
        return sum(w.data.nbytes for w in found)


def on_one_device(backend: Backend, n_layer: int, host: Backend | None = None) -> tuple[Place, ...]:
    """The placement of a whole model on one device."""
    return (Place(backend, range(n_layer), True, True, host),)


def on_two_devices(
    cpu: Backend, gpu: Backend, n_layer: int, n_gpu_layers: int
) -> tuple[Place, ...]:
    """The placement of the last n_gpu_layers layers on a GPU, as in llama.cpp.

    More than n_layer, or fewer than 0: all layers and the output. Exactly n_layer: the output stays
    on the CPU.
    """
    if n_gpu_layers == 0:
        return on_one_device(cpu, n_layer)
    if not 0 < n_gpu_layers <= n_layer:
        return on_one_device(gpu, n_layer, cpu)
    first = n_layer - n_gpu_layers
    return (
        Place(cpu, range(first), True, True),
        Place(gpu, range(first, n_layer), False, False, cpu),
    )


def devices(places: Sequence[Place]) -> dict[str, Backend]:
    """The backends of all places, by device."""
    return {device: runner for place in places for device, runner in place.runners.items()}


def described(device: str, places: Sequence[Place]) -> str:
    """A suffix for memory errors, such as " on cuda (layers 12 to 23)"; empty for a CPU alone."""
    found = devices(places)
    if len(found) == 1:
        return "" if found[device].on_host else f" on {device}"
    layers = [layer for place in places if device in place.runners for layer in place.layers]
    if not layers:
        return f" on {device} (no layer)"
    return f" on {device} (layers {layers[0]} to {layers[-1]})"
