"""`tamis inspect`: what is in a GGUF file and what memory it takes."""

import argparse
import json
import sys
from typing import Any

import numpy as np

from tamis.cli import common

HELP = "show metadata, tensors and the memory plan of a model"
SHOWN = 8  # items of a long array


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    common.add_model_arguments(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="everything as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report."""
    engine = common.load_engine(arguments, common.Progress())
    plan = engine.memory_plan(arguments.ctx)
    n_ctx = engine.context(arguments.ctx)
    tensors = list(engine.file.tensors.values())
    if arguments.json:
        report = {
            "path": str(engine.path),
            "metadata": {k: _plain(v) for k, v in engine.metadata.items()},
            "tensors": [
                {"name": t.name, "shape": t.shape, "type": t.type.name, "bytes": t.n_bytes}
                for t in tensors
            ],
            "memory": {"n_ctx": n_ctx, **plan._asdict()},
        }
        sys.stdout.write(json.dumps(report) + "\n")
        return 0
    lines = [f"{engine.path}", ""]
    lines += [f"{key:<48} {_short(value)}" for key, value in engine.metadata.items()]
    lines += ["", *_table(tensors, arguments.tensors), ""]
    mib = common.MIB
    lines.append(
        f"memory at {n_ctx} tokens: weights {plan.weights / mib:.0f} MiB, KV {plan.kv / mib:.0f} "
        f"MiB f16, scratch {plan.workspace / mib:.0f} MiB; free {plan.available / mib:.0f} MiB"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


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
    return value.tolist() if isinstance(value, np.ndarray) else value


def _short(value: Any) -> str:
    if isinstance(value, list | np.ndarray):
        more = f", ... {len(value)} items" if len(value) > SHOWN else ""
        return f"[{', '.join(map(repr, list(value[:SHOWN])))}{more}]"
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}... {len(text)} characters"
