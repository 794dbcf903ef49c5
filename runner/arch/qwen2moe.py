"""Qwen1.5 and Qwen2 mixtures of experts: a shared expert with a gate beside the chosen ones."""

from typing import Any

from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def _derived(hp: HParams) -> dict[str, Any]:
    """Where the file has no size of the shared expert, it is that of a dense part."""
    return {} if hp.n_ff_shared else {"n_ff_shared": hp.n_ff}


ARCH = Arch(neox=True, shared_ff=True, normalize_experts=False, derived=_derived)
