"""Types of the KV cache, and the bytes that it takes."""

from pathlib import Path
from typing import NamedTuple

from tamis.jit_kernels.contract.types import KV_BLOCK, KV_TYPES, PAGE, kv_row
from tamis.model.hparams import HParams

UNITS = (1, 16, 64)  # tokens of a KV head that a DiskTier reads at once
UNIT = 16


class KVTypes(NamedTuple):
    """The types of K and of V, both from KV_TYPES."""

    k: str = "f16"
    v: str = "f16"

    def check(self, head_dim: int) -> None:
        """Raise ValueError if there is no such type, or none for rows of head_dim."""
        for name, type in zip(("type_k", "type_v"), self, strict=True):
            if type not in KV_TYPES:
                raise ValueError(f"{name} is {type!r}, expected one of {', '.join(KV_TYPES)}")
            if type != "f16" and head_dim % KV_BLOCK:
                raise ValueError(
                    f"{name} is {type}, which needs heads of a multiple of {KV_BLOCK} elements; "
                    f"this model's have {head_dim}: use f16"
                )

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of a key and a value of one head."""
        return sum(kv_row(type, head_dim).itemsize for type in self)


class Tier(NamedTuple):
    """The memory limit of a KV cache, and where the rest of it is."""

    ram: int  # bytes
    folder: Path
    unit: int  # tokens of a KV head that are read at once


class KVOptions(NamedTuple):
    """The types of a session's KV cache, and its location."""

    types: KVTypes
    tier: Tier | None  # None: all of it in memory
    vram: int | None = None  # bytes of a GPU's memory, the rest being in RAM; None: all on the GPU
    key_copy: int | None = (
        None  # bits of methods' copy of keys, 0: none; None: the device's default
    )


def kv_bytes(hp: HParams, n_ctx: int, types: KVTypes) -> int:
    """Bytes of the KV cache of all layers at n_ctx tokens."""
    n_page = -(-n_ctx // PAGE)
    n_row = 2 if hp.latent.n_latent else 1  # a latent is both key and value
    return types.row_bytes(hp.head_dim) // n_row * hp.n_layer * hp.n_head_kv * n_page * PAGE
