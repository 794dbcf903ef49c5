"""Sleeping on a word of memory and waking: numbers of Linux's futex(2)."""

# The number of the system call by machine; most, riscv64 among them, have the generic one.
_FUTEX, _GENERIC = {"x86_64": 202, "aarch64": 98}, 98
WAIT_PRIVATE, WAKE_PRIVATE = 128, 129  # sleep while the word is equal; wake sleepers


def wait_syscall(machine: str) -> int:
    """The number of futex(2) on a machine, given its name in the system."""
    return _FUTEX.get(machine, _GENERIC)
