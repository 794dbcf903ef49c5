"""The KV cache on a GPU: row layouts by type, page cache ops, token freezing."""
