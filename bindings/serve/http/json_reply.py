"""JSON of whatever a model's file has: texts that are no UTF-8, numbers that are none."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from tamis.bindings.serve.body import writable

LONGEST_NAME = 64  # characters of a field's name that a reply repeats
PART = 256  # values that are written at once: no other thread runs meanwhile


def in_parts(value: Any) -> bytes:
    """JSON without spaces, as `JsonReply` has it, written so that other threads run in between.

    Of one call for all of it the interpreter's lock is held for seconds: a list of a million
    numbers, for instance.
    """
    try:
        return "".join(_parts(value, _dumps)).encode()
    except ValueError:
        return "".join(_parts(_finite(writable(value)), _dumps)).encode()


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
    """Whether it is a dict of few fields that are no containers: one call writes it."""
    if not isinstance(value, dict) or len(value) > PART:
        return False
    return not any(isinstance(inner, dict | list | tuple) for inner in value.values())


class JsonBytes(Response):
    """A reply in JSON that is written already."""

    media_type = "application/json"


class JsonReply(JSONResponse):
    """A reply in JSON: what UTF-8 has not is U+FFFD, and what JSON has not of numbers null."""

    def render(self, content: Any) -> bytes:
        """Its bytes."""
        try:
            return super().render(content)
        except ValueError:
            return super().render(_finite(writable(content)))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return value


def told(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names fields which were not heeded; none where there are none."""
    return {"x-tamis-ignored": _listed(ignored)} if ignored else {}


def _listed(names: Iterable[str]) -> str:
    """Names of a client's as the value of a header: some of them, of printable ASCII."""
    written = (
        "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name[:LONGEST_NAME])
        for name in names
    )
    return ", ".join(written).encode("ascii", "backslashreplace").decode()
