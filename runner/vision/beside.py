"""The mmproj file of a model, found beside it by its name."""

import re
from pathlib import Path

# The quantization at the end of a file's name, which both files may have or not.
_TYPE = re.compile(r"[-._](i?q\d\w*|f16|f32|bf16|fp16|mxfp4\w*)$", re.IGNORECASE)


def find_mmproj(model: Path) -> Path | None:
    """The file beside a model whose name has "mmproj" and the model's; else the only one there.

    None: there is none, or several of which none has the model's name.
    """
    found = sorted(
        path
        for path in model.parent.glob("*.gguf")
        if "mmproj" in path.name.lower() and path.name != model.name
    )
    own = _plain(model.stem)
    named = [path for path in found if _plain(path.stem) == own]
    if named:
        return named[0]
    others = [p for p in model.parent.glob("*.gguf") if "mmproj" not in p.name.lower()]
    return found[0] if len(found) == 1 and len(others) == 1 else None


def _plain(stem: str) -> str:
    """A name without "mmproj" and the type of the weights."""
    name = stem
    for _ in range(2):
        name = _TYPE.sub("", name)
        name = re.sub(r"(^mmproj[-._]?|[-._]?mmproj([-._]?model)?$)", "", name, flags=re.IGNORECASE)
    return name.lower()
