"""The notation of methods on the command line: `window`, `topk:k=256,rows=head`."""

import dataclasses
import importlib
import pkgutil

import tamis.select
from tamis.select.base import Selector

_NOT_METHODS = {"base", "notation"}


class MethodError(ValueError):
    """The text names no method, or a parameter it does not have; the message lists what exists."""


def methods() -> dict[str, type]:
    """All methods by name: every file of this folder that defines METHOD."""
    names = (m.name for m in pkgutil.iter_modules(tamis.select.__path__))
    found = sorted(name for name in names if name not in _NOT_METHODS)
    return {name: importlib.import_module(f"tamis.select.{name}").METHOD for name in found}


def parse_method(text: str) -> Selector:
    """The method that `name` or `name:param=value,...` stands for. Raises MethodError."""
    name, _, rest = text.partition(":")
    known = methods()
    if name not in known:
        raise MethodError(f"attention method {name!r} is not known; known: {', '.join(known)}")
    fields = {f.name: f.type for f in dataclasses.fields(known[name])}
    values = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if key not in fields or not equals:
            wanted = ", ".join(f"{n}=..." for n in fields) or "no parameters"
            raise MethodError(f"{item!r} in {text!r}: {name} takes {wanted}")
        values[key] = _value(text, key, value, fields[key])
    try:
        return known[name](**values)
    except ValueError as error:
        raise MethodError(f"{text!r}: {error}") from error


def _value(text: str, key: str, value: str, type_: object) -> object:
    convert = {"int": int, "float": float, "str": str}[getattr(type_, "__name__", str(type_))]
    try:
        return convert(value)
    except ValueError:
        expected = {int: "a whole number", float: "a number"}[convert]
        raise MethodError(f"{key}={value!r} in {text!r}: expected {expected}") from None
