from tamis.bindings.compat import LlamaDraftModel, LlamaPromptLookupDecoding  # noqa: F401
