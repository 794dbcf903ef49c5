"""What types keys and values are kept in, and what they take."""

from pathlib import Path
from typing import NamedTuple

from tamis.jit_kernels.contract.types import KV_BLOCK, KV_TYPES, PAGE, kv_row
from tamis.model.hparams import HParams

UNITS = (1, 16, 64)  # tokens of a KV head that a DiskTier reads at once
UNIT = 16


class KVTypes(NamedTuple):
    """The types that keys and values are kept in: of KV_TYPES."""

    k: str = "f16"
    v: str = "f16"

    def check(self, head_dim: int) -> None:
        """Raise ValueError where there is no such type, or none for rows of head_dim."""
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
    """How much memory keys and values may take, and where the rest of them is."""

    ram: int  # bytes
    folder: Path
    unit: int  # tokens of a KV head that are read at once


class KVOptions(NamedTuple):
    """What the keys and values of a session are kept as, and where."""

    types: KVTypes
    tier: Tier | None  # None: all in memory
    vram: int | None = None  # bytes of a GPU's memory, the rest in the host's; None: all there


def kv_bytes(hp: HParams, n_ctx: int, types: KVTypes) -> int:
    """Bytes of keys and values of all layers at n_ctx tokens."""
    n_page = -(-n_ctx // PAGE)
    return types.row_bytes(hp.head_dim) * hp.n_layer * hp.n_head_kv * n_page * PAGE
