"""DeepSeek-V3.2: like deepseek2; an indexer selects the tokens that each token attends to."""

from dataclasses import replace

from tamis.arch.deepseek2 import ARCH as DEEPSEEK2
from tamis.graph.mixers.latent import yarn_scaled

UNREAD = "attention.temperature_scale"

ARCH = replace(
    DEEPSEEK2,
    keys=(*(key for key in DEEPSEEK2.keys if key != UNREAD), "attention.indexer.top_k"),
    derived=lambda hp: yarn_scaled(hp) | {"index_eps": 1e-6},
)
