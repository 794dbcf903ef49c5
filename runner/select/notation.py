"""The notation of methods on the command line: `window`, `topk:k=256,rows=head`.

A method that works over another one has that in parentheses: `delta(window:recent=2044):gamma=64`.
Decode steps may have a method a layer, `lfps@0-11+tactic@12-23`; layers not named are dense.
"""

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Sequence
from itertools import groupby

import tamis.select
from tamis.select.base import DECODE, PREFILL, PerRole, Selector
from tamis.select.per_layer import Part, PerLayer

DENSE = "dense"
INNER = "inner"  # the field of a method that works over another one
PARAMETERS = {DECODE: "attn", PREFILL: "prefill"}  # of Engine.session
AT, AND = "@", "+"  # of a method a layer
_NOT_METHODS = {"base", "notation", "per_layer"}


class MethodError(ValueError):
    """The text names no method, or a parameter it does not have; the message lists what exists."""


def methods() -> dict[str, type[Selector]]:
    """All methods by name: every file of this folder that defines METHOD."""
    names = (m.name for m in pkgutil.iter_modules(tamis.select.__path__))
    found = sorted(name for name in names if name not in _NOT_METHODS)
    return {name: importlib.import_module(f"tamis.select.{name}").METHOD for name in found}


def parse_methods(attn: str | Selector, prefill: str) -> Selector:
    """The methods of decode steps and of prompts as one; they share a state where they are equal.

    Raises MethodError.
    """
    for_decode = parse_method(attn, DECODE) if isinstance(attn, str) else attn
    for_prefill = parse_method(prefill, PREFILL)
    return for_decode if for_decode == for_prefill else PerRole(for_prefill, for_decode)


def parse_method(text: str, role: str = DECODE) -> Selector:
    """The method that `name`, `name:param=value,...` or `name(inner):...` stands for in a role.

    Or, at decode, a method a layer, `METHOD@LAYERS+METHOD@LAYERS`. Raises MethodError.
    """
    if AT in text:
        return _per_layer(text, role)
    name, inner, parameters = _parts(text)
    known = methods()
    serving = ", ".join(n for n, method in known.items() if role in method.roles)
    if name not in known:
        raise MethodError(
            f"attention method {name!r} is not known; {PARAMETERS[role]} takes {serving}"
        )
    method = known[name]
    if role not in method.roles:
        other = PARAMETERS[method.roles[0]]
        raise MethodError(
            f"{name!r} is no method of {PARAMETERS[role]}: it goes with {other}; "
            f"{PARAMETERS[role]} takes {serving}"
        )
    fields = {f.name: f.type for f in dataclasses.fields(method)}  # type: ignore[arg-type]
    values: dict[str, object] = {}
    if fields.pop(INNER, None) is not None:
        if inner is None:
            raise MethodError(f"{text!r}: {name} works over another method, as in {name}(window)")
        values[INNER] = parse_method(inner, role)
    elif inner is not None:
        raise MethodError(f"{text!r}: {name} takes no method in parentheses, write {name}:...")
    for item in filter(None, parameters.split(",")):
        key, equals, value = item.partition("=")
        if key not in fields or not equals:
            wanted = ", ".join(f"{n}=..." for n in fields) or "no parameters"
            raise MethodError(f"{item!r} in {text!r}: {name} takes {wanted}")
        values[key] = _value(text, key, value, fields[key])
    try:
        return method(**values)
    except ValueError as error:
        raise MethodError(f"{text!r}: {error}") from error


def of_layers(names: Sequence[str]) -> str:
    """The text of one method a layer, whose texts these are; dense layers are left out."""
    if len(set(names)) == 1:
        return names[0]
    parts, first = [], 0
    for name, run in groupby(names):
        last = first + len(list(run)) - 1
        if name != DENSE:
            parts.append(f"{name}{AT}{first}" + (f"-{last}" if last > first else ""))
        first = last + 1
    return AND.join(parts)


def _per_layer(text: str, role: str) -> PerLayer:
    if role != DECODE:
        raise MethodError(f"{text!r}: {PARAMETERS[role]} takes one method for all layers")
    layers: dict[Selector, list[int]] = {}
    for part in re.split(r"\+(?=[a-z])", text):
        found = re.fullmatch(r"([^@]+)@(\d{1,4})(?:-(\d{1,4}))?", part)
        first, last = (0, -1) if found is None else (int(found[2]), int(found[3] or found[2]))
        if found is None or last < first:
            raise MethodError(
                f"{part!r} in {text!r}: expected METHOD@FIRST-LAST, as in lfps@0-11+tactic@12-23"
            )
        layers.setdefault(parse_method(found[1], role), []).extend(range(first, last + 1))
    parts = (Part(method, tuple(sorted(own))) for method, own in layers.items())
    try:
        return PerLayer(tuple(parts))
    except ValueError as error:
        raise MethodError(f"{text!r}: {error}") from error


def _parts(text: str) -> tuple[str, str | None, str]:
    """Name, what its parentheses hold (None without), and the parameters."""
    found = re.fullmatch(r"([^():]*)(?:\((.*)\))?(?::([^()]*))?", text)
    if found is None:
        raise MethodError(f"{text!r}: expected name:param=value,... or name(method):param=value")
    name, inner, parameters = found.groups()
    return name, inner, parameters or ""


def _value(text: str, key: str, value: str, type_: object) -> object:
    convert = {"int": int, "float": float, "str": str}[getattr(type_, "__name__", str(type_))]
    try:
        return convert(value)
    except ValueError:
        expected = {int: "a whole number", float: "a number"}[convert]
        raise MethodError(f"{key}={value!r} in {text!r}: expected {expected}") from None
