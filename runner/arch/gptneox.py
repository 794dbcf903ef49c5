"""GPT-NeoX, Pythia: biases everywhere; the parts are parallel if the file says so."""

from tamis.graph.layer import parallel
from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    norm="layer",
    gated=False,
    activation="gelu",
    keys=("use_parallel_residual",),
    facts=lambda hp: {"layer": parallel if hp.parallel else None},
)
