"""The op contract: ops with typed records, Programs that record them, and what both need."""
