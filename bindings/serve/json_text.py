"""Encoding of JSON that may be long: other threads run meanwhile."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from tamis.bindings.serve.body import writable

PART = 256  # values that are encoded at once: no other thread runs meanwhile


def in_parts(value: Any) -> bytes:
    """JSON without spaces, encoded so that other threads run in between; null for NaN.

    A single call for the whole value would hold the interpreter's lock for seconds, for example for
    a list of a million numbers.
    """
    try:
        return "".join(_parts(value, _dumps)).encode()
    except ValueError:
        return "".join(_parts(finite(writable(value)), _dumps)).encode()


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _parts(value: Any, dumps: Callable[[Any], str]) -> Iterator[str]:
    if _is_small(value):
        yield dumps(value)
    elif isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        for i, (key, inner) in enumerate(value.items()):
            yield f"{',' if i else '{'}{dumps(key)}:"
            yield from _parts(inner, dumps)
        yield "}"
    elif isinstance(value, list | tuple) and value:
        plain = not any(isinstance(item, dict | list | tuple) for item in value)
        for i in range(0, len(value), PART if plain else 1):
            yield "," if i else "["
            if plain:
                yield dumps(value[i : i + PART])[1:-1]
            else:
                yield from _parts(value[i], dumps)
        yield "]"
    else:
        yield dumps(value)


def _is_small(value: Any) -> bool:
    """Whether a value is a dict of few fields, none a container: one call encodes it."""
    if not isinstance(value, dict) or len(value) > PART:
        return False
    return not any(isinstance(inner, dict | list | tuple) for inner in value.values())


def finite(value: Any) -> Any:
    """The value with null in place of NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return value
