"""PLM 1.8B: latent attention, a squared ReLU instead of a gate, tied output."""

from tamis.arch.deepseek2 import layer
from tamis.graph.mixers.latent import key_scaled, latent_tensors
from tamis.model.arch import Arch

ARCH = Arch(
    neox=False,
    gated=False,
    activation="relu2",
    layer=layer,
    tensors=latent_tensors,
    keys=("attention.kv_lora_rank",),
    derived=key_scaled,
)
