"""Grammars of answers."""

from tamis.bindings.drop_in.grammar import JSON_GBNF, LlamaGrammar, json_schema_to_gbnf

LLAMA_GRAMMAR_DEFAULT_ROOT = "root"

__all__ = ["JSON_GBNF", "LLAMA_GRAMMAR_DEFAULT_ROOT", "LlamaGrammar", "json_schema_to_gbnf"]
