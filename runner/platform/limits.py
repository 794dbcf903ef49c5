"""Limits that a process sets for itself; beyond them a request fails, or the process ends."""

import resource

KINDS = {
    "core": resource.RLIMIT_CORE,  # bytes of a core dump
    "cpu": resource.RLIMIT_CPU,  # seconds of processor time; SIGXCPU, at the hard limit SIGKILL
    "file": resource.RLIMIT_FSIZE,  # bytes of a file that is written
    "files": resource.RLIMIT_NOFILE,  # open files
    "memory": resource.RLIMIT_AS,  # bytes of address space
    "stack": resource.RLIMIT_STACK,  # bytes
}


def limit(what: str, most: int) -> None:
    """Set a limit, one of KINDS, permanently: the process cannot raise it again.

    A lower one stays.
    """
    _, hard = resource.getrlimit(KINDS[what])
    most = _least(most, hard)
    resource.setrlimit(KINDS[what], (most, most))


def lower(what: str, most: int) -> None:
    """Lower a limit, which may be raised again to its old value. A lower one stays."""
    soft, hard = resource.getrlimit(KINDS[what])
    resource.setrlimit(KINDS[what], (_least(most, soft), hard))


def allow_cpu(seconds: int) -> None:
    """Allow this process so much processor time from now on; then SIGXCPU ends it.

    It does not exceed the permanent limit.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = _used_cpu() + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (_least(most, hard), hard))


def lower_cpu(seconds: int) -> None:
    """Allow this process at most so much processor time from now on; a nearer limit stays."""
    lower("cpu", _used_cpu() + seconds)


def most_open_files() -> int:
    """The limit of the numbers of open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _used_cpu() -> int:
    """Whole seconds of processor time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return int(used.ru_utime + used.ru_stime)


def _least(most: int, limit: int) -> int:
    return most if limit == resource.RLIM_INFINITY else min(most, limit)
