"""The KV cache on the CPU: row layouts by type, page cache ops, checksums, token freezing."""
