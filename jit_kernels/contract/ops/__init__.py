"""The op contract: every op once, its argument struct and its compile-time constants, no body.

Ops of particular models and methods are imported when one is used: a run with dense attention
imports none of their files.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from tamis.jit_kernels.contract.op import *
from tamis.jit_kernels.contract.op import READS_NOTHING, Op, Reads
from tamis.jit_kernels.contract.ops.attention import *
from tamis.jit_kernels.contract.ops.kv import *
from tamis.jit_kernels.contract.ops.linear import *
from tamis.jit_kernels.contract.ops.norm import *
from tamis.jit_kernels.contract.ops.runtime import *
from tamis.jit_kernels.contract.ops.sampling import *
from tamis.jit_kernels.contract.ops.select.common import *

if TYPE_CHECKING:
    from tamis.jit_kernels.contract.ops.audit import *
    from tamis.jit_kernels.contract.ops.encode import *
    from tamis.jit_kernels.contract.ops.fused import *
    from tamis.jit_kernels.contract.ops.moe import *
    from tamis.jit_kernels.contract.ops.recurrent import *
    from tamis.jit_kernels.contract.ops.select.bigbird import *
    from tamis.jit_kernels.contract.ops.select.clusters import *
    from tamis.jit_kernels.contract.ops.select.cpe import *
    from tamis.jit_kernels.contract.ops.select.delta import *
    from tamis.jit_kernels.contract.ops.select.double_sparsity import *
    from tamis.jit_kernels.contract.ops.select.h2o import *
    from tamis.jit_kernels.contract.ops.select.hip import *
    from tamis.jit_kernels.contract.ops.select.hshare import *
    from tamis.jit_kernels.contract.ops.select.hyperattention import *
    from tamis.jit_kernels.contract.ops.select.indexer import *
    from tamis.jit_kernels.contract.ops.select.key_codes import *
    from tamis.jit_kernels.contract.ops.select.key_copy import *
    from tamis.jit_kernels.contract.ops.select.lfps import *
    from tamis.jit_kernels.contract.ops.select.magicpig import *
    from tamis.jit_kernels.contract.ops.select.metered import *
    from tamis.jit_kernels.contract.ops.select.quest import *
    from tamis.jit_kernels.contract.ops.select.snapkv import *
    from tamis.jit_kernels.contract.ops.select.tactic import *
    from tamis.jit_kernels.contract.ops.select.twilight import *
    from tamis.jit_kernels.contract.ops.select.vertical_slash import *
    from tamis.jit_kernels.contract.ops.streams import *

    KV_READERS: dict[str, Reads]

_SELECT = importlib.import_module("tamis.jit_kernels.contract.ops.select")
# Files that are imported when one of their names is used, in this order.
_LATER = ["audit", "encode", "fused", "moe", "recurrent", "streams"]
_LATER += [f"select.{found.name}" for found in pkgutil.iter_modules(_SELECT.__path__)]


def declared() -> dict[str, Op]:
    """All ops by name, including those of every method and model."""
    for file in _LATER:
        _load(file)
    return {op.name: op for op in globals().values() if isinstance(op, Op)}


def _load(file: str) -> None:
    """Import a file; the names that it declares become this module's."""
    module = importlib.import_module(f"{__name__}.{file}")
    globals().update({k: v for k, v in vars(module).items() if not k.startswith("_")})


def __getattr__(name: str) -> Any:
    if name == "KV_READERS":  # what ops read, by KV_EVICT's names
        reads = [op.reads for op in declared().values() if op.reads is not READS_NOTHING]
        globals()[name] = {each.name: each for each in reads}
    if not name.startswith("_"):
        for file in _LATER:
            if name in globals():
                break
            _load(file)
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]
