"""Hostile and damaged files: refused with GGUFError or opened, in bounded time and memory.

Any other exception fails. A file that opens is read to the end: all tensors, the vocabulary.
"""

import contextlib
import struct
import time
import tracemalloc
from pathlib import Path

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
    u32,
    u64,
    write_bytes,
    write_gguf,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf import GGUFError, GGUFFile
from tamis.formats.vocab import Vocab

MAX_MEMORY = 200 << 20  # bytes
MAX_SECONDS = 5  # a file of 2 KB takes a millisecond; the rest is for a busy machine


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """One path for all the files of this module, written again for each."""
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


def open_and_read(path: Path, raw: bytes) -> bool:
    """Whether the file of these bytes opens; everything in it that can be read is."""
    try:
        f = GGUFFile(write_bytes(path, raw))
    except GGUFError:
        return False
    with f, contextlib.suppress(GGUFError):
        for name, info in f.tensors.items():
            assert f.data(name).size == info.n_bytes
            if info.type in (GGMLType.F32, GGMLType.F16, GGMLType.Q4_0, GGMLType.Q4_K):
                dequantize(f.data(name), info.type, info.shape)
        Vocab.from_gguf(f)
    return True


def bounded(path: Path, raw: bytes) -> bool:
    """``open_and_read`` within the limits of time and memory."""
    tracemalloc.start()
    start = time.perf_counter()
    try:
        opened = open_and_read(path, raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_MEMORY
    assert time.perf_counter() - start < MAX_SECONDS
    return opened


def small_model() -> bytes:
    """A whole small model: every kind of value, a vocabulary, four tensors, no padding behind."""
    keys = [
        kv("general.architecture", text("llama")),
        kv("general.alignment", u32(32)),
        kv("llama.rope.freq_base", f32(1e4)),
        kv("llama.layers", array(u32, [1, 2, 3])),
        kv("llama.swa", array(boolean, [True, False])),
        kv("big", u64(2**40)),
        kv("tokenizer.ggml.model", text("llama")),
        kv("tokenizer.ggml.tokens", array(text, ["<unk>", "<s>", "</s>", "<0x0A>", "日本"])),
        kv("tokenizer.ggml.scores", array(f32, [0.0, 0.0, 0.0, -1.0, -2.0])),
        kv("tokenizer.ggml.token_type", array(i32, [2, 3, 3, 6, 1])),
        kv("tokenizer.ggml.eos_token_id", u32(2)),
    ]
    tensors = [
        tensor("a", [32, 2], type_id=GGMLType.Q4_0, offset=0),  # 36 bytes
        tensor("b", [4, 2], type_id=GGMLType.F32, offset=64),  # 32 bytes
        tensor("c", [3], type_id=GGMLType.F16, offset=96),  # 6 bytes
        tensor("d", [256], type_id=GGMLType.Q4_K, offset=128),  # 144 bytes
    ]
    return gguf_bytes(keys, tensors, bytes(range(128)) + bytes(144))


MODEL = small_model()


def test_the_model_of_these_tests_is_right(path):
    assert bounded(path, MODEL)
    with GGUFFile(write_bytes(path, MODEL)) as f:
        assert Vocab.from_gguf(f).eog == {2}


def test_every_truncation_is_refused(path):
    for size in range(len(MODEL)):
        assert not open_and_read(path, MODEL[:size]), size


def test_flips_of_two_bits_of_every_byte_of_the_head(path):
    # The top bit makes numbers giant and text invalid, the other one changes from byte to byte.
    # The 272 bytes of tensor data behind the head may have any value.
    opened = 0
    for at in range(len(MODEL) - 272):
        for bit in (7, at % 7):
            raw = bytearray(MODEL)
            raw[at] ^= 1 << bit
            opened += open_and_read(path, bytes(raw))
    # A flip inside a text or a number is not an error: the reader is not just refusing.
    assert opened > 400


positions = st.integers(0, len(MODEL) - 1)
awkward = st.sampled_from(
    [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
)
words = st.one_of(
    st.integers(0, 40).map(lambda x: struct.pack("<I", x)),  # counts, value and tensor types
    awkward.map(lambda x: struct.pack("<Q", x)),
    st.binary(min_size=1, max_size=16),
)
edits = st.lists(st.tuples(st.sampled_from(["over", "in", "out"]), positions, words), max_size=4)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(edits=edits, n_kept=st.integers(0, len(MODEL) + 64))
def test_overwritten_inserted_and_removed_bytes(path, edits, n_kept):
    raw = MODEL
    for kind, at, word in edits:
        behind = at if kind == "in" else at + len(word)
        raw = raw[:at] + (b"" if kind == "out" else word) + raw[behind:]
    bounded(path, raw[:n_kept] if edits else raw)


dims = st.one_of(st.integers(0, 300), awkward)
tensor_records = st.builds(
    lambda name, shape, type_id, offset: tensor(name, shape, type_id=type_id, offset=offset),
    st.sampled_from(["a", "b", "c"]),
    st.lists(dims, max_size=5),
    st.integers(0, 45),
    st.one_of(st.integers(0, 16).map(lambda i: 32 * i), awkward),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    records=st.lists(tensor_records, max_size=3),
    alignment=awkward | st.sampled_from([8, 16, 32, 64, 1 << 20]),
    n_tensors=st.none() | awkward,
    n_data=st.integers(0, 600),
)
def test_tensor_records_of_any_content(path, records, alignment, n_tensors, n_data):
    keys = [kv("general.alignment", u64(alignment))]
    bounded(path, gguf_bytes(keys, records, bytes(n_data), n_tensors=n_tensors))


payloads = st.one_of(
    st.binary(max_size=40),
    st.builds(lambda t, n, rest: struct.pack("<IQ", t, n) + rest, st.integers(0, 13),
              st.integers(0, 12) | awkward, st.binary(max_size=100)),
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(
        ["model", "tokens", "scores", "token_type", "merges", "eos_token_id", "add_bos_token"]
    ),
    type_id=st.integers(0, 13),
    payload=payloads,
)
def test_values_of_any_type_and_content(path, name, type_id, payload):
    keys = [
        kv("tokenizer.ggml.model", text("gpt2")),
        kv("tokenizer.ggml.tokens", array(text, ["a", "b"])),
        kv("tokenizer.ggml.merges", array(text, ["a b"])),
    ]
    keys = [key for key in keys if f"ggml.{name}".encode() not in key]
    keys.append(kv(f"tokenizer.ggml.{name}", Value(type_id, payload)))
    bounded(path, gguf_bytes(keys))


# Faults that other readers had, each by its name.


def test_cve_2026_7482_a_tensor_beyond_the_end_of_the_file(path):
    for shape, offset in [([9], 0), ([1], 32), ([8], 2**40), ([2**40], 0), ([8], 2**64 - 32)]:
        assert not bounded(path, gguf_bytes([], [tensor("t", shape, offset=offset)], bytes(32)))


def test_cve_2024_39720_a_tiny_file_that_claims_giant_arrays(path):
    for type_id in (0, 4, 7, 8, 10):
        for n in (2**20, 2**26, 2**32, 2**60, 2**64 - 1):
            claim = Value(9, struct.pack("<IQ", type_id, n))
            assert not bounded(path, gguf_bytes([kv("k", claim)]))


def test_cve_2024_39720_a_tiny_file_that_claims_giant_strings_and_counts(path):
    for n in (2**24, 2**31, 2**63, 2**64 - 1):
        assert not bounded(path, gguf_bytes([kv("k", Value(8, struct.pack("<Q", n)))]))
        assert not bounded(path, gguf_bytes(n_keys=n))
        assert not bounded(path, gguf_bytes(n_tensors=n))
        assert not bounded(path, gguf_bytes([struct.pack("<Q", n) + bytes(100)]))


def test_cve_2025_49847_counts_that_do_not_match(path):
    right = [kv("tokenizer.ggml.model", text("llama"))]
    right.append(kv("tokenizer.ggml.tokens", array(text, ["a", "b"])))
    for key, value in [
        ("token_type", array(i32, [1])),
        ("token_type", array(i32, [1] * 3)),
        ("scores", array(f32, [0.0])),
    ]:
        raw = gguf_bytes([*right, kv(f"tokenizer.ggml.{key}", value)])
        with GGUFFile(write_bytes(path, raw)) as f, pytest.raises(GGUFError):
            Vocab.from_gguf(f)


def test_cve_2025_49847_a_special_token_beyond_the_vocabulary_is_none(path):
    right = [kv("tokenizer.ggml.model", text("llama"))]
    right.append(kv("tokenizer.ggml.tokens", array(text, ["a", "b"])))
    for token in (2, 2**31, 2**32 - 2):
        raw = gguf_bytes([*right, kv("tokenizer.ggml.bos_token_id", u32(token))])
        with (
            GGUFFile(write_bytes(path, raw)) as f,
            pytest.warns(UserWarning, match=f"{token}, outside the vocabulary of 2"),
        ):
            vocab = Vocab.from_gguf(f)
        assert vocab.bos in (None, 1), "none, or the usual one of this model"


def test_sizes_that_wrap_around_in_64_bits(path):
    # 2^32 * 2^32 is 0 in 64 bits; 2^62 elements of 8 bytes are 0 bytes; the last sum wraps to 32.
    for shape, type_id, offset in [
        ([2**32, 2**32], 0, 0),
        ([2**16, 2**16, 2**16, 2**16], 0, 0),
        ([2**61], GGMLType.F64, 0),
        ([2**62], GGMLType.F32, 0),
        ([2**63], GGMLType.I8, 0),
        ([2**63 - 32], GGMLType.I8, 2**63),
    ]:
        record = tensor("t", shape, type_id=type_id, offset=offset)
        assert not bounded(path, gguf_bytes([], [record], bytes(64)))


def test_tensors_that_overlap(path):
    data = bytes(96)
    right = [tensor("a", [16]), tensor("b", [8], offset=64)]
    assert bounded(path, gguf_bytes([], right, data))
    for wrong in (32, 0):
        assert not bounded(path, gguf_bytes([], [right[0], tensor("b", [8], offset=wrong)], data))


def test_array_item_types_that_are_not_what_a_reader_expects(path):
    for item, items in [(u32, [1, 2]), (f32, [1.0, 2.0]), (boolean, [True, False])]:
        keys = [kv("tokenizer.ggml.model", text("llama"))]
        keys.append(kv("tokenizer.ggml.tokens", array(item, items)))
        with GGUFFile(write_bytes(path, gguf_bytes(keys))) as f, pytest.raises(GGUFError):
            Vocab.from_gguf(f)


def test_a_file_of_the_reference_writer_with_any_split_keys(path):
    for no, count in [(0, 2), (5, 65535), (1, 1), (0, 0)]:
        keys = {"split.no": no, "split.count": count}
        raw = write_gguf(path, keys, {"a": np.zeros(4, np.float32)}).read_bytes()
        assert bounded(path, raw) == (count < 2)
