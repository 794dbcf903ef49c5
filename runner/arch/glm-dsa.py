"""GLM-5: like deepseek2; an indexer, in some layers only, selects the tokens to attend to."""

from dataclasses import replace

from tamis.arch.deepseek2 import ARCH as DEEPSEEK2

UNREAD = "rope.scaling.yarn_log_multiplier", "attention.temperature_scale"

# The file's keys for layers with an indexer repeat what its tensors show.
ARCH = replace(
    DEEPSEEK2,
    index_neox=False,
    score_experts="sigmoid",
    facts=None,
    keys=(*(key for key in DEEPSEEK2.keys if key not in UNREAD), "attention.indexer.top_k"),
)
