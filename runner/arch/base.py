"""What differs between architectures, beyond what the presence of a tensor tells."""

import importlib
import pkgutil
from dataclasses import dataclass

import tamis.arch


class ArchError(ValueError):
    """The model's architecture is not supported; the message names it and those that are."""


@dataclass(frozen=True, slots=True)
class Arch:
    """One architecture. Biases, QK norms and post norms follow from the file's tensors."""

    neox: bool  # rotary pairs are (i, i + n/2), else (2i, 2i + 1)
    activation: str = "silu"  # of the feed-forward gate: "silu" or "gelu" (tanh form)
    scale_embedding: bool = False  # token embeddings times sqrt(n_embd)
    full_attention_every: int = 1  # layer i is full where (i + 1) % this == 0, else sliding window
    rope_base_window: float = 0.0  # rotary base of sliding-window layers; 0 = the model's own
    normalize_experts: bool = True  # weights of the chosen experts divided by their sum


def arch_of(name: str) -> Arch:
    """The record of a GGUF architecture name. Raises ArchError."""
    known = sorted(m.name for m in pkgutil.iter_modules(tamis.arch.__path__) if m.name != "base")
    if name not in known:
        raise ArchError(f"architecture {name!r} is not supported; supported: {', '.join(known)}")
    return importlib.import_module(f"tamis.arch.{name}").ARCH
