"""Command-R: LayerNorm, attention and feed-forward part in parallel."""

from tamis.graph.layer import parallel
from tamis.model.arch import Arch

ARCH = Arch(neox=False, norm="layer", layer=parallel, keys=("logit_scale",))
