"""Text to tokens and back: tokenizers, chat templates, and parsers of thoughts and tool calls."""
