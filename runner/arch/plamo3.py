"""PLaMo 3: norms before and after each part; seven of eight layers have a window."""

from tamis.model.arch import Arch

ARCH = Arch(
    neox=True,
    full_attention_every=8,
    rope_factors=False,
    keys=("attention.head_count", "attention.sliding_window_pattern", "rope.freq_base_swa"),
)
