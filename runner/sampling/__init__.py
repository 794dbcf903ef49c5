"""Samplers: what chooses the next token from logits, one family a file, and grammars."""
