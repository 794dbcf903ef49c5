"""`tamis methods`: what --attn and --prefill take."""

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
    """Print every method with its parameters, their defaults and where it serves."""
    from tamis.cli.flags import FLAGS
    from tamis.select.notation import PARAMETERS, methods

    described = [_described(name, method) for name, method in methods().items()]
    if arguments.json:
        sys.stdout.write(json.dumps(described) + "\n")
        return 0
    for entry in described:
        values = ",".join(f"{key}={value}" for key, value in entry["parameters"].items())
        over = "(METHOD)" if entry["over_another"] else ""
        sys.stdout.write(f"{entry['name']}{over}{':' if values else ''}{values}\n")
        flags = " and ".join(FLAGS[PARAMETERS[role]] for role in entry["roles"])
        sys.stdout.write(f"    {flags}: {entry['summary']}\n")
    return 0


def _described(name: str, method: Any) -> dict[str, Any]:
    """Name, roles, first line of the method's file, parameters with their defaults."""
    from tamis.select.notation import INNER

    module = inspect.getmodule(method)
    summary = (module.__doc__ or "").strip().splitlines()[0] if module is not None else ""
    parameters = {field.name: field.default for field in dataclasses.fields(method)}
    over_another = parameters.pop(INNER, None) is not None
    return {
        "name": name,
        "roles": list(method.roles),
        "over_another": over_another,
        "summary": summary,
        "parameters": parameters,
    }
