"""Text to tokens and back: tokenizers, chat templates, and readers of thinking and tool calls."""
