"""`tamis methods`: what --attn takes."""

import argparse
import dataclasses
import inspect
import json
import sys
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    parser.add_argument("--json", action="store_true", help="the list as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print every method with its parameters and their defaults."""
    from tamis.select.notation import methods

    described = [_described(name, method) for name, method in methods().items()]
    if arguments.json:
        sys.stdout.write(json.dumps(described) + "\n")
        return 0
    for entry in described:
        values = ",".join(f"{key}={value}" for key, value in entry["parameters"].items())
        sys.stdout.write(f"{entry['name']}{':' if values else ''}{values}\n")
        sys.stdout.write(f"    {entry['summary']}\n")
    return 0


def _described(name: str, method: type) -> dict[str, Any]:
    """Name, first line of the method's file, parameters with their defaults."""
    module = inspect.getmodule(method)
    summary = (module.__doc__ or "").strip().splitlines()[0] if module is not None else ""
    assert dataclasses.is_dataclass(method)
    parameters = {field.name: field.default for field in dataclasses.fields(method)}
    return {"name": name, "summary": summary, "parameters": parameters}
