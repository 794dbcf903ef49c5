"""DeepSeek-V3.2: like deepseek2; an indexer selects the tokens that each token attends to."""

from dataclasses import replace

from tamis.arch.deepseek2 import ARCH as DEEPSEEK2
from tamis.graph.mixers.latent import yarn_scaled

ARCH = replace(
    DEEPSEEK2,
    keys=(*DEEPSEEK2.keys, "attention.indexer.top_k"),
    derived=lambda hp: yarn_scaled(hp) | {"index_eps": 1e-6},
)
