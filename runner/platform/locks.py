"""Locks of files between processes.

They are the system's and end with their process in any case.
"""

import fcntl


def lock(handle: int) -> None:
    """Wait for the lock of an open file."""
    fcntl.flock(handle, fcntl.LOCK_EX)


def try_lock(handle: int) -> bool:
    """Take the lock of an open file; False if another process holds it. Raises OSError."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(handle: int) -> None:
    """Release the lock of an open file; otherwise it lasts while the file is open or mapped."""
    fcntl.flock(handle, fcntl.LOCK_UN)
