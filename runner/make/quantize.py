"""A copy of a model with its weights in other types, tensor by tensor.

Memory: the rows that are encoded at a time, some 100 MB whatever the model's size; the file that is
read is mapped, and its pages are released after each part.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf import GGUFFile, TensorInfo
from tamis.formats.gguf_writer import NewTensor, number, record, records, write
from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.ops.encode import ENCODE_SCRATCH, ENCODED
from tamis.jit_kernels.contract.program import KernelSpec, Program
from tamis.make.copies import SPLIT_KEYS, Each, check_new
from tamis.make.importance import NONE, Importance
from tamis.make.mixes import MIXES
from tamis.platform.private_files import write_whole

CHUNK = 4 << 20  # elements that are encoded at a time
PLAIN = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)  # what quantizing from loses nothing more
QUANTIZATION_VERSION = 2


def quantize(
    file: GGUFFile,
    path: Path,
    name: str,
    types: Mapping[str, GGMLType],
    *,
    n_threads: int,
    importance: Importance = NONE,
    each: Each = lambda done, total: None,
) -> None:
    """Write a model with these types, as `mixes.types` gives them; name: of the mixture.

    importance: errors of a tensor's columns count by it; its origin is noted in the metadata.
    each(bytes, all bytes) is called after each part. Raises FileExistsError, OSError, CompileError,
    ValueError for values that are not finite, and if a tensor's shape has no such importance.
    """
    check_new(path)
    weights = importance.values
    _check(file, weights)
    tensors = [NewTensor(t.name, t.shape, types[t.name]) for t in file.tensors.values()]
    total, done = sum(t.n_bytes for t in tensors), 0
    encoder = Encoder(n_threads)
    encoder.compile({(t.type.name, t.name in weights) for t in tensors})

    def data(tensor: NewTensor) -> Iterator[memoryview]:
        nonlocal done
        info = file.tensors[tensor.name]
        for part in encoder.parts(file, info, tensor.type, weights.get(tensor.name)):
            yield part.data
            done += part.nbytes
            each(done, total)
            file.release_pages()  # what is read again is read from the system's cache

    with write_whole(path, shared=True) as out:
        write(out, _keys(file, name, importance), tensors, map(data, tensors))
        file.check_unchanged()


def lossy_sources(file: GGUFFile, types: Mapping[str, GGMLType]) -> list[TensorInfo]:
    """The quantized tensors of a file that would get another type: their errors would add up."""
    return [
        info
        for info in file.tensors.values()
        if info.type not in PLAIN and info.type.block_size > 1 and types[info.name] != info.type
    ]


def n_bytes(file: GGUFFile, types: Mapping[str, GGMLType]) -> int:
    """The bytes of all tensors with these types."""
    return sum(NewTensor(t.name, t.shape, types[t.name]).n_bytes for t in file.tensors.values())


def _check(file: GGUFFile, weights: Mapping[str, np.ndarray]) -> None:
    for name, values in weights.items():
        info = file.tensors.get(name)
        if info is not None and values.shape != (_matrices(info), info.shape[0]):
            raise ValueError(
                f"{name} has {_matrices(info)} matrices of {info.shape[0]} columns, its importance "
                f"{values.shape[0]} of {values.shape[1]}: it is of another model"
            )


def _keys(file: GGUFFile, name: str, importance: Importance) -> dict[str, bytes]:
    keys = {key: value for key, value in records(file).items() if key not in SPLIT_KEYS}
    keys["general.quantization_version"] = number("u32", QUANTIZATION_VERSION)
    keys["general.file_type"] = number("u32", MIXES[name].number)
    if importance.values:
        keys["quantize.imatrix.file"] = record("str", importance.origin)
        keys["quantize.imatrix.entries_count"] = number("u32", len(importance.values))
    return keys


def _matrices(info: TensorInfo) -> int:
    return int(np.prod(info.shape[2:], dtype=np.int64))


class Encoder:
    """Rows of tensors in other types, some at a time."""

    def __init__(self, n_threads: int) -> None:
        self._backend = CpuBackend(n_threads)
        self._scratch = np.zeros(n_threads * ENCODE_SCRATCH, np.uint8)

    def compile(self, wanted: set[tuple[str, bool]]) -> None:
        """Compile the kernels of types, with and without importance. Raises CompileError."""
        specs = [KernelSpec(ops.ENCODE, (type, int(w))) for type, w in wanted if type in ENCODED]
        self._backend.library.load(sorted(specs))

    def parts(
        self, file: GGUFFile, info: TensorInfo, type: GGMLType, importance: np.ndarray | None
    ) -> Iterator[np.ndarray]:
        """Yield the bytes of a tensor in another type: uint8 [n], rows of one matrix at a time."""
        data, n = file.data(info.name), info.shape[0]
        row = info.type.n_bytes(n)
        per_matrix = info.shape[1] if len(info.shape) > 1 else 1
        step, n_row = max(1, CHUNK // n), len(data) // row
        for start in range(0, n_row, per_matrix):
            weights = None if importance is None else importance[start // per_matrix]
            for first in range(start, start + per_matrix, step):
                last = min(first + step, start + per_matrix)
                rows = data[row * first : row * last]
                if info.type == type:
                    yield rows
                    continue
                values = dequantize(rows, info.type, (n, last - first))
                if not np.isfinite(values).all():
                    raise ValueError(
                        f"{info.name} has values that are not finite: take a sound file"
                    )
                yield self.encoded(values, type, weights)

    def encoded(
        self, values: np.ndarray, type: GGMLType, importance: np.ndarray | None
    ) -> np.ndarray:
        """Rows of float32 in another type: uint8 [n]."""
        if type.name not in ENCODED:
            return _plain(values, type).reshape(-1).view(np.uint8)
        rows = np.empty((len(values), type.n_bytes(values.shape[1])), np.uint8)
        program = Program()
        program.add(
            ops.ENCODE,
            (type.name, int(importance is not None)),
            x=values,
            importance=importance,
            rows=rows,
            scratch=self._scratch,
        )
        self._backend.run(self._backend.link(program))
        return rows.reshape(-1)


def _plain(values: np.ndarray, type: GGMLType) -> np.ndarray:
    """Values as F32, F16 or BF16, rounded to nearest even."""
    if type == GGMLType.F32:
        return values
    if type == GGMLType.F16:
        with np.errstate(over="ignore"):  # to infinity, as everywhere
            return values.astype(np.float16)
    assert type == GGMLType.BF16, type
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 64, rounded).astype(np.uint16)
