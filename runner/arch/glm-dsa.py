"""GLM-5: as deepseek2; an indexer, in some layers only, chooses what each token attends to."""

from dataclasses import replace

from tamis.arch.deepseek2 import ARCH as DEEPSEEK2

# What the file says of layers with an indexer is said by its tensors too.
ARCH = replace(
    DEEPSEEK2,
    index_neox=False,
    score_experts="sigmoid",
    facts=None,
    keys=(*DEEPSEEK2.keys, "attention.indexer.top_k"),
)
