"""Summaries of documents of any length, and answers to questions about them."""
