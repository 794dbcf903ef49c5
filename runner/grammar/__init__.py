"""Constraints on a text: JSON schemas and GBNF, written as llguidance's grammars."""
