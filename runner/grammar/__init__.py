"""What a text may look like: JSON schemas and GBNF, written as llguidance's grammars."""
