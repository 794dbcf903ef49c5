"""LFM2 mixture of experts: gated short convolutions, dense first layers, then experts."""

from dataclasses import replace

from tamis.arch.lfm2 import ARCH as LFM2

ARCH = replace(LFM2, keys=("expert_gating_func",))
