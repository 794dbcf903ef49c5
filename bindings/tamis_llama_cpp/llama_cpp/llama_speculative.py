"""Draft models."""

from tamis.bindings.drop_in.drafting import LlamaDraftModel, LlamaPromptLookupDecoding

__all__ = ["LlamaDraftModel", "LlamaPromptLookupDecoding"]
