"""A sparse-attention method of one's own, beside dense attention on the same prompt.

usage: python examples/own_method.py [MODEL]
"""

import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tamis import Engine
from tamis.fetch import registry
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.select.base import DECODE, Recording, SelectorShape, SelectorState


@dataclass(frozen=True)
class Pyramid:
    """Sinks and a window that shrinks from the first layer's `wide` to the last one's `narrow`."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)
    sink: int = 4
    wide: int = 1024
    narrow: int = 64

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        return _State(self, shape)


class _State(SelectorState):
    def __init__(self, params: Pyramid, shape: SelectorShape) -> None:
        super().__init__(shape)
        self._params = params

    def select_decode(self, rec: Recording, layer: int, q: np.ndarray, kv: KVView) -> Selection:
        """Record which keys the layer reads: here two numbers, in general ops over arrays."""
        p, depth = self._params, layer / max(1, self.shape.n_layer - 1)
        recent = round(p.wide * (p.narrow / p.wide) ** depth)
        return self.windowed(rec, p.sink, recent, block=16)


def main() -> None:
    """Decode 32 tokens after 1,500 with each method, and print what it kept of the attention."""
    engine = Engine.load(sys.argv[1] if sys.argv[1:] else registry.pull("smollm2"))
    ids = engine.tokenizer.encode("The sieve keeps the grain and lets the dust go. " * 150)[:1500]
    prompt = engine.session(n_ctx=2048)
    prompt.prefill(ids)
    for method in ("dense", "window:recent=256", Pyramid(), Pyramid(wide=256, narrow=32)):
        session = engine.session(n_ctx=2048, attn=method, audit=4)
        session.copy(prompt)
        token = ids[-1]
        for _ in range(32):
            token = int(session.decode(token).argmax())
        found = session.audit.total()
        print(f"{method!s:<45} keys {found.n_kept:6.0f}  retained mass {found.mass:.3f}")


if __name__ == "__main__":
    main()
