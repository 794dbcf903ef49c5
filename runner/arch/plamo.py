"""PLaMo: parallel parts after one norm."""

from tamis.graph.layer import parallel
from tamis.model.arch import Arch

ARCH = Arch(neox=True, layer=parallel, derived=lambda hp: {"n_rot": hp.head_dim})
