"""`tamis show`: facts of a model for a user who considers it."""

import argparse
import json
import math
import sys
from typing import Any

from tamis.cli.commands.list import size
from tamis.cli.options import common
from tamis.cli.terminal import printable

CONTEXTS = (8192, 32768, 131072)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "model",
        nargs="?",
        help=f"path or short name of the model {common.DEFAULT}",
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the facts; for a model that cannot be run also the reason."""
    from tamis.formats.gguf import GGUFFile

    path = common.model_file(arguments.model, common.Progress())
    with GGUFFile(path) as file:
        facts = {"file": str(path), "bytes": path.stat().st_size, **_facts(file)}
    facts |= _memory(path, facts["context"])
    if arguments.json:
        sys.stdout.write(json.dumps(facts) + "\n")
        return 0
    facts["size"] = size(facts.pop("bytes"))
    facts["context"] = f"{facts['context']} tokens"
    facts["parameters"] = f"{facts['parameters'] / 1e6:,.0f} million"
    if "kv_mib" in facts:
        kv = ", ".join(f"{n} tokens {mib:.0f} MiB" for n, mib in facts.pop("kv_mib").items())
        facts["KV cache"] = f"{kv} (f16)"
    lines = [f"{key:<12} {value}" for key, value in facts.items() if value not in ("", None)]
    sys.stdout.write(printable("\n".join(lines)) + "\n")
    return 0


def _facts(file: Any) -> dict[str, Any]:
    meta = file.metadata
    arch = meta.get("general.architecture", "")
    types: dict[str, int] = {}
    for tensor in file.tensors.values():
        types[tensor.type.name] = types.get(tensor.type.name, 0) + tensor.n_bytes
    template = "tokenizer.chat_template" in meta
    return {
        "name": meta.get("general.name", ""),
        "architecture": arch,
        "parameters": sum(math.prod(t.shape) for t in file.tensors.values()),
        "weights": max(types, key=lambda name: types[name]) if types else "",
        "context": int(meta.get(f"{arch}.context_length", 0)),
        "chat": "has a chat template" if template else "no chat template: continues text",
        "licence": str(meta.get("general.license", "")),
    }


def _memory(path: Any, n_train: int) -> dict[str, Any]:
    """MiB of KV cache for some lengths, or the reason why the model cannot be run."""
    from tamis.cli.options.errors import one_line
    from tamis.engine.engine import Engine

    try:
        engine = Engine.load(path, n_threads=1)
    except (ValueError, RuntimeError) as error:
        return {"runs": f"no: {one_line(error)}"}
    try:
        lengths = [n for n in CONTEXTS if n < n_train] + [n_train]
        kv = {n: round(engine.memory_plan(n).kv / common.MIB, 1) for n in lengths}
        return {"kv_mib": kv}
    finally:
        engine.close()
