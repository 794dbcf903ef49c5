"""Small folders as Hugging Face's models have them, made from a list of tensors by seeds.

`tests/data/checkpoints.json.xz` holds cases: the files of each folder, its tensors' names, types
and shapes, and the SHA-256 of what llama.cpp's converter makes of it (`make_checkpoints.py`).
"""

import base64
import json
import lzma
import struct
from math import prod
from pathlib import Path

import numpy as np

CASES = Path(__file__).parents[1] / "data" / "checkpoints.json.xz"
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1}
NAN_E4M3 = 0x7F


def cases() -> dict[str, dict]:
    """The cases by name."""
    return json.loads(lzma.decompress(CASES.read_bytes()))


def make(folder: Path, case: dict) -> Path:
    """Write the folder of a case."""
    folder.mkdir(parents=True)
    for name, text in case["files"].items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        data = base64.b64decode(text[1:]) if text.startswith("=") else text.encode()
        path.write_bytes(data)
    for name, tensors in case["tensors"].items():
        write_safetensors(folder / name, tensors)
    return folder


def write_safetensors(path: Path, tensors: list[tuple[str, str, list[int]]]) -> None:
    """Write a file of tensors (name, type, shape); values follow from names."""
    header, parts, at = {}, [], 0
    for name, type, shape in tensors:
        data = values(name, type, shape)
        header[name] = {"dtype": type, "shape": shape, "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def values(name: str, type: str, shape: list[int]) -> bytes:
    """The bytes of a tensor: numbers of a usual size, finite."""
    rng = np.random.default_rng(list(name.encode()))
    n = prod(shape)
    if type in ("U8", "F8_E4M3"):
        # Exponents of MXFP4 stay near one, so that sums of products do not overflow.
        low, high = (118, 126) if name.endswith("_scales") else (0, 256)
        found = rng.integers(low, high, n, dtype=np.uint8)
        if type == "F8_E4M3":
            found[found & NAN_E4M3 == NAN_E4M3] = 0
        return found.tobytes()
    x = (rng.integers(-4096, 4096, n) / 8192).astype(np.float32)
    if type == "F16":
        return x.astype(np.float16).tobytes()
    return (x.view(np.uint32) >> 16).astype(np.uint16).tobytes() if type == "BF16" else x.tobytes()
