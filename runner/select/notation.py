"""The notation of methods on the command line: `window`, `topk:budget=256,rows=head`.

A method that works over another one has that in parentheses: `delta(window:recent=2044):gamma=64`;
some may, as `vertical_slash(hip)`.
A method of one's own is `file.py:Name`, `file.py:Name:param=value`: the file is run.
Decode steps may have a method a layer, `lfps@0-11+tactic@12-23`; layers not named are dense.
A parameter has the name that all methods give it (`base.COMMON`) and its paper's, the field's.
"""

import contextlib
import dataclasses
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import tamis.select
from tamis.select.base import DECODE, PREFILL, ParameterError, PerRole, Selector
from tamis.select.dense import Dense

DENSE = "dense"
INNER = "inner"  # the field of a method's inner method
PARAMETERS = {DECODE: "attn", PREFILL: "prefill"}  # of Engine.session
AT, AND = "@", "+"  # the notation of a method per layer
LONG = 8192  # prompts of so many tokens use LONG_PREFILL, which is close to dense and much faster
LONG_PREFILL = "delta(window:recent=2044):gamma=64"
# The default for prompts of any length whose keys are shared with others.
ANY_PREFILL = f"beyond({LONG_PREFILL}):least={LONG}"
_NOT_METHODS = {
    "base",
    "clusters",
    "in_numpy",
    "key_codes",
    "kvzip",
    "meter",
    "notation",
    "per_layer",
    "plugins",
}


class MethodError(ValueError):
    """The text names no method, or an unknown parameter; the message lists what exists."""


def prefill_for(n_prompt: int) -> str:
    """The default method for a prompt of n_prompt tokens."""
    return LONG_PREFILL if n_prompt > LONG else DENSE


def names() -> list[str]:
    """The names of the methods, which are those of the files in this folder; none is imported."""
    modules = (m.name for m in pkgutil.iter_modules(tamis.select.__path__))
    return sorted(name for name in modules if name not in _NOT_METHODS)


def methods() -> dict[str, type[Selector]]:
    """All methods by name, including those of other packages; imports every one.

    Raises MethodError.
    """
    from tamis.select.plugins import installed

    return {name: method_of(name) for name in sorted({*names(), *installed()})}


def method_of(name: str) -> type[Selector]:
    """The method of a name: METHOD of its file, or another package's (see select/plugins).

    It imports no other one. Raises KeyError for an unknown name, MethodError for one that is
    broken.
    """
    if name in names():
        method: type[Selector] = importlib.import_module(f"tamis.select.{name}").METHOD
        return method
    from tamis.select.plugins import PluginError, imported, installed

    try:
        method = imported(installed()[name])
    except PluginError as error:
        raise MethodError(str(error)) from error
    return method


def parse_methods(
    attn: str | Selector, prefill: str | Selector, min_mass: float | None = None
) -> Selector:
    """The methods of decode steps and of prompts as one; equal methods share a state.

    Each is a text or an object. min_mass: unless None, attn is wrapped in `metered`; dense
    attention is not. Raises MethodError.
    """
    for_decode, for_prefill = _serving(attn, DECODE), _serving(prefill, PREFILL)
    if min_mass is not None and not (isinstance(min_mass, int | float) and 0 <= min_mass <= 1):
        raise MethodError(f"min_mass is {min_mass!r}, expected a number from 0 to 1")
    if min_mass is not None and for_decode != Dense():
        for_decode = _floored(for_decode, min_mass)
    return for_decode if for_decode == for_prefill else PerRole(for_prefill, for_decode)


def _floored(method: Selector, min_mass: float) -> Selector:
    """The method wrapped with a least mass, or with a new one."""
    from tamis.select.metered import Metered

    if getattr(method, "has_floor", False):
        return dataclasses.replace(cast(Any, method), mass=min_mass)
    return Metered(method, mass=min_mass)


def _serving(given: str | Selector, role: str) -> Selector:
    """The method for a role, parsed if it is a text. Raises MethodError."""
    if isinstance(given, str):
        return parse_method(given, role)
    is_object = hasattr(given, "open") and not isinstance(given, type)
    if not is_object or role not in given.roles:
        raise MethodError(
            f"{given!r} is no method of {PARAMETERS[role]}: expected a text such as 'dense', or a "
            f"selector whose roles have {role!r}"
        )
    return given


def parse_method(text: str, role: str = DECODE) -> Selector:
    """The method of a text `name`, `name:param=value,...` or `name(inner):...` in a role.

    Or, at decode, a method per layer, `METHOD@LAYERS+METHOD@LAYERS`. Raises MethodError.
    """
    if (match := re.fullmatch(r"(.+\.py):(\w+)(?::(.*))?", text)) is not None:
        return _of_file(Path(match[1]), match[2], match[3] or "", role)
    if AT in re.sub(r"\(.*\)", "", text):
        return _per_layer(text, role)
    name, inner, parameters = _parts(text)
    try:
        method = method_of(name)
    except KeyError:
        raise MethodError(
            f"attention method {name!r} is not known; {PARAMETERS[role]} takes {_takers(role)}"
            f"{_one_each(text)}"
        ) from None
    if role not in method.roles:
        other = PARAMETERS[method.roles[0]]
        raise MethodError(
            f"{name!r} is no method of {PARAMETERS[role]}: it goes with {other}; "
            f"{PARAMETERS[role]} takes {_takers(role)}"
        )
    values = _values(text, name, method, parameters)
    if inner is None and needs_inner(method):
        raise MethodError(f"{text!r}: {name} works over another method, as in {name}(window)")
    if inner is not None:
        if INNER not in _fields(method):
            raise MethodError(f"{text!r}: {name} takes no method in parentheses, write {name}:...")
        values[INNER] = parse_method(inner, role)
    try:
        return method(**values)
    except ParameterError as error:
        written = {item.partition("=")[0] for item in parameters.split(",")}
        names = {
            field.name: field.name if field.name in written else name
            for name, field in parameters_of(method).items()
        }
        raise MethodError(f"{text!r}: {error.told(names)}") from error
    except ValueError as error:
        raise MethodError(f"{text!r}: {error}") from error


def parameters_of(method: type[Selector]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a method that a text may set, by common name, or else their own."""
    fields = _fields(method).values()
    return {f.metadata.get("common", f.name): f for f in fields if f.name != INNER}


def needs_inner(method: type[Selector]) -> bool:
    """Whether a text of the method must name an inner method in parentheses."""
    field = _fields(method).get(INNER)
    return field is not None and field.default is dataclasses.MISSING


def _fields(method: type[Selector]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(method)}  # type: ignore[arg-type]


def defaults_of(method: type[Selector]) -> dict[str, Any]:
    """The values of a text without parameters, by common name, or else their own."""
    known = parameters_of(method)
    values: dict[str, Any] = {name: field.default for name, field in known.items()}
    for name, field in known.items():
        if field.metadata.get("beside"):
            values[name] += values["sink"] + values["recent"]
    return values


def _one_each(text: str) -> str:
    """The end of a message about a text that may have been meant as a list of methods."""
    return "; name one method at a time, not a list" if "," in text.partition(":")[0] else ""


def _takers(role: str) -> str:
    """The methods that serve a role, for messages, without those of broken packages."""
    from tamis.select.plugins import installed

    serving = []
    for name in sorted({*names(), *installed()}):
        with contextlib.suppress(MethodError):
            serving += [name] if role in method_of(name).roles else []
    return ", ".join(serving)


def _of_file(path: Path, name: str, parameters: str, role: str) -> Selector:
    """The method NAME of a Python file, which is run: a class as methods are, or a function.

    A function is one of NumPy arrays: see `in_numpy`. Raises MethodError.
    """
    from tamis.select.in_numpy import NumpySelector

    text = f"{path}:{name}"
    if not path.is_file():
        raise MethodError(
            f"{text}: there is no file {path}, expected one with {name}{_one_each(str(path))}"
        )
    try:
        module = _module(path.absolute(), path.stat().st_mtime_ns)
    except Exception as error:
        raise MethodError(f"{text}: {type(error).__name__}: {error}") from error
    method = cast(Any, getattr(module, name, None))
    if method is None:
        names = [n for n, value in vars(module).items() if _is_defined_by(module, value)]
        raise MethodError(f"{path} has no {name}, it has {', '.join(names) or 'no function'}")
    is_method = dataclasses.is_dataclass(method) and hasattr(method, "open")
    if not isinstance(method, type) and callable(method):
        method = partial(NumpySelector, method)
        roles = NumpySelector.roles
    elif is_method:
        roles = method.roles
    else:
        raise MethodError(f"{text} is {method!r}, expected a function of q and k, or a dataclass")
    if role not in roles:
        raise MethodError(f"{text} is no method of {PARAMETERS[role]}")
    if not isinstance(method, type):
        if parameters:
            raise MethodError(f"{text} is a function, which takes no parameters: {parameters}")
        return method()
    try:
        return method(**_values(text, name, method, parameters))
    except ParameterError as error:
        raise MethodError(f"{text}: {error}") from error


def _is_defined_by(module: ModuleType, value: Any) -> bool:
    """Whether a value is a function or class that a module defines."""
    return callable(value) and getattr(value, "__module__", "") == module.__name__


@lru_cache(maxsize=16)
def _module(path: Path, changed: int) -> ModuleType:
    """The module of a file, run once for each of its versions."""
    name = f"tamis_own_{path.stem}_{changed}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _values(text: str, name: str, method: type[Selector], parameters: str) -> dict[str, Any]:
    """The fields that `param=value,...` sets. Raises MethodError."""
    known = parameters_of(method)
    by_field = {field.name: field for field in known.values()}
    values: dict[str, Any] = {}
    total = ""  # the field from whose common value sinks and recent tokens are subtracted
    for item in filter(None, parameters.split(",")):
        key, equals, value = item.partition("=")
        field = known.get(key) or by_field.get(key)
        if field is None or not equals:
            wanted = ", ".join(map(_described, known.values())) or "no parameters"
            raise MethodError(f"{item!r} in {text!r}: {name} takes {wanted}")
        if field.name in values:
            raise MethodError(f"{item!r} in {text!r}: {_described(field)} is there before")
        values[field.name] = _value(text, key, value, field.type)
        if key != field.name and field.metadata["beside"]:
            total = field.name
    if total:
        always = (known["sink"], known["recent"])
        n_always = sum(values.get(field.name, field.default) for field in always)
        if values[total] < n_always:
            raise MethodError(
                f"{text!r}: budget is {values[total]}, expected at least {n_always}, which sinks "
                "and recent tokens take"
            )
        values[total] -= n_always
    return values


def _described(field: dataclasses.Field[Any]) -> str:
    """A parameter for messages: its common name, with the paper's in parentheses."""
    common = field.metadata.get("common", field.name)
    return f"{common}=..." + (f" ({field.name})" if common != field.name else "")


def of_layers(names: Sequence[str]) -> str:
    """The notation of one method per layer, given the text of each; dense layers are left out."""
    if len(set(names)) == 1:
        return names[0]
    parts, first = [], 0
    for name, run in groupby(names):
        last = first + len(list(run)) - 1
        if name != DENSE:
            parts.append(f"{name}{AT}{first}" + (f"-{last}" if last > first else ""))
        first = last + 1
    return AND.join(parts)


def _per_layer(text: str, role: str) -> Selector:
    from tamis.select.per_layer import Part, PerLayer

    if role != DECODE:
        raise MethodError(f"{text!r}: {PARAMETERS[role]} takes one method for all layers")
    layers: dict[Selector, list[int]] = {}
    for part in re.split(r"\+(?=[a-z])", text):
        match = re.fullmatch(r"([^@]+)@(\d{1,4})(?:-(\d{1,4}))?", part)
        first, last = (0, -1) if match is None else (int(match[2]), int(match[3] or match[2]))
        if match is None or last < first:
            raise MethodError(
                f"{part!r} in {text!r}: expected METHOD@FIRST-LAST, as in lfps@0-11+tactic@12-23"
            )
        layers.setdefault(parse_method(match[1], role), []).extend(range(first, last + 1))
    parts = (Part(method, tuple(sorted(numbers))) for method, numbers in layers.items())
    try:
        return PerLayer(tuple(parts))
    except ValueError as error:
        raise MethodError(f"{text!r}: {error}") from error


def _parts(text: str) -> tuple[str, str | None, str]:
    """Name, content of the parentheses (None without), and parameters."""
    match = re.fullmatch(r"([^():]*)(?:\((.*)\))?(?::([^()]*))?", text)
    if match is None:
        raise MethodError(f"{text!r}: expected name:param=value,... or name(method):param=value")
    name, inner, parameters = match.groups()
    return name, inner, parameters or ""


def _value(text: str, key: str, value: str, type_: object) -> object:
    converters: dict[str, Callable[[str], object]] = {"int": int, "float": float, "str": str}
    convert = converters.get(getattr(type_, "__name__", str(type_)))
    if convert is None:
        raise MethodError(f"{key} in {text!r} is no number or text: pass the selector itself")
    try:
        return convert(value)
    except ValueError:
        expected = "a whole number" if convert is int else "a number"
        raise MethodError(f"{key}={value!r} in {text!r}: expected {expected}") from None
