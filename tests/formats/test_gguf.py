"""The GGUF reader: what it gives for right files, and what it says of wrong ones."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import (
    Value,
    array,
    boolean,
    f32,
    gguf_bytes,
    i32,
    kv,
    tensor,
    text,
    u8,
    u16,
    u32,
    u64,
    write_bytes,
    write_gguf,
)

from tamis.formats import gguf as gguf_reader
from tamis.formats.ggml_types import GGMLType, type_name
from tamis.formats.gguf import GGUFError, GGUFFile
from tamis.formats.strings import Strings


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def refusal(path: Path, raw: bytes) -> GGUFError:
    """The error for a file of these bytes; it always names the file."""
    with pytest.raises(GGUFError) as caught:
        GGUFFile(write_bytes(path, raw))
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)
    return caught.value


# Types


def test_block_sizes_are_those_of_the_gguf_package():
    for type_ in set(GGMLType) - {GGMLType.Q2_0}:  # newer than the package
        expected = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(type_))]
        if type_ is GGMLType.Q8_1:
            expected = (32, 36)  # the package still has the two floats of 2023; ggml has halves
        assert (type_.block_size, type_.type_size) == expected, type_.name


def test_every_type_of_the_gguf_package_is_known_by_name():
    for theirs in gguf.GGMLQuantizationType:
        assert type_name(theirs) == theirs.name
    assert type_name(1234) == "unknown type 1234"


# Right files


def test_metadata_of_the_reference_writer_is_read_back(path):
    written = {
        "a.flag": True,
        "a.count": 7,
        "a.rate": 0.5,
        "a.name": "tamis",
        "a.words": ["Ġthe", "", "日本"],
        "a.sizes": [1, 2, 3],
    }
    with GGUFFile(write_gguf(path, written)) as f:
        assert f.version == 3
        assert f.architecture == "llama"
        assert f.n_parts == 1
        for key in ("a.flag", "a.count", "a.rate", "a.name"):
            assert f.metadata[key] == written[key]
            assert type(f.metadata[key]) is type(written[key])
        assert list(f.metadata["a.words"]) == written["a.words"]
        np.testing.assert_array_equal(f.metadata["a.sizes"], np.array([1, 2, 3], np.int32))


def test_metadata_is_read_only(path):
    with GGUFFile(write_gguf(path, {"a.sizes": [1, 2]})) as f:
        with pytest.raises(TypeError):
            f.metadata["a.sizes"] = 1
        with pytest.raises(ValueError, match="read-only"):
            f.metadata["a.sizes"][0] = 9


@pytest.mark.parametrize(
    ("type_id", "layout", "value"),
    [
        (0, "<B", 255),
        (1, "<b", -128),
        (2, "<H", 65535),
        (3, "<h", -32768),
        (4, "<I", 2**32 - 1),
        (5, "<i", -(2**31)),
        (6, "<f", -1.5),
        (10, "<Q", 2**64 - 1),
        (11, "<q", -(2**63)),
        (12, "<d", 0.1),
    ],
)
def test_numbers_of_every_type_alone_and_in_arrays(path, type_id, layout, value):
    number = struct.pack(layout, value)
    items = Value(9, struct.pack("<IQ", type_id, 2) + number * 2)
    raw = gguf_bytes([kv("one", Value(type_id, number)), kv("two", items)])
    with GGUFFile(write_bytes(path, raw)) as f:
        assert f.metadata["one"] == value
        assert f.metadata["two"].dtype == np.dtype(layout)
        assert f.metadata["two"].tolist() == [value, value]


def test_arrays_of_bools_are_bool_arrays(path):
    with GGUFFile(write_bytes(path, gguf_bytes([kv("b", array(boolean, [True, False]))]))) as f:
        assert f.metadata["b"].dtype == np.bool_
        assert f.metadata["b"].tolist() == [True, False]


def test_tensors_are_read_only_views_in_ggml_order(path):
    a = np.arange(64, dtype=np.float32).reshape(2, 32)
    b = np.arange(5, dtype=np.float16)
    written = {"a": a, "b": b, "q": a}
    types = {"q": gguf.GGMLQuantizationType.Q8_0}
    with GGUFFile(write_gguf(path, {}, written, types=types)) as f:
        assert list(f.tensors) == ["a", "b", "q"]
        assert f.tensors["a"].shape == (32, 2)
        assert f.tensors["a"].type is GGMLType.F32
        assert f.tensors["q"].type is GGMLType.Q8_0
        assert f.tensors["q"].n_bytes == 2 * 34
        assert f.data("a").dtype == np.uint8
        assert f.data("a").tobytes() == a.tobytes()
        assert f.data("b").tobytes() == b.tobytes()
        with pytest.raises(ValueError, match="read-only"):
            f.data("a")[0] = 1
        with pytest.raises(KeyError):
            f.data("c")


def test_views_outlive_the_file_and_new_ones_are_refused(path):
    a = np.arange(4, dtype=np.float32)
    with GGUFFile(write_gguf(path, {}, {"a": a})) as f:
        view = f.data("a")
    f.close()
    assert view.tobytes() == a.tobytes()
    with pytest.raises(ValueError, match="closed"):
        f.data("a")


def test_version_2_is_read(path):
    with GGUFFile(write_bytes(path, gguf_bytes([kv("n", u32(7))], version=2))) as f:
        assert f.version == 2
        assert f.metadata["n"] == 7


def test_alignment_of_the_file_is_used(path):
    raw = gguf_bytes(
        [kv("general.alignment", u32(8))],
        [tensor("a", [1]), tensor("b", [1], offset=8)],
        bytes(8) + b"\0\0\x80\x3f",
        alignment=8,
    )
    with GGUFFile(write_bytes(path, raw)) as f:
        assert f.data("b").view(np.float32)[0] == 1.0


def test_raw_bytes_in_a_vocabulary_survive(path):
    # Byte-level vocabularies of some converters hold half a UTF-8 character.
    tokens = [b"ok", b"\xe6\x97", "日".encode()]
    with GGUFFile(write_bytes(path, gguf_bytes([kv("t", array(text, tokens))]))) as f:
        read = f.get("t", Strings)
        assert read[2] == "日"
        assert [t.encode("utf-8", "surrogateescape") for t in read] == tokens


def test_invalid_utf8_of_a_single_string_can_be_printed(path):
    with GGUFFile(write_bytes(path, gguf_bytes([kv("general.name", text(b"caf\xe9"))]))) as f:
        assert f.metadata["general.name"] == "caf\ufffd"


# get


def test_get_converts_nothing_and_names_the_key(path):
    raw = gguf_bytes([kv("flag", boolean(True)), kv("n", u32(1)), kv("x", f32(1))])
    with GGUFFile(write_bytes(path, raw)) as f:
        assert f.get("n", int) == 1
        assert f.get("n", (float, int)) == 1
        assert f.get("none", int, None) is None
        for key, type_ in [("flag", int), ("n", bool), ("n", float), ("x", int), ("n", str)]:
            with pytest.raises(GGUFError, match=f"expected {type_.__name__}, got") as caught:
                f.get(key, type_, None)
            assert caught.value.key == key
        with pytest.raises(GGUFError, match="lacks a key") as caught:
            f.get("none", int)
        assert caught.value.key == "none"


# Split files


def write_split(folder: Path) -> list[Path]:
    tensors = {name: np.full(4, i, np.float32) for i, name in enumerate("abc")}
    write_gguf(folder / "m.gguf", {"a.n": 5}, tensors, split_max_tensors=1)
    return [folder / f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.mark.parametrize("index", [0, 1, 2])
def test_any_part_opens_all_parts(tmp_path, index):
    with GGUFFile(write_split(tmp_path)[index]) as f:
        assert f.n_parts == 3
        assert list(f.tensors) == ["a", "b", "c"]
        assert f.get("a.n", int) == 5
        assert [f.data(name).view(np.float32)[0] for name in "abc"] == [0, 1, 2]


def test_parts_that_are_links_are_found_by_the_links_names(tmp_path):
    # The cache of huggingface_hub: links with the names, in a folder of files named by hashes.
    (tmp_path / "snapshot").mkdir()
    for i, part in enumerate(write_split(tmp_path)):
        (tmp_path / "snapshot" / part.name).symlink_to(part.rename(tmp_path / f"blob{i}"))
    with GGUFFile(tmp_path / "snapshot" / "m-00002-of-00003.gguf") as f:
        assert f.n_parts == 3


@pytest.mark.parametrize("index", [0, 1])
def test_a_missing_part_is_named(tmp_path, index):
    parts = write_split(tmp_path)
    parts[index].unlink()
    with pytest.raises(GGUFError, match="missing") as caught:
        GGUFFile(parts[2])
    assert caught.value.path == str(parts[index])


def test_parts_in_each_others_place_are_refused(tmp_path):
    parts = write_split(tmp_path)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(GGUFError, match="says to be part 3 of 3, its name says 2 of 3"):
        GGUFFile(parts[0])


def test_a_renamed_part_is_refused_with_the_name_it_needs(tmp_path):
    renamed = write_split(tmp_path)[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(GGUFError, match=r"-00001-of-00003\.gguf"):
        GGUFFile(renamed)


def test_parts_that_hold_the_same_tensor_are_refused(tmp_path):
    for no in range(2):
        keys = [kv("split.no", u16(no)), kv("split.count", u16(2))]
        raw = gguf_bytes(keys, [tensor("a", [1])], bytes(4))
        part = write_bytes(tmp_path / f"m-{no + 1:05}-of-00002.gguf", raw)
    with pytest.raises(GGUFError, match="twice") as caught:
        GGUFFile(part)
    assert caught.value.key == "a"


def test_parts_of_another_number_of_tensors_are_refused(tmp_path):
    for no in range(2):
        keys = [kv("split.no", u16(no)), kv("split.count", u16(2))]
        keys.append(kv("split.tensors.count", i32(3)))
        raw = gguf_bytes(keys, [tensor(f"a{no}", [1])], bytes(4))
        part = write_bytes(tmp_path / f"m-{no + 1:05}-of-00002.gguf", raw)
    with pytest.raises(GGUFError, match="hold 2 tensors, not 3"):
        GGUFFile(part)


# Not a GGUF file


def test_a_missing_path_is_file_not_found(path):
    with pytest.raises(FileNotFoundError, match="no such GGUF file"):
        GGUFFile(path)


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(GGUFError, match="a directory"):
        GGUFFile(tmp_path)


def test_a_pipe_is_refused_without_waiting_for_a_writer(path):
    os.mkfifo(path)
    with pytest.raises(GGUFError, match="not a regular file"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "it has 0 bytes"),
        (b"GGU", "it has 3 bytes"),
        (b"GGUF", "version needs 4 bytes, 0 are left"),
        (b"PK\x03\x04....", "ZIP archive"),
        (b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (b"tjgg" + bytes(100), "before GGUF"),
        (gguf_bytes(version=1), "version 1, only 2 and 3"),
        (gguf_bytes(version=4), "version 4, only 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack(">IQQ", 2, 0, 0), "big-endian"),
    ],
)
def test_other_contents_are_refused_with_a_hint(path, raw, message):
    assert message in str(refusal(path, raw))


# Wrong metadata


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Value(13, bytes(8)), "unknown value type 13"),
        (Value(7, b"\x02"), "a bool must be 0 or 1, not 2"),
        (Value(8, struct.pack("<Q", 16 << 20 | 1)), "at most 16777216"),
        (Value(8, struct.pack("<Q", 100)), "needs 100 bytes, 0 are left"),
        (array(u32, [], n=64 << 20 | 1), "at most 67108864"),
        (array(u32, [1], n=2), "needs 8 bytes, 4 are left"),
        (array(text, ["a"], n=2), "needs 16 bytes, 9 are left"),
        (array(text, ["a" * 20], n=2), "runs past the end"),
        (array(boolean, [True, 2]), "a bool must be 0 or 1, not 2"),
        (Value(9, struct.pack("<IQ", 13, 0)), "unknown array item type 13"),
        (array(lambda _: array(u32, [1]), [0]), "arrays of arrays"),
    ],
)
def test_wrong_values_are_refused_naming_the_key(path, value, message):
    error = refusal(path, gguf_bytes([kv("the.key", value)]))
    assert message in str(error)
    assert error.key == "the.key"
    assert error.offset is not None


def test_a_long_string_in_an_array_is_refused(path):
    items = Value(9, struct.pack("<IQQ", 8, 1, 2**63))
    assert "at most 16777216" in str(refusal(path, gguf_bytes([kv("k", items)])))


def test_keys_must_be_utf8_short_and_unique(path):
    assert "not valid UTF-8" in str(refusal(path, gguf_bytes([kv(b"\xff", u32(1))])))
    assert "at most 65535" in str(refusal(path, gguf_bytes([kv("k" * 65536, u32(1))])))
    assert "twice" in str(refusal(path, gguf_bytes([kv("k", u32(1)), kv("k", u32(1))])))


@pytest.mark.parametrize(
    "value",
    [u32(0), u32(1), u32(4), u32(24), u32(2**21), u64(2**63), i32(-8), text("32"), boolean(True)],
)
def test_alignment_must_be_a_power_of_two_within_reason(path, value):
    raw = gguf_bytes([kv("general.alignment", value)], [tensor("a", [1])], bytes(4))
    assert refusal(path, raw).key == "general.alignment"


# Wrong tensors

ROW = bytes(4 * 32)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([tensor("t", [], n_dims=0)], "0 dimensions, expected 1 to 4"),
        ([tensor("t", [1, 1, 1, 1, 1])], "5 dimensions, expected 1 to 4"),
        ([tensor("t", [1], n_dims=2**32 - 1)], "dimensions, expected 1 to 4"),
        ([tensor("t", [0])], "must be 1 or more"),
        ([tensor("t", [4, 0])], "must be 1 or more"),
        ([tensor("t", [2**64 - 1])], "below 2^63"),
        ([tensor("t", [2**62, 4])], "below 2^63"),
        ([tensor("t", [31], type_id=GGMLType.Q4_0)], "needs a multiple of 32"),
        ([tensor("t", [32], type_id=GGMLType.Q4_K)], "needs a multiple of 256"),
        ([tensor("t", [256], type_id=38)], "type IQ4_NL_8_8 (removed from ggml) is not supported"),
        ([tensor("t", [256], type_id=4)], "type Q4_2 (removed from ggml) is not supported"),
        ([tensor("t", [256], type_id=999)], "unknown type 999"),
        ([tensor("t", [4], offset=4)], "offset 4 is not a multiple of 32"),
        ([tensor("t", [33])], "the tensor ends at byte"),
        ([tensor("t", [1], offset=2**64 - 32)], "the tensor ends at byte"),
        ([tensor("s", [9]), tensor("t", [9], offset=32)], "overlaps 's'"),
        ([tensor("t", [1], offset=32), tensor("s", [9])], "overlaps 's'"),
        ([tensor("t", [8]), tensor("t", [8], offset=32)], "twice"),
    ],
)
def test_wrong_tensors_are_refused_naming_the_tensor(path, records, message):
    error = refusal(path, gguf_bytes([], records, ROW))
    assert message in str(error)
    assert error.key == "t"


def test_tensor_names_must_be_utf8_and_short(path):
    assert "not valid UTF-8" in str(refusal(path, gguf_bytes([], [tensor(b"\xff", [1])], ROW)))
    assert "at most 64" in str(refusal(path, gguf_bytes([], [tensor("t" * 65, [1])], ROW)))


def test_a_tensor_may_end_with_the_file(path):
    with GGUFFile(write_bytes(path, gguf_bytes([], [tensor("t", [32])], ROW))) as f:
        assert f.data("t").size == len(ROW)


@pytest.mark.parametrize("count", [2, 2**20, 2**20 + 1, 2**63, 2**64 - 1])
def test_counts_beyond_the_file_are_refused_before_anything_is_read(path, count):
    raw = gguf_bytes([kv("k", u8(1))], n_keys=count)
    assert f"{count} metadata keys" in str(refusal(path, raw))
    raw = gguf_bytes([], [tensor("t", [1])], n_tensors=count)
    assert f"{count} tensors" in str(refusal(path, raw))


# A real vocabulary

MEASURE = """
import sys, time, numpy
from tamis.formats.gguf import GGUFFile
def anon_kb():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssAnon"))
def least(work):
    seconds = []
    for _ in range(8):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)
before = anon_kb()
opened = least(lambda: GGUFFile(sys.argv[1]))
mebibytes = (anon_kb() - before) / 1024
raw = bytes(range(65, 91)) * 100_000
print(opened / least(lambda: [raw[8 * i : 8 * i + 8].decode() for i in range(303_000)]), mebibytes)
"""


@pytest.mark.model
def test_a_vocabulary_of_150_000_tokens_opens_fast_and_small(model_path):
    """In a few times what Python takes to make as many strings: 0.05 s on a fast machine."""
    path = str(model_path("qwen2.5-coder-0.5b"))
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True
    )
    times, mebibytes = map(float, run.stdout.split())
    assert times < 6
    assert mebibytes < 120  # anonymous memory: what the mapping itself takes is not counted


@pytest.mark.parametrize(
    ("counts", "offset"),
    [
        ({"n_tensors": 2}, 8),  # of 32 bytes each at least: a name, dimensions, a type, an offset
        ({"n_tensors": (1 << 20) + 1}, 8),
        ({"n_keys": 5}, 16),  # of 13 each: an empty key and a byte
        ({"n_keys": (1 << 16) + 1}, 16),
    ],
)
def test_counts_that_the_file_has_no_bytes_for_are_named_by_their_place(path, counts, offset):
    raw = gguf_bytes(data=b"", **counts) + bytes(63)
    error = refusal(path, raw)
    assert error.offset == offset
    assert "bytes or more, 63 are left" in str(error) or "are accepted" in str(error)


def test_counts_that_there_may_be_bytes_for_are_read():
    assert (struct.calcsize("<QIQIQ"), struct.calcsize("<QIB")) == (
        gguf_reader._MIN_TENSOR_BYTES,
        gguf_reader._MIN_KEY_BYTES,
    )


def test_the_largest_alignment_is_read_and_the_next_is_not(path):
    """1 MiB; a file of two tensors has the second one there."""
    raw = gguf_bytes(
        [kv("general.alignment", u32(1 << 20))], [tensor("a", [1])], bytes(4), alignment=1 << 20
    )
    with GGUFFile(write_bytes(path, raw)) as file:
        assert file.data("a").tolist() == [0] * 4
    raw = gguf_bytes([kv("general.alignment", u32(1 << 21))], [tensor("a", [1])], bytes(4))
    assert refusal(path, raw).key == "general.alignment"


def test_a_file_that_is_refused_is_closed_at_once(path):
    """While its error is still there, with all that it refers to."""
    path.write_bytes(b"GGUF" + bytes(30))
    before = set(os.listdir("/dev/fd"))
    with pytest.raises(GGUFError) as refused:
        GGUFFile(path)
    assert set(os.listdir("/dev/fd")) == before
    assert refused.value.__traceback__ is not None
