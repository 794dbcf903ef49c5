"""`tamis methods`: the methods that --attn and --prefill take."""

import argparse
import dataclasses
import inspect
import json
import sys
import textwrap
from typing import Any

from tamis.cli.options import did_you_mean
from tamis.cli.options.errors import FLAGS, UsageError
from tamis.cli.options.parameters import explained
from tamis.select.notation import PARAMETERS

OWN = """FILE.py:NAME
    --attn: your own: a function of q and k in NumPy, or a class. The file is run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.add_argument(
        "name",
        nargs="?",
        help="one method, whose parameters are explained (default: list all methods)",
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print every method with its parameters, their defaults and its roles."""
    from tamis.select.notation import methods

    if arguments.name is not None:
        return _explain(arguments.name, as_json=arguments.json)
    described = [_described(name, method) for name, method in methods().items()]
    if arguments.json:
        sys.stdout.write(json.dumps(described) + "\n")
        return 0
    for entry in described:
        values = ",".join(f"{key}={value}" for key, value in entry["defaults"].items())
        sys.stdout.write(f"{_shown(entry)}{':' if values else ''}{values}\n")
        own = ", ".join(f"{name} is {own}" for name, own in entry["names"].items())
        if own:
            sys.stdout.write(f"    in the paper: {own}\n")
        flags = " and ".join(FLAGS[PARAMETERS[role]] for role in entry["roles"])
        sys.stdout.write(f"    {flags}: {entry['summary']}\n")
        if entry["promise"]:
            sys.stdout.write(f"    promises: {entry['promise']}\n")
    sys.stdout.write(OWN)
    return 0


def _explain(name: str, *, as_json: bool) -> int:
    """Print one method: its idea, its parameters and the rest of its file's docstring."""
    from tamis.select.base import PROMISES
    from tamis.select.notation import methods

    known = methods()
    if name not in known:
        close = did_you_mean(name, known)
        raise UsageError(f"there is no method {name!r}{close or ': tamis methods lists them'}")
    method = known[name]
    entry = _described(name, method)
    module = inspect.getmodule(method)
    text = inspect.cleandoc((module.__doc__ if module is not None else "") or "")
    entry["text"] = text
    entry["explained"] = {key: explained(name, key) for key in entry["defaults"]}
    if as_json:
        sys.stdout.write(json.dumps(entry) + "\n")
        return 0
    lines = [text, "", "Parameters"]
    for key, value in entry["defaults"].items():
        own = entry["names"].get(key, key)
        also = f" (its paper's {own})" if own != key else ""
        text = f"  {key}={value}".ljust(20) + f" {entry['explained'][key]}{also}"
        lines += textwrap.wrap(text, 96, subsequent_indent=" " * 21)
    flags = " and ".join(FLAGS[PARAMETERS[role]] for role in entry["roles"])
    if entry["promise"]:
        text = f"Promised of decode steps: {entry['promise']}, {PROMISES[entry['promise']]}."
        lines += ["", *textwrap.wrap(text, 96)]
    lines += ["", f"Use it with {flags}: {_shown(entry)}:{next(iter(entry['defaults']), '')}=..."]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _shown(entry: dict[str, Any]) -> str:
    """The name, and the arguments that it takes in parentheses."""
    if entry["over_another"]:
        return f"{entry['name']}(METHOD)"
    return entry["name"] + ("[(METHOD)]" if entry["takes_another"] else "")


def _described(name: str, method: Any) -> dict[str, Any]:
    """Name, roles, first line of the method's file, its promise, parameters with their defaults.

    parameters uses the papers' names, defaults the names that all methods share, names maps one to
    the other.
    """
    from tamis.select.base import DECODE
    from tamis.select.notation import INNER, defaults_of, needs_inner, parameters_of

    module = inspect.getmodule(method)
    summary = (module.__doc__ or "").strip().splitlines()[0] if module is not None else ""
    parameters = {field.name: field.default for field in dataclasses.fields(method)}
    takes_another = INNER in parameters
    parameters.pop(INNER, None)
    return {
        "name": name,
        "roles": list(method.roles),
        "over_another": needs_inner(method),
        "takes_another": takes_another,
        "summary": summary,
        "promise": getattr(method, "promise", ("none",))[0] if DECODE in method.roles else "",
        "parameters": parameters,
        "defaults": defaults_of(method),
        "names": {name: f.name for name, f in parameters_of(method).items() if name != f.name},
    }
