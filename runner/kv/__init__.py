"""The KV cache of a sequence: pages in memory, on a GPU with RAM behind it, or over a file."""
