"""What the recorders of a layer share: the model, its buffers, the Program, and the hooks."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tamis.graph.workspace import Buffers
from tamis.jit_kernels.contract.values import taken
from tamis.model.hparams import HParams
from tamis.model.model import Model
from tamis.model.rope import RopeFrequencies
from tamis.model.weights import Tensors
from tamis.select.base import Recording


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries or keys as a product left them, and the norm and rotation that they still need.

    x stands for the contents of its buffer when the heads were made. If anything else overwrites
    the buffer before `append` has finished the heads, recording fails.
    """

    x: np.ndarray  # f32 [n_tok, n_head, head_dim]
    norm: np.ndarray | None = None  # f32 [head_dim], for each head, or [n_head, head_dim]
    angles: "Angles | None" = None
    norm_last: bool = False  # whether they are normed after rotation, not before
    scaled: bool = False  # whether they are finally multiplied by the temperature of their position

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", taken(self.x))


@dataclass(frozen=True, slots=True)
class Finished:
    """Queries that `append` has normed and rotated, which `attention` of the same layer takes."""

    layer: int
    x: np.ndarray  # f32 [n_tok, n_head, head_dim]; with a padded KV cache, its heads


@dataclass(frozen=True, slots=True)
class Angles:
    """The cosines and sines of a chunk's positions, f32 [n_tok, n_half] each."""

    cos: np.ndarray
    sin: np.ndarray


@dataclass(frozen=True, slots=True)
class Index:
    """The input of an indexer's selection: its own queries and keys, and the weights of scores."""

    q: Heads  # [n_tok, n_head, n_key]
    k: Heads  # [n_tok, 1, n_key], stored behind the layer's key
    weights: np.ndarray | None  # f32 [n_tok, n_head]; None: each head selects for one KV head
    scratch: np.ndarray  # uint8: the workspace's
    neox: bool  # whether the elements of a rotary pair are half the rotary width apart


# state(name, *shape): one of a layer's recurrent states, float32, which ops continue from.
State = Callable[..., np.ndarray]


class Hooks:
    """What a layer needs beyond its own rows: a sequence's positions, KV cache and devices.

    The default hooks record nothing, which leaves the ops over rows, independent of any sequence.
    """

    def append(
        self, g: "Graph", layer: int, q: Heads, k: Heads | None, v: Heads | None
    ) -> np.ndarray:
        """Record norm and rotation of q and k, in place, and the append of k and v.

        Returns the finished queries: q's rows, or others where keys are stored in another basis.
        """
        return q.x

    def index(self, g: "Graph", index: Index, k: np.ndarray) -> None:
        """Record an indexer, whose keys end k's rows.

        It selects the keys of the attention that follows.
        """

    def attend(
        self, g: "Graph", layer: int, q: np.ndarray, out: np.ndarray, lse: np.ndarray | None
    ) -> None:
        """Record attention of q to the KV cache, both f32 [n_tok, n_head, head_dim].

        lse: f32 [n_tok, n_head], receives the log of the sums of exponentials.
        """

    def attended(self, g: "Graph", layer: int) -> None:
        """Called when attention's output is on the layer's device, before g.x changes."""

    def recur(self, g: "Graph", layer: int, record: "Callable[[State], None]") -> None:
        """Record the ops over a layer's recurrent states."""

    def end(self, g: "Graph", layer: int) -> None:
        """Called when all that the layer adds to g.x is added."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A Program being recorded for a model."""

    model: Model
    ws: Buffers
    rec: Recording
    hooks: Hooks

    @property
    def hp(self) -> HParams:
        """The model's shapes."""
        return self.model.hp

    @property
    def x(self) -> np.ndarray:
        """The residual stream as it is now, f32 [n_tok, n_embd].

        A value taken before the last `add` is stale: reading it is an error of recording.
        """
        return self.ws.current_x()

    def weights(self, layer: int) -> Tensors:
        """The tensors of a layer."""
        return self.model.weights.blk[layer]

    def angles(self, rope: int) -> Angles:
        """The buffers for the angles of one of the model's `ropes`."""
        n_half = len(self.frequencies(rope).inv_freq)
        return Angles(self.ws.rows(f"cos.{rope}", n_half), self.ws.rows(f"sin.{rope}", n_half))

    def frequencies(self, rope: int) -> RopeFrequencies:
        """One of the model's `ropes`."""
        return self.model.ropes[rope]
