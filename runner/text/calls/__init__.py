"""Readers of tool calls in an answer while it is generated, one for each format."""
