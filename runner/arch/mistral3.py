"""Mistral 3 (Ministral): like llama; queries grow with each original context before them."""

from dataclasses import replace
from math import log
from typing import Any

from tamis.model.arch import Arch
from tamis.model.hparams import HParams


def _derived(hp: HParams) -> dict[str, Any]:
    """Derived hyperparameters: the growth of queries, and YaRN's divisor of cosines.

    The latter is the file's mscale_all_dim.
    """
    (_, heat, offset), scaling, found = hp.temperature, hp.rope_scaling, dict[str, Any]()
    if heat:
        found["temperature"] = hp.n_ctx_orig, heat, offset
    if scaling.kind == "yarn" and hp.yarn_log:
        all_dim = 1.0 + 0.1 * hp.yarn_log * log(max(scaling.factor, 1.0))
        found["rope_scaling"] = replace(scaling, attn_factor=scaling.attn_factor / all_dim)
    return found


ARCH = Arch(
    neox=False,
    derived=_derived,
    keys=(
        "attention.temperature_scale",
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_log_multiplier",
    ),
)
