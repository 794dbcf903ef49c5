"""The cache of summaries: whole or not at all, private, bounded, shared by processes."""

import os
import threading
from dataclasses import dataclass

import pytest

from tamis.platform.private_files import write_whole
from tamis.summary import cache as summary_cache
from tamis.summary.cache import Cache, CacheError, key_of, model_digest

A, B, C = (key_of(name) for name in "abc")


@dataclass
class Kept:
    text: str
    n: int = 3


def writer(n_bytes):
    return lambda path: path.write_bytes(bytes(n_bytes))


def files(cache):
    return sorted(p.name for p in cache.folder.iterdir())


def test_an_answer_is_found_again_by_every_later_process(tmp_path):
    cache = Cache(tmp_path / "c")
    assert cache.get(A, Kept) is None
    cache.put(A, Kept("grüß"))
    assert Cache(tmp_path / "c").get(A, Kept) == Kept("grüß")
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700
    assert all(p.stat().st_mode & 0o077 == 0 for p in (tmp_path / "c").glob("*.json"))


@pytest.mark.parametrize("damage", [lambda d: d[:-3], lambda d: d.replace(b"one", b"two")])
def test_a_damaged_answer_and_one_of_another_key_count_as_none(tmp_path, damage):
    cache = Cache(tmp_path)
    cache.put(A, Kept("one"))
    path = tmp_path / f"{A}.json"
    (tmp_path / f"{B}.json").write_bytes(path.read_bytes())
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(A, Kept) is None
    assert cache.get(B, Kept) is None


@pytest.mark.parametrize(
    "text",
    ["", "3", "[" * 99999, '{"text": "a"}', '{"text": 1, "n": 3}', '{"text": "a", "n": true}'],
)
def test_other_content_with_its_digest_counts_as_none(tmp_path, text):
    cache = Cache(tmp_path)
    (tmp_path / f"{A}.json").write_text(f"{summary_cache._digest(A, text)}\n{text}")
    assert cache.get(A, Kept) is None


def test_the_least_recently_used_go_when_it_is_over_its_size(tmp_path):
    said = []
    cache = Cache(tmp_path, 2500, said.append)
    for i, key in enumerate((A, B)):
        cache.keep_state(key, 1000, writer(1000))
        os.utime(tmp_path / f"{key}.session", (i, i))
    (tmp_path / "notes.txt").write_bytes(bytes(9000))  # somebody else's
    assert cache.state(A) == tmp_path / f"{A}.session"  # used now
    cache.keep_state(C, 1000, writer(1000))
    assert files(cache) == sorted([f"{A}.session", f"{C}.session", "notes.txt"])
    (text,) = said
    assert "removed what was not used for longest (1 files)" in text


def test_what_is_larger_than_the_cache_is_not_kept_and_it_says_so(tmp_path):
    said = []
    cache = Cache(tmp_path, 10**8, said.append)
    cache.keep_state(A, 10**9, writer(5))
    assert cache.state(A) is None
    assert said == [
        "not kept for more questions: 1.00 GB of KV cache, the cache may have 0.10 GB: "
        "raise --cache-size"
    ]


def test_a_full_disk_is_said_and_no_error(tmp_path, monkeypatch):
    said = []
    cache = Cache(tmp_path, say=said.append)

    def full(*_args):
        raise OSError(28, "No space left on device")

    cache.keep_state(A, 5, full)
    monkeypatch.setattr(os, "fsync", full)
    cache.put(A, Kept("a"))
    assert files(cache) == []
    assert said == [f"not kept in the cache {tmp_path}: No space left on device"] * 2


def test_what_a_killed_process_left_goes_and_what_another_writes_stays(tmp_path):
    left, beside = tmp_path / f".{A}.session.abcdefgh.tamis-part", tmp_path / "mine.txt"
    for path in (left, beside):
        path.write_text("x")
    with write_whole(tmp_path / "b") as file:
        file.write(b"b")
        cache = Cache(tmp_path)
    assert files(cache) == ["b", "mine.txt"]


def test_a_folder_that_others_may_write_to_or_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(CacheError, match="can be changed by others"):
        Cache(tmp_path / "open")
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match=r"--cache-dir, or use --no-cache"):
        Cache(tmp_path / "file" / "c")


def test_threads_may_write_one_key_at_once(tmp_path):
    cache = Cache(tmp_path)
    work = [threading.Thread(target=cache.put, args=(A, Kept(str(i) * 9999))) for i in range(8)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(set(cache.get(A, Kept).text)) == 1
    assert files(cache) == [f"{A}.json"]


def test_models_are_distinguished_by_their_bytes_and_all_their_parts(tmp_path):
    one = tmp_path / "m-00001-of-00002.gguf"
    two = tmp_path / "m-00002-of-00002.gguf"
    for path in (one, two):
        path.write_bytes(bytes(100_000))
    before = model_digest(one)
    assert model_digest(one) == before
    data = bytearray(two.read_bytes())
    data[-1] = 1
    status = two.stat()
    two.write_bytes(data)
    os.utime(two, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert model_digest(one) != before
