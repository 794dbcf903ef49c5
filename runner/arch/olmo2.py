"""OLMo 2 and 3: norms after the parts instead of before; q and k are normed across all heads."""

from tamis.graph.layer import post_normed
from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    layer=post_normed,
    full_attention_every=4,
    rope_factors=False,
    keys=("attention.sliding_window_pattern",),
    derived=lambda hp: {"rope_base_swa": hp.rope_base},  # unscaled, whatever base the file has
)
