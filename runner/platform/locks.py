"""Locks of files between processes. The system's: they end with their process, however it ends."""

import fcntl


def lock(handle: int) -> None:
    """Wait for the lock of an open file."""
    fcntl.flock(handle, fcntl.LOCK_EX)


def try_lock(handle: int) -> bool:
    """Take the lock of an open file; False where another holds it. Raises OSError."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(handle: int) -> None:
    """Give the lock of an open file back: else it lasts as long as the file is open or mapped."""
    fcntl.flock(handle, fcntl.LOCK_UN)
