"""The operating system: memory, processes, locks, processors, files that survive a crash."""
