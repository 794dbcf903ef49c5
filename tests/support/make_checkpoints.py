"""Makes `tests/data/checkpoints.json.xz` with llama.cpp's converter, torch and transformers.

    python tests/support/make_checkpoints.py LLAMA_CPP FOLDER...

LLAMA_CPP: its source. FOLDER: models that transformers has saved, whose tensors' names, types and
shapes are taken, with their other files; a name may end in `=PRE`, the pre-tokenizer of a
vocabulary too small to be recognised, and then in `=TYPE`, the --outtype.
"""

import base64
import hashlib
import json
import logging
import lzma
import sys
import tempfile
from pathlib import Path

import checkpoints

from tamis.formats.safetensors import read

KEPT = ("config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model")
ALSO = ("generation_config.json", "model.safetensors.index.json", "modules.json")
POOLING = "1_Pooling/config.json"


def case_of(folder: Path, pre: str, outtype: str) -> dict:
    """The case of a folder, without its digest."""
    files = {}
    for name in (*KEPT, *ALSO, POOLING):
        path = folder / name
        if path.is_file():
            data = path.read_bytes()
            binary = path.suffix == ".model"
            files[name] = "=" + base64.b64encode(data).decode() if binary else data.decode()
    tensors = {
        path.name: [[n, t.type, list(t.shape)] for n, t in read([path]).items()]
        for path in sorted(folder.glob("model*.safetensors"))
    }
    return {"files": files, "tensors": tensors, "pre": pre, "outtype": outtype}


def digest(llama_cpp: Path, case: dict, name: str) -> str:
    """The SHA-256 of what the converter makes of a case."""
    import convert_hf_to_gguf
    from conversion.base import ModelBase, TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: case["pre"]
    ModelBase.no_mtp = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoints.make(Path(scratch) / name, case)
        out = Path(scratch) / "out.gguf"
        sys.argv = ["convert", str(folder), "--outfile", str(out), "--outtype", case["outtype"]]
        convert_hf_to_gguf.main()
        return hashlib.sha256(out.read_bytes()).hexdigest()


def main() -> None:
    """Write the cases."""
    llama_cpp = Path(sys.argv[1])
    sys.path[:0] = [str(llama_cpp), str(llama_cpp / "gguf-py")]
    logging.disable(logging.CRITICAL)
    found = {}
    for text in sys.argv[2:]:
        path, pre, outtype = (*text.split("="), "", "")[:3]
        name = "-".join(part for part in (Path(path).name, outtype) if part)
        case = case_of(Path(path), pre or "qwen2", outtype or "auto")
        found[name] = {**case, "sha256": digest(llama_cpp, case, name)}
        print(name, found[name]["sha256"][:12])
    checkpoints.CASES.write_bytes(lzma.compress(json.dumps(found).encode()))


if __name__ == "__main__":
    main()
