"""Which device runs which layers: all on one, or the first layers on the CPU and the last on a GPU.

The token embedding is where the first layers would be: on the CPU, unless all is on the GPU. Keys,
values and attention of a GPU's layers are there too, or on the CPU.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tamis.jit_kernels.backends.split import SplitBackend
from tamis.jit_kernels.contract.program import Runner
from tamis.model.hparams import HParams
from tamis.model.weights import Weights


class Place(NamedTuple):
    """A device and what of the model runs there."""

    device: str  # "cpu" or "cuda"
    backend: Runner
    layers: range
    embedding: bool  # whether the token embedding is there
    output: bool  # whether the output head is there
    host: Runner | None = None  # of another device than the CPU: the CPU

    @property
    def runners(self) -> dict[str, Runner]:
        """What it runs on, by device: the layers' first, then that of their keys and values."""
        if isinstance(self.backend, SplitBackend):
            return {self.device: self.backend.rows, "cpu": self.backend.own}
        return {self.device: self.backend}

    @property
    def kv_device(self) -> str:
        """Where its keys and values are, and what chooses among them and attends to them."""
        return list(self.runners)[-1]

    def with_kv_on_host(self) -> "Place":
        """The same layers, with keys, values and attention on the CPU."""
        if self.host is None:
            return self
        return self._replace(backend=SplitBackend(self.backend, self.host), host=None)

    def share(self, hp: HParams) -> HParams:
        """The shapes of a model of these layers only: what its keys and values take."""
        return replace(hp, n_layer=len(self.layers))

    def weight_bytes(self, weights: Weights) -> int:
        """Bytes of the matrices that run here."""
        found = [weights.output.matrix] if self.output else []
        for layer in weights.blk[self.layers.start : self.layers.stop]:
            found += layer.matrices()
        return sum(w.data.nbytes for w in found)


def one_place(
    device: str, backend: Runner, n_layer: int, host: Runner | None = None
) -> tuple[Place, ...]:
    """All of a model on one device."""
    return (Place(device, backend, range(n_layer), True, True, host),)


def two_places(cpu: Runner, gpu: Runner, n_layer: int, n_gpu_layers: int) -> tuple[Place, ...]:
    """The last n_gpu_layers layers on a GPU, as in llama.cpp.

    More than n_layer, or fewer than 0: all of them and the output. As many: the output stays.
    """
    if n_gpu_layers == 0:
        return one_place("cpu", cpu, n_layer)
    if not 0 < n_gpu_layers <= n_layer:
        return one_place("cuda", gpu, n_layer, cpu)
    first = n_layer - n_gpu_layers
    return (
        Place("cpu", cpu, range(first), True, True),
        Place("cuda", gpu, range(first, n_layer), False, False, cpu),
    )


def devices(places: Sequence[Place]) -> dict[str, Runner]:
    """All that places run on."""
    return {device: runner for place in places for device, runner in place.runners.items()}


def described(device: str, places: Sequence[Place]) -> str:
    """Where an error's numbers are from: " on cuda (layers 12 to 23)"; of a CPU alone nothing."""
    if len(devices(places)) == 1:
        return "" if device == "cpu" else f" on {device}"
    layers = [layer for place in places if device in place.runners for layer in place.layers]
    if not layers:
        return f" on {device} (no layer)"
    return f" on {device} (layers {layers[0]} to {layers[-1]})"
