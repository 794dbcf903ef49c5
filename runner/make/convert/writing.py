"""A GGUF file of a folder's model: which type each tensor gets, and the file, tensor by tensor."""

import importlib
import pkgutil
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import tamis.make.convert
from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf_writer import NewTensor, parts_of, write
from tamis.make.checkpoint.family import Family, Named
from tamis.make.checkpoint.general import Shape, add_general
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import ConvertError, Lazy, Source
from tamis.make.copies import Each, check_new
from tamis.make.quantize import QUANTIZATION_VERSION, Encoder
from tamis.platform.private_files import write_whole

# --outtype: the type of matrices, and its number in `general.file_type`.
OUTTYPES = {
    "f32": (GGMLType.F32, 0), "f16": (GGMLType.F16, 1), "bf16": (GGMLType.BF16, 32),
    "q8_0": (GGMLType.Q8_0, 7),
}  # fmt: skip
MXFP4_FILE = 38  # the number of files whose experts are in MXFP4
CHUNK = 4 << 20  # elements that are encoded at a time
# Matrices that are kept in float32: small, or read in another way.
_KEPT = re.compile(
    r"blk\.\d+\.(ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d|shortconv\.conv)\.weight"
    r"|(position_embd|token_types)\.weight|.*_norm\.weight"
)


def families() -> dict[str, type[Family]]:
    """The families by the names of transformers' classes."""
    found: dict[str, type[Family]] = {}
    for module in pkgutil.iter_modules(tamis.make.convert.__path__):
        if module.name in ("writing", "lora"):
            continue
        here = importlib.import_module(f"tamis.make.convert.{module.name}")
        for value in vars(here).values():
            if isinstance(value, type) and issubclass(value, Family):
                found |= dict.fromkeys(value.names, value)
    return found


def family_of(source: Source, pre: str | None) -> Family:
    """The family of a folder's model. Raises ConvertError for one that is not known."""
    known = families()
    name = source.architecture
    if name not in known:
        raise ConvertError(
            f"{name} is no architecture that is converted: expected one of "
            f"{', '.join(sorted(known))}"
        )
    return known[name](source, pre)


class Plan(NamedTuple):
    """A file to be written: its metadata, and its tensors with what they are made from."""

    arch: str
    keys: dict[str, bytes]
    tensors: Sequence[NewTensor]
    sources: Sequence[Lazy]

    @property
    def n_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.n_bytes for tensor in self.tensors)


def planned(folder: Path, outtype: str, *, pre: str | None = None) -> Plan:
    """What a folder's model becomes. outtype: of OUTTYPES, or "auto" for that of its weights.

    pre: the vocabulary's pre-tokenizer, if it is not to be found out. Raises ConvertError,
    SafetensorsError, OSError.
    """
    source = Source(folder)
    family = family_of(source, pre)
    named = list(family.tensors())
    _check_names(named)
    type, number = OUTTYPES[_detected(source) if outtype == "auto" else outtype]
    types = [type_of(name, lazy, type) for name, lazy in named]
    if GGMLType.MXFP4 in types and type != GGMLType.Q8_0:
        number = MXFP4_FILE
    keys = Keys(family.arch)
    family.first_keys(keys)
    add_general(source, keys, [Shape(name, lazy.shape) for name, lazy in named])
    family.keys(keys, number)
    keys.set("general.quantization_version", "u32", QUANTIZATION_VERSION)
    family.vocab(keys)
    tensors = [
        NewTensor(name, tuple(reversed(lazy.shape)), each)
        for (name, lazy), each in zip(named, types, strict=True)
    ]
    return Plan(family.arch, keys.records, tensors, [lazy for _, lazy in named])


def convert(
    plan: Plan, path: Path, *, n_threads: int, each: Each = lambda done, total: None
) -> None:
    """Write a planned file. each(bytes, all bytes) is called after each part.

    Memory: the largest tensor in float32, twice. Raises FileExistsError, OSError, CompileError,
    SafetensorsError.
    """
    check_new(path)
    encoder = Encoder(n_threads)
    encoder.compile({(tensor.type.name, False) for tensor in plan.tensors})
    done = 0

    def data(tensor: NewTensor, lazy: Lazy) -> Iterator[memoryview]:
        nonlocal done
        for part in _parts(tensor, lazy, encoder):
            yield part
            done += len(part)
            each(done, plan.n_bytes)

    with write_whole(path, shared=True) as out:
        write(out, plan.keys, plan.tensors, map(data, plan.tensors, plan.sources))


def _check_names(named: Sequence[Named]) -> None:
    seen: set[str] = set()
    for name, _ in named:
        if name in seen:
            raise ConvertError(f"two tensors of the folder become {name}")
        seen.add(name)
    if "token_embd.weight" not in seen:
        raise ConvertError("the folder has no embeddings of tokens: is it an adapter?")


def _detected(source: Source) -> str:
    """The type of the first matrix that is of 16 bits."""
    for stored in source.stored.values():
        if len(stored.shape) >= 2 and stored.type in ("BF16", "F16"):
            return stored.type.lower()
    return "f16"


def type_of(name: str, lazy: Lazy, type: GGMLType) -> GGMLType:
    """The type that a tensor gets where matrices get `type`."""
    if lazy.type == GGMLType.MXFP4.name:
        return GGMLType.MXFP4
    if (
        len(lazy.shape) <= 1
        or not name.endswith((".weight", ".lora_a", ".lora_b"))
        or _KEPT.fullmatch(name)
    ):
        return GGMLType.F32
    return GGMLType.F16 if lazy.shape[-1] % type.block_size else type


def _parts(tensor: NewTensor, lazy: Lazy, encoder: Encoder) -> Iterator[memoryview]:
    values = lazy.load()
    if tensor.type == GGMLType.MXFP4:
        yield from parts_of(values)
        return
    if values.shape != lazy.shape:
        raise ConvertError(f"{tensor.name} has the shape {values.shape}, expected {lazy.shape}")
    rows = values.reshape(-1, values.shape[-1] if values.ndim else 1)
    step = max(1, CHUNK // rows.shape[1])
    for first in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[first : first + step], np.float32)
        yield encoder.encoded(part, tensor.type, None).data
