"""`tamis inspect`: the content of a GGUF file and the memory that its model takes."""

import argparse
import json
import sys
from typing import Any

from tamis.cli.options import common
from tamis.cli.options.errors import one_line
from tamis.cli.terminal import printable

SHOWN = 8  # items shown of a long array


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument("-m", "--model", help=f"path or short name of the model {common.DEFAULT}")
    parser.add_argument(
        "-c",
        "--ctx",
        type=common.count,
        help="context of the memory plan in tokens (default: the trained context length)",
    )
    parser.add_argument(
        "--kv-ram",
        type=common.size,
        metavar="SIZE",
        help="memory for the KV cache in the memory plan, such as 512MiB (default: no limit)",
    )
    parser.add_argument(
        "-t",
        "--threads",
        type=common.count,
        help="CPU threads of the memory plan (default: all cores)",
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; a model that cannot be run is reported too, without a memory plan."""
    from tamis.formats.gguf import GGUFFile

    path = common.model_file(arguments.model, common.Progress())
    with GGUFFile(path) as file:
        metadata, tensors = dict(file.metadata), list(file.tensors.values())
        memory = _memory(path, arguments)
        if arguments.json:
            report = {
                "path": str(path),
                "metadata": {key: _plain(value) for key, value in metadata.items()},
                "tensors": [
                    {"name": t.name, "shape": t.shape, "type": t.type.name, "bytes": t.n_bytes}
                    for t in tensors
                ],
                "memory": memory,
            }
            sys.stdout.write(json.dumps(report) + "\n")
            return 0
        lines = [f"{path}", ""]
        lines += [f"{printable(key):<48} {_short(value)}" for key, value in metadata.items()]
        lines += ["", *_table(tensors, arguments.tensors), "", *_memory_lines(memory)]
    sys.stdout.write(printable("\n".join(lines)) + "\n")
    return 0


def _memory(path: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """The plan in bytes, or {"error": the reason why the model cannot be run}."""
    from tamis.engine.engine import Engine

    try:
        engine = Engine.load(path, n_threads=arguments.threads)
    except (ValueError, RuntimeError) as error:
        return {"error": one_line(error)}
    try:
        n_ctx = engine.context(arguments.ctx)
        plan = engine.memory_plan(n_ctx, kv_ram=arguments.kv_ram)
        return {"n_ctx": n_ctx, **plan._asdict()}
    finally:
        engine.close()


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    if "error" in memory:
        return [f"this model cannot be run: {memory['error']}"]
    size = {name: f"{n / common.MIB:.0f} MiB" for name, n in memory.items() if name != "n_ctx"}
    disk = f" (and {size['disk']} on disk)" if memory["disk"] else ""
    return [
        f"memory at {memory['n_ctx']} tokens: weights {size['weights']}, KV {size['kv']} f16"
        f"{disk}, scratch {size['workspace']}; free {size['available']}"
    ]


def _table(tensors: list[Any], every: bool) -> list[str]:
    if every:
        return [f"{t.name:<40} {t.type.name:<8} {t.n_bytes:>12} {list(t.shape)}" for t in tensors]
    by_type: dict[str, list[int]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.type.name, []).append(tensor.n_bytes)
    return [
        f"{len(sizes):4d} tensors {name:<8} {sum(sizes) / common.MIB:9.1f} MiB"
        for name, sizes in sorted(by_type.items())
    ]


def _plain(value: Any) -> Any:
    from tamis.formats.strings import Strings

    if isinstance(value, Strings):
        return list(value)
    return value.tolist() if hasattr(value, "tolist") else value


def _short(value: Any) -> str:
    value = _plain(value)
    if isinstance(value, list):
        more = f", ... {len(value)} items" if len(value) > SHOWN else ""
        return f"[{', '.join(map(repr, value[:SHOWN]))}{more}]"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}... {len(text)} characters"
