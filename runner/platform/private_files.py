"""Files that only this user may change: folders, opened files, and files written whole or not.

The content of such a folder is trusted like the program itself: kernels are run from it.
"""

import contextlib
import errno
import grp
import os
import pwd
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tamis.platform.locks import lock, try_lock, unlock

_PART = ".tamis-part"  # the end of the name of a file that is being written
_PART_NAME = re.compile(r"\.[^/]*\.[a-z0-9_]{8}\.tamis-part")
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40  # as the kernel


class PrivacyError(OSError):
    """Another user may change a file or folder; the message names it, its mode and its owner."""

    def __init__(self, path: Path, status: os.stat_result) -> None:
        super().__init__(
            f"{path} can be changed by others (mode {stat.S_IMODE(status.st_mode):o}, owner "
            f"{status.st_uid}); expected owner {os.getuid()} and no one else to write to it"
        )
        self.path = path


def private_folder(path: Path) -> Path:
    """Make a folder with mode 0700 and its parents, and check it; returns the path without links.

    It must be this user's and not writable by others; no other user may be able to replace a folder
    or link on the way to it. Raises PrivacyError, OSError.
    """
    path = Path.cwd() / path
    for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if status.st_uid != os.getuid() or status.st_mode & _OTHERS:
        raise PrivacyError(path, status)
    return _checked_way(path)


def open_private(path: Path) -> BinaryIO:
    """Open a file for reading; checked after it was opened, so that it cannot be exchanged.

    It must be a regular file of this user, no link, and not writable by others. Raises
    PrivacyError, OSError.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(handle)
    if not _is_private_file(status):
        os.close(handle)
        raise PrivacyError(path, status)
    return os.fdopen(handle, "rb")


@contextlib.contextmanager
def write_whole(path: Path, *, durable: bool = True, shared: bool = False) -> Iterator[BinaryIO]:
    """Write a file that gets its name only once all of it is on disk.

    Its mode is 0600, or with `shared` that of other new files. Until then it has a name of its own
    in the folder; files that killed processes left under such names are removed first. An error
    leaves the folder as it was, and an older file in place. durable: wait for the disk, so that a
    power failure loses neither the new file nor the old one. Raises OSError.
    """
    folder = path.parent
    remove_unfinished(folder)
    handle, name = _unfinished(folder, path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            if shared:
                os.fchmod(file.fileno(), 0o666 & ~_umask())
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    if durable:
        sync_folder(folder)


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files of a folder whose processes have ended."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if _PART_NAME.fullmatch(entry.name):
                _remove_if_dead(entry.path)


@contextlib.contextmanager
def write_on(path: Path) -> Iterator[int | None]:
    """Open a file, mode 0600, to write or continue it; None if another process writes it.

    An error removes it. The caller renames it when all of it is on disk. Raises PrivacyError,
    OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    handle = os.open(path, flags, 0o600)
    try:
        status = os.fstat(handle)
        if not _is_private_file(status):
            raise PrivacyError(path, status)
        if not try_lock(handle) or not _has_name(status, path):
            yield None  # or its writer has just finished it
            return
        try:
            yield handle
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise
        finally:
            unlock(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_private_file(status: os.stat_result) -> bool:
    mine = status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode)
    return mine and not status.st_mode & _OTHERS


def _has_name(status: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(status, os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _unfinished(folder: Path, name: str) -> tuple[int, str]:
    """A new, locked file and its path: a file without its writer's lock may be removed."""
    while True:
        handle, path = tempfile.mkstemp(_PART, f".{name[:128]}.", folder)
        try:
            lock(handle)
            if os.fstat(handle).st_nlink:  # otherwise it was removed before it was locked
                return handle, path
        except BaseException:
            os.unlink(path)
            os.close(handle)
            raise
        os.close(handle)


def _umask() -> int:
    """The mode bits that new files lack."""
    os.umask(found := os.umask(0o077))
    return found


def _remove_if_dead(path: str) -> None:
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if try_lock(handle):
                os.unlink(path)
        finally:
            os.close(handle)


def _checked_way(path: Path) -> Path:
    """The path without links. Raises PrivacyError if others could replace a part of it."""
    at, waiting, n_link = Path("/"), list(reversed(path.parts[1:])), 0
    _check_parent(at, os.lstat(at))
    while waiting:
        name = waiting.pop()
        if name == "..":
            at = at.parent
            continue
        status = os.lstat(at / name)
        if not stat.S_ISLNK(status.st_mode):
            at /= name
            _check_parent(at, status)
            continue
        n_link += 1
        if status.st_uid not in _owners() or n_link > _MAX_LINKS:
            raise PrivacyError(at / name, status)
        target = Path(os.readlink(at / name))
        at = Path("/") if target.is_absolute() else at
        waiting += reversed(target.parts[target.is_absolute() :])
    return at


def _check_parent(path: Path, status: os.stat_result) -> None:
    # In a folder with the sticky bit, such as /tmp, only the owner of a file can rename it.
    sticky = bool(status.st_mode & stat.S_ISVTX)
    if status.st_uid not in _owners() or (_others_write(status) and not sticky):
        raise PrivacyError(path, status)


def _others_write(status: os.stat_result) -> bool:
    """Whether a folder's mode lets others write; a group with only this user does not count."""
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _is_own_group(gid: int) -> bool:
    """Whether a group is the private one that some systems give to each user."""
    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    own = gid == user.pw_gid and group.gr_name == user.pw_name
    return own and not {*group.gr_mem} - {user.pw_name}


def _owners() -> set[int]:
    """The users who may own the folders above: this user and root."""
    owners = {0, os.getuid()}
    with contextlib.suppress(OSError, ValueError):
        mapped = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
        if not any(int(first) == 0 for first, _, _ in mapped):
            # A user namespace without root shows root's files as those of nobody.
            owners.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return owners
