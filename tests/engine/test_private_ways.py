"""Each rule of private files and folders at both sides of where it begins."""

import fcntl
import grp
import os
import pwd
import stat
import threading
from pathlib import Path

import pytest

from tamis.platform import private_files
from tamis.platform.private_files import (
    PrivacyError,
    open_private,
    private_folder,
    write_on,
    write_whole,
)

ME = pwd.getpwuid(os.getuid())
OTHER = 54321


def n_open():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def group_of(monkeypatch):
    """Makes the group of every folder one with the members and the name given."""

    def set_(name=ME.pw_name, members=(), primary=True):
        found = grp.struct_group((name, "x", ME.pw_gid, list(members)))
        user = ME if primary else pwd.struct_passwd((*ME[:3], OTHER, *ME[4:]))
        monkeypatch.setattr(private_files.grp, "getgrgid", lambda gid: found)
        monkeypatch.setattr(private_files.pwd, "getpwuid", lambda uid: user)

    return set_


@pytest.fixture
def folder_of_group(tmp_path):
    private_folder(tmp_path / "a" / "b")
    (tmp_path / "a").chmod(0o770)
    return tmp_path / "a" / "b"


def test_a_group_of_this_user_alone_may_write_above(folder_of_group, group_of):
    for members in ((), (ME.pw_name,)):
        group_of(members=members)
        assert private_folder(folder_of_group) == folder_of_group
    folder_of_group.chmod(0o770)
    with pytest.raises(PrivacyError, match="mode 770"):
        private_folder(folder_of_group)


@pytest.mark.parametrize(
    "group",
    [
        {"name": "users"},
        {"members": ["eve"]},
        {"members": [ME.pw_name, "eve"]},
        {"primary": False},
    ],
)
def test_any_other_group_may_not(folder_of_group, group_of, group):
    group_of(**group)
    with pytest.raises(PrivacyError, match="mode 770"):
        private_folder(folder_of_group)


def test_a_user_or_group_without_a_name_is_none_of_one_user(folder_of_group, monkeypatch):
    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr(private_files.grp, "getgrgid", unknown)
    with pytest.raises(PrivacyError, match="mode 770"):
        private_folder(folder_of_group)
    monkeypatch.setattr(private_files.pwd, "getpwuid", unknown)
    with pytest.raises(PrivacyError, match="mode 770"):
        private_folder(folder_of_group)
    folder_of_group.parent.chmod(0o750)
    assert private_folder(folder_of_group) == folder_of_group, "nobody else writes: no group counts"


@pytest.mark.parametrize(
    ("uids", "nobody"),
    [("0 0 4294967295", False), ("0 1000 1\n1 100000 65536", False), ("1000 1000 1", True)],
)
def test_nobody_owns_what_root_has_only_in_a_namespace_without_root(monkeypatch, uids, nobody):
    texts = {"/proc/self/uid_map": uids, "/proc/sys/kernel/overflowuid": f"{OTHER}\n"}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[str(path)])
    assert private_files._owners() == {0, os.getuid()} | ({OTHER} if nobody else set())


def test_where_the_namespace_is_not_told_nobody_is_trusted(monkeypatch):
    def missing(path):
        raise FileNotFoundError(str(path))

    monkeypatch.setattr(Path, "read_text", missing)
    assert private_files._owners() == {0, os.getuid()}


@pytest.fixture
def owned(monkeypatch):
    """Makes folders and links show other owners and modes, by path."""
    lstat, changes = os.lstat, {}

    def shown(path):
        found = list(lstat(path))
        mode, uid = changes.get(str(path), (None, None))
        if mode is not None:
            found[stat.ST_MODE] = found[stat.ST_MODE] & ~0o7777 | mode
        if uid is not None:
            found[stat.ST_UID] = uid
        return os.stat_result(found)

    monkeypatch.setattr(private_files.os, "lstat", shown)
    return changes


@pytest.mark.parametrize("change", [(0o777, None), (None, OTHER), (0o1777, OTHER)])
def test_every_folder_from_the_root_on_is_checked(tmp_path, owned, change):
    path = private_folder(tmp_path / "a" / "b")
    for folder in path.parents:
        owned[str(folder)] = change
        with pytest.raises(PrivacyError, match="can be changed by others") as error:
            private_folder(path)
        assert error.value.path == folder
        owned.clear()
    assert private_folder(path) == path


def test_a_link_is_this_users_or_roots_and_not_one_of_more_than_forty(tmp_path, owned):
    end = private_folder(tmp_path / "end")
    at = end
    for i in range(41):
        (tmp_path / f"l{i}").symlink_to(at)
        at = tmp_path / f"l{i}"
    assert private_files._checked_way(tmp_path / "l39") == end
    with pytest.raises(PrivacyError):
        private_files._checked_way(at)
    owned[str(tmp_path / "l0")] = (None, OTHER)
    with pytest.raises(PrivacyError, match=f"owner {OTHER}"):
        private_folder(tmp_path / "l0")
    owned[str(tmp_path / "l0")] = (None, 0)
    assert private_folder(tmp_path / "l0") == end


def test_a_link_that_leads_upwards_is_followed_and_all_after_it_is_checked(tmp_path, owned):
    private_folder(tmp_path / "real" / "x")
    private_folder(tmp_path / "a" / "b")
    (tmp_path / "a" / "b" / "up").symlink_to("../../real")
    path = tmp_path / "a" / "b" / "up" / "x"
    assert private_folder(path) == tmp_path / "real" / "x"
    owned[str(tmp_path / "real")] = (0o777, None)
    with pytest.raises(PrivacyError):
        private_folder(path)


def test_what_is_no_folder_is_no_private_one(tmp_path, monkeypatch):
    (tmp_path / "f").write_text("")
    (tmp_path / "f").chmod(0o600)
    with pytest.raises(NotADirectoryError, match="f"):
        private_folder(tmp_path / "f")
    monkeypatch.chdir(tmp_path)
    assert private_folder(Path("sub")) == tmp_path.resolve() / "sub"


def test_a_file_of_others_is_refused_and_closed(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(b"abc")
    (tmp_path / "f").chmod(0o600)
    before = n_open()
    with monkeypatch.context() as patch:
        patch.setattr(private_files.os, "getuid", lambda: OTHER)
        with pytest.raises(PrivacyError):
            open_private(tmp_path / "f")
    for mode in (0o620, 0o602):
        (tmp_path / "f").chmod(mode)
        with pytest.raises(PrivacyError):
            open_private(tmp_path / "f")
        with pytest.raises(PrivacyError), write_on(tmp_path / "f"):
            pass
    assert (tmp_path / "f").read_bytes() == b"abc"
    assert n_open() == before
    (tmp_path / "f").chmod(0o644)
    with open_private(tmp_path / "f") as file:
        assert not os.get_inheritable(file.fileno())


def test_a_file_is_written_on_by_one_only_and_an_error_removes_it(tmp_path):
    path, before = tmp_path / "f", n_open()
    with write_on(path) as handle:
        assert path.stat().st_mode & 0o777 == 0o600
        assert not os.get_inheritable(handle)
        os.write(handle, b"abc")
        with write_on(path) as other:
            assert other is None
        assert path.exists()
    with write_on(path) as handle:
        assert os.read(handle, 9) == b"abc", "it is gone on with"

    def interrupted():
        with write_on(path):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not path.exists()
    assert n_open() == before


def test_an_error_after_the_file_was_renamed_is_the_error(tmp_path):
    def renamed():
        with write_on(tmp_path / "f"):
            os.replace(tmp_path / "f", tmp_path / "g")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        renamed()
    assert [path.name for path in tmp_path.iterdir()] == ["g"]


def test_a_file_that_was_renamed_before_it_was_locked_is_not_written_on(tmp_path, monkeypatch):
    lock = private_files.try_lock

    def late(handle):
        os.replace(tmp_path / "f", tmp_path / "g")
        return lock(handle)

    monkeypatch.setattr(private_files, "try_lock", late)
    with write_on(tmp_path / "f") as handle:
        assert handle is None
    monkeypatch.undo()
    os.symlink("g", tmp_path / "f")
    with pytest.raises(OSError, match="symbolic"), write_on(tmp_path / "f"):
        pass


def test_the_lock_of_a_file_ends_with_its_writing_though_it_stays_mapped(tmp_path):
    with write_on(tmp_path / "f") as handle:
        again = os.dup(handle)  # as a mapping keeps it open
    with (tmp_path / "f").open("rb") as file:
        assert private_files.try_lock(file.fileno())
    os.close(again)


def test_a_pipe_is_neither_waited_for_nor_written_on(tmp_path):
    os.mkfifo(tmp_path / "f", 0o600)
    with pytest.raises(PrivacyError), write_on(tmp_path / "f"):
        pass
    part = tmp_path / ".f.abcdefgh.tamis-part"
    os.mkfifo(part, 0o600)
    thread = threading.Thread(target=private_files.remove_unfinished, args=(tmp_path,), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "it waits for a writer of the pipe"


def test_what_dead_processes_left_goes_before_a_file_is_written(tmp_path):
    dead, living = tmp_path / ".f.abcdefgh.tamis-part", tmp_path / ".f.bbcdefgh.tamis-part"
    link, kept = tmp_path / ".f.cbcdefgh.tamis-part", tmp_path / "kept"
    for path in (dead, living, kept):
        path.write_text("x")
    link.symlink_to(kept)
    before = n_open()
    with living.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with write_whole(tmp_path / "f"):
            assert not dead.exists()
    assert living.exists()
    assert kept.exists()
    assert link.is_symlink(), "a link is not followed"
    assert n_open() == before


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_shared_file_has_the_mode_of_new_files_and_the_umask_stays(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        with write_whole(tmp_path / "f", shared=True) as file:
            file.write(b"x")
        assert os.umask(mask) == mask
        with write_whole(tmp_path / "g"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == mode
    assert (tmp_path / "g").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("durable", [True, False])
def test_file_and_name_are_on_the_disk_where_they_are_to_be(tmp_path, monkeypatch, durable):
    synced = []
    monkeypatch.setattr(
        private_files.os, "fsync", lambda handle: synced.append(os.fstat(handle).st_mode)
    )
    before = n_open()
    with write_whole(tmp_path / "f", durable=durable) as file:
        file.write(b"x")
    assert n_open() == before
    assert [stat.S_ISDIR(mode) for mode in synced] == ([False, True] if durable else [])


def test_a_file_that_was_removed_before_it_was_locked_is_begun_again(tmp_path, monkeypatch):
    lock, removed, before = private_files.lock, [], n_open()

    def late(handle):
        if not removed:
            (path,) = tmp_path.iterdir()
            path.unlink()
            removed.append(path)
        lock(handle)

    monkeypatch.setattr(private_files, "lock", late)
    with write_whole(tmp_path / "f") as file:
        file.write(b"x")
    assert removed
    assert (tmp_path / "f").read_bytes() == b"x"
    assert n_open() == before

    def fails(handle):
        raise OSError("no locks here")

    monkeypatch.setattr(private_files, "lock", fails)
    with pytest.raises(OSError, match="no locks"), write_whole(tmp_path / "g"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
    assert n_open() == before


def test_a_long_name_is_cut_in_that_of_the_unfinished_file(tmp_path):
    name = "n" * 250
    with write_whole(tmp_path / name):
        (unfinished,) = tmp_path.iterdir()
        assert unfinished.name.startswith(f".{'n' * 128}.")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_whose_name_became_a_link_to_it_is_not_written_on(tmp_path, monkeypatch):
    lock = private_files.try_lock

    def late(handle):
        os.replace(tmp_path / "f", tmp_path / "g")
        os.symlink("g", tmp_path / "f")
        return lock(handle)

    monkeypatch.setattr(private_files, "try_lock", late)
    with write_on(tmp_path / "f") as handle:
        assert handle is None


def test_only_whole_names_of_unfinished_files_are_theirs(tmp_path):
    names = {".f.abcdefgh.tamis-part.bak", "x.f.abcdefgh.tamis-part", ".f.abcdefg.tamis-part"}
    for name in names:
        (tmp_path / name).write_text("")
    private_files.remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names


def test_all_of_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    seen = []

    def sync(handle):
        seen.append((os.fstat(handle).st_size, (tmp_path / "f").exists()))

    monkeypatch.setattr(private_files.os, "fsync", sync)
    with write_whole(tmp_path / "f") as file:
        file.write(b"abc")
    assert seen[0] == (3, False)


def test_a_folder_that_another_process_makes_meanwhile_is_no_error(tmp_path, monkeypatch):
    folder = private_folder(tmp_path / "a")
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path != folder and exists(path))
    assert private_folder(folder) == folder


def test_while_the_umask_is_read_new_files_are_private(monkeypatch):
    given = []
    monkeypatch.setattr(private_files.os, "umask", lambda mask: given.append(mask) or 0o022)
    assert private_files._umask() == 0o022
    assert given == [0o077, 0o022]
