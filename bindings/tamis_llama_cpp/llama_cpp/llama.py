"""The class Llama and the types of its arguments."""

from tamis.bindings.compat import (
    BaseLlamaCache,
    Llama,
    LlamaCache,
    LlamaDiskCache,
    LlamaDraftModel,
    LlamaGrammar,
    LlamaRAMCache,
    LlamaState,
    LlamaTokenizer,
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    StoppingCriteriaList,
)
from tamis.bindings.drop_in.sampling import LogitsProcessor, StoppingCriteria

__all__ = [
    "BaseLlamaCache",
    "Llama",
    "LlamaCache",
    "LlamaDiskCache",
    "LlamaDraftModel",
    "LlamaGrammar",
    "LlamaRAMCache",
    "LlamaState",
    "LlamaTokenizer",
    "LogitsProcessor",
    "LogitsProcessorList",
    "MinTokensLogitsProcessor",
    "StoppingCriteria",
    "StoppingCriteriaList",
]
