"""Samplers: steps that choose the next token from logits, one family a file, and grammars."""
