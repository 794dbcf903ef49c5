"""LoRA adapters of PEFT as GGUF files: pairs of matrices by the names of what they are added to."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tamis.formats.gguf_writer import NewTensor
from tamis.formats.safetensors import read
from tamis.make.checkpoint.family import Family
from tamis.make.checkpoint.general import Shape, add_names
from tamis.make.checkpoint.keys import Keys
from tamis.make.checkpoint.source import ConvertError, Lazy, Source
from tamis.make.convert.writing import OUTTYPES, Plan, family_of, type_of
from tamis.make.quantize import QUANTIZATION_VERSION

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HALF = re.compile(r"\.lora_(?:embedding_)?([AB])(?:\.weight)?$")


class Pair(NamedTuple):
    """The halves of a term b @ a that is added to a matrix: [rank, n_in] and [n_out, rank]."""

    a: Lazy
    b: Lazy


def planned(folder: Path, base: Path, outtype: str) -> Plan:
    """What an adapter becomes. base: a folder with the config of the model that it is for.

    outtype: of OUTTYPES. Raises ConvertError, SafetensorsError, OSError.
    """
    source = Source(base, weights=False)
    family = family_of(source, None)
    config = Source.read_json(folder / CONFIG)
    if config.get("peft_type", "LORA") != "LORA" or "lora_alpha" not in config:
        raise ConvertError(f"{folder / CONFIG} is of no LoRA adapter: it needs `lora_alpha`")
    if not (folder / WEIGHTS).is_file():
        raise ConvertError(f"{folder} has no {WEIGHTS}: save the adapter as safetensors")
    stored = {n: Lazy(t.shape, t.type, t.values) for n, t in read([folder / WEIGHTS]).items()}
    named = list(_named(family, stored))
    if not named:
        raise ConvertError(f"{folder / WEIGHTS} has no lora_A and lora_B: is it an adapter?")
    keys = Keys(family.arch)
    keys.set("general.type", "str", "adapter")
    keys.set("adapter.type", "str", "lora")
    add_names(folder, None, keys, [Shape(name, lazy.shape) for name, lazy in named])
    keys.set("adapter.lora.alpha", "f32", float(config["lora_alpha"]))
    keys.set("general.quantization_version", "u32", QUANTIZATION_VERSION)
    type = OUTTYPES[outtype][0]
    tensors = [
        NewTensor(name, tuple(reversed(lazy.shape)), type_of(name, lazy, type))
        for name, lazy in named
    ]
    return Plan(family.arch, keys.records, tensors, [lazy for _, lazy in named])


def _named(family: Family, stored: Mapping[str, Lazy]) -> Iterator[tuple[str, Lazy]]:
    pairs: dict[str, dict[str, Lazy]] = {}
    for full, lazy in stored.items():
        match = _HALF.search(full)
        stem = full.replace("base_model.model.", "")
        name = family.name(f"{_HALF.sub('', stem)}.weight" if match else stem)
        if name is None or ".base_layer." in full:
            continue
        if match:
            pairs.setdefault(name, {})[match[1]] = lazy
        elif "_layernorm" in full or ".norm" in full:
            for changed, each in family.change(name, lazy):
                yield family.last_name(changed), each
        else:
            raise ConvertError(
                f"{full} is neither lora_A nor lora_B: if the adapter has whole embeddings, for "
                "new tokens, merge it into its model and convert that"
            )
    for name, halves in pairs.items():
        if halves.keys() != {"A", "B"}:
            raise ConvertError(f"{name} has only lora_{sorted(halves)[0]}: fetch the file anew")
        yield from _changed(family, name, Pair(halves["A"], halves["B"]))


def _changed(family: Family, name: str, pair: Pair) -> Iterator[tuple[str, Lazy]]:
    """A pair in the rows and columns that its matrix has in GGUF."""
    a, b = pair
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
        raise ConvertError(f"{name} has lora_A {a.shape} and lora_B {b.shape}: they do not fit")
    shape = (b.shape[0], a.shape[1])
    # What the family does with the matrix, seen on the numbers of its rows and columns.
    numbers = (np.arange(shape[0], dtype=np.int32)[:, None], np.arange(shape[1], dtype=np.int32))
    rows, columns = (
        list(family.change(name, Lazy(shape, "F32", partial(np.broadcast_to, x, shape))))
        for x in numbers
    )
    for (changed, row), (_, column) in zip(rows, columns, strict=True):
        row_at, column_at = row.load()[:, 0], column.load()[0]
        last = family.last_name(changed)
        first = a.changed(partial(np.take, indices=column_at, axis=1), (a.shape[0], column_at.size))
        if last == "token_embd.weight":
            first = first.transposed()
        yield f"{last}.lora_a", first
        shape_b = (row_at.size, b.shape[1])
        yield f"{last}.lora_b", b.changed(partial(np.take, indices=row_at, axis=0), shape_b)
