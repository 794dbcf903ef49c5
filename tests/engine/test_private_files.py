"""Folders and files that only this user may change, and files that are written whole or not."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tamis.bindings.drop_in.caches import LlamaDiskCache, LlamaState
from tamis.jit_kernels.compile.store import (
    KernelStoreError,
    open_folder,
    read_object,
    write_object,
)
from tamis.platform.private_files import (
    PrivacyError,
    open_private,
    private_folder,
    remove_unfinished,
    write_whole,
)

NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


def test_a_folder_and_its_parents_are_made_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert [p.stat().st_mode & 0o777 for p in (folder, folder.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o777, 0o773, 0o702])
@pytest.mark.parametrize("at", ["a", "a/b", "a/b/c"])
def test_a_folder_that_others_may_write_to_or_replace_is_refused(tmp_path, mode, at):
    folder = tmp_path / "a" / "b" / "c"
    private_folder(folder)
    (tmp_path / at).chmod(mode)
    with pytest.raises(PrivacyError, match="can be changed by others") as error:
        private_folder(folder)
    assert error.value.path == tmp_path / at
    with pytest.raises(KernelStoreError, match="is not safe"):
        open_folder(folder)


def test_a_folder_below_one_with_the_sticky_bit_is_safe(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    assert private_folder(tmp_path / "tmp" / "mine") == tmp_path / "tmp" / "mine"


@needs_root
@pytest.mark.parametrize("at", ["a", "a/b"])
def test_a_folder_or_a_parent_of_another_user_is_refused(tmp_path, at):
    private_folder(tmp_path / "a" / "b")
    os.chown(tmp_path / at, NOBODY, NOBODY)
    with pytest.raises(PrivacyError, match=f"owner {NOBODY}"):
        private_folder(tmp_path / "a" / "b")


def test_links_are_followed_and_where_they_lead_is_checked(tmp_path):
    private_folder(tmp_path / "real" / "x")
    (tmp_path / "way").symlink_to("real")
    assert private_folder(tmp_path / "way" / "x") == tmp_path / "real" / "x"
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "link").symlink_to(tmp_path / "real")
    (tmp_path / "around").symlink_to(tmp_path / "open" / "link")
    with pytest.raises(PrivacyError):
        private_folder(tmp_path / "around" / "x")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=r"loop|symbolic"):
        private_folder(tmp_path / "loop" / "x")


def test_a_file_is_checked_after_it_was_opened(tmp_path):
    with write_whole(tmp_path / "f") as file:
        file.write(b"abc")
    with open_private(tmp_path / "f") as file:
        assert file.read() == b"abc"
    (tmp_path / "link").symlink_to("f")
    with pytest.raises(OSError, match="symbolic"):
        open_private(tmp_path / "link")
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "."):
        with pytest.raises(PrivacyError):
            open_private(tmp_path / name)
    (tmp_path / "f").chmod(0o620)
    with pytest.raises(PrivacyError, match="mode 620"):
        open_private(tmp_path / "f")


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.chmod(0o666),
        lambda path: (path.rename(path.with_suffix(".x")), path.symlink_to(path.with_suffix(".x"))),
        pytest.param(lambda path: os.chown(path, NOBODY, NOBODY), marks=needs_root),
    ],
)
def test_a_kernel_that_others_may_change_counts_as_missing(tmp_path, change):
    folder = open_folder(tmp_path)
    write_object(folder, "k", b"code")
    assert read_object(folder, "k") == b"code"
    change(folder / "k.o")
    assert read_object(folder, "k") is None
    write_object(folder, "k", b"code")
    assert read_object(folder, "k") == b"code"


def test_what_is_written_is_private_and_an_error_leaves_what_was_there(tmp_path):
    before = os.umask(0)
    try:
        with write_whole(tmp_path / "f") as file:
            file.write(b"old")
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600

    def interrupted():
        with write_whole(tmp_path / "f") as file:
            file.write(b"new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "f").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_what_a_killed_process_left_is_removed_and_what_is_being_written_is_not(tmp_path):
    code = (
        "import os, sys; from pathlib import Path\n"
        "from tamis.platform.private_files import write_whole\n"
        "with write_whole(Path(sys.argv[1])) as file:\n"
        "    file.write(b'x'); file.flush(); os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "f")], check=False)
    (dead,) = tmp_path.iterdir()
    (tmp_path / ".mine.tamis-part").write_text("not of this program")
    with write_whole(tmp_path / "g") as file:
        file.write(b"y")
        remove_unfinished(tmp_path)
    assert not dead.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".mine.tamis-part", "g"]


# --- LlamaDiskCache ------------------------------------------------------------------------------


def state(*tokens):
    data = b"state of " + bytes(tokens)
    ids = np.array(tokens, np.int32)
    return LlamaState(ids, np.zeros((0, 9), np.float32), len(tokens), data, len(data), 7)


def test_a_disk_cache_refuses_a_folder_that_others_may_write_to(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(OSError, match="can be changed by others"):
        LlamaDiskCache(str(tmp_path / "open"))


def save_npz(**changes):
    def damage(path):
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        np.savez(path, **{k: v for k, v in (arrays | changes).items() if v is not None})

    return damage


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "no zip": lambda path: path.write_bytes(b"PK\3\4 no zip"),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": lambda path: path.write_bytes(path.read_bytes().replace(b"state of", b"State of")),
    "no state": save_npz(state=None),
    "no key": save_npz(key=None),
    "a key of text": save_npz(key=np.array(["a"])),
    "numbers that are too few": save_npz(numbers=np.array([1, 2])),
    "other numbers": save_npz(numbers=np.array([9, 9, 9])),
    "pickled": save_npz(state=np.array([{}], object)),
    "tokens that are fractions": save_npz(input_ids=np.zeros(3, np.float64)),
    "scores of one dimension": save_npz(scores=np.zeros(3, np.float32)),
    "others may write": lambda path: path.chmod(0o666),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_counts_as_none_and_the_others_are_found(tmp_path, damage):
    cache = LlamaDiskCache(str(tmp_path / "c"))
    cache[[1, 2]] = state(1, 2)
    (right,) = (tmp_path / "c").iterdir()
    cache[[1, 2, 3]] = state(1, 2, 3)
    (path,) = {*(tmp_path / "c").iterdir()} - {right}
    assert cache[[1, 2, 3, 4]].n_tokens == 3
    DAMAGE[damage](path)
    path.chmod(0o666 if damage == "others may write" else 0o600)
    found = cache[[1, 2, 3, 4]]
    assert (found.n_tokens, found.llama_state) == (2, state(1, 2).llama_state)
    assert not path.exists()
    assert [1, 2, 3] in cache
    assert cache.cache_size == right.stat().st_size
