"""Arguments of tool calls against the schemas of their tools.

A value that is written without quotes has the type that its schema says; a call that no mark
announces is one only if its arguments fit. What a schema says that is not checked here (patterns,
formats, ranges) is the client's to check. The work is in proportion to schema and value.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tamis.text.calls.json_stream import ObjectReader
from tamis.text.calls.syntax import python_value

_KINDS = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
_MAX_REFERENCES = 32  # references from schema to schema
_MAX_STEPS = 20_000  # of a comparison; a schema may refer to itself in many ways
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


class Tools:
    """The tools of a request: their names, and the schemas of their arguments."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]):
        self._schemas: dict[str, Any] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                self._schemas[function["name"]] = function.get("parameters")

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def typed(self, name: str, key: str, text: str, *, python: bool = False) -> str:
        """Return the argument ``key`` of tool ``name``, written without quotes, as JSON.

        ``python``: the model writes True, False and None. Text stays text where the schema has
        strings; where it has them beside null, null is the word; where it has them beside arrays
        or objects, these are in brackets. Without a schema it is JSON if it can be.
        """
        return self.arguments(name).member(key).typed(text, python=python)

    def arguments(self, name: str) -> "Place":
        """Return the schema of the arguments of tool ``name``; of None if there is none."""
        root = self._schemas.get(name)
        return Place(root, root)

    def fits(self, name: str, arguments: str) -> bool:
        """Whether ``arguments``, JSON text, are of the types that tool ``name`` takes."""
        if name not in self._schemas:
            return False
        try:
            value = json.loads(arguments)
            root = self._schemas[name]
            return isinstance(value, dict) and _Comparison(root).holds(root, value)
        except (ValueError, RecursionError):
            return False


class Place(NamedTuple):
    """A schema within another one, in which its references are resolved."""

    root: Any
    schema: Any

    def branches(self, depth: int = 0) -> Iterator["Place"]:
        """Yield the schemas without references and combinations that this one consists of."""
        schema = _resolved(self.root, self.schema)
        if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
            return
        yield Place(self.root, schema)
        for key in ("anyOf", "oneOf", "allOf"):
            for part in _list(schema.get(key))[:64]:
                yield from Place(self.root, part).branches(depth + 8)

    def member(self, key: str) -> "Place":
        """The schema of an object's value under ``key``; of None if it is not given."""
        for place in self.branches():
            properties = place.schema.get("properties")
            if isinstance(properties, Mapping) and key in properties:
                return Place(self.root, properties[key])
        for place in self.branches():
            rest = place.schema.get("additionalProperties")
            if isinstance(rest, Mapping):
                return Place(self.root, rest)
        return Place(self.root, None)

    @property
    def keys(self) -> frozenset[str]:
        """The keys that the schema of an object names."""
        named = (place.schema.get("properties") for place in self.branches())
        return frozenset(key for found in named if isinstance(found, Mapping) for key in found)

    def takes(self, key: str) -> bool:
        """Whether an object has ``key``: one that is named, or any if none is, or others may be."""
        names_any = False
        for place in self.branches():
            properties = place.schema.get("properties")
            if isinstance(properties, Mapping) and properties:
                names_any = True
                if key in properties:
                    return True
            rest = place.schema.get("additionalProperties")
            if rest is True or isinstance(rest, Mapping) or "patternProperties" in place.schema:
                return True
        return not names_any

    def item(self) -> "Place":
        """The schema of an item of a list; of None if it is not given."""
        items = (place.schema.get("items") for place in self.branches())
        return Place(self.root, next((s for s in items if isinstance(s, Mapping)), None))

    @property
    def kinds(self) -> frozenset[str]:
        """The types that the schema allows; empty if it names none."""
        return _kinds(self)

    def allows(self, value: Any) -> bool:
        """Whether the type of ``value`` is one of the schema's, if it names any."""
        kinds, kind = self.kinds, _kind(value)
        is_whole = kind == "integer" or (kind == "number" and value.is_integer())
        return not kinds or kind in kinds or (is_whole and bool(kinds & {"integer", "number"}))

    def typed(self, text: str, *, python: bool = False) -> str:
        """Return a value that is written without quotes as JSON: see `Tools.typed`."""
        return _as_json(text, self.kinds, python)


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _resolved(root: Any, schema: Any) -> Any:
    """A schema, or the one within ``root`` that it refers to."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        if not reference.startswith("#"):
            return None
        schema = root
        for part in reference[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, Mapping):
                schema = schema.get(part)
            elif isinstance(schema, list) and part.isdecimal() and len(part) < 9:
                schema = schema[int(part)] if int(part) < len(schema) else None
            else:
                return None
    return None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    for type_, kind in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, type_):
            return kind
    return "object" if isinstance(value, Mapping) else "array"


def _kinds(place: Place) -> frozenset[str]:
    found: set[str] = set()
    for _, schema in place.branches():
        types = schema.get("type")
        values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        if isinstance(types, str):
            found.add(types)
        elif isinstance(types, list):
            found |= {kind for kind in types if isinstance(kind, str)}
        elif values:
            found |= {_kind(value) for value in values}
        elif "properties" in schema:
            found.add("object")
        elif "items" in schema:
            found.add("array")
    return frozenset(found & _KINDS)


def _as_json(text: str, kinds: frozenset[str], python: bool) -> str:
    bare = text.strip()
    if "string" in kinds:
        if "null" in kinds and bare in ("null", "None" if python else "null"):
            return "null"
        if not kinds & {"array", "object"} or bare[:1] not in ("{", "["):
            return _quoted(text)
        value = _read(bare)
        fits = value is not None and ("array" if value[0] == "[" else "object") in kinds
        return value if value is not None and fits else _quoted(text)
    if bare in _PYTHON_WORDS and (kinds or python):
        return _PYTHON_WORDS[bare]
    if kinds == {"boolean"} and bare.lower() in ("true", "false"):
        return bare.lower()
    value = _read(bare)
    if value is None or (kinds and value[0] == '"'):
        return _quoted(text)
    return value


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _read(text: str) -> str | None:
    """The text if it is JSON, or a Python literal as JSON; None for other text."""
    if text[:1] == "{":
        return object_text(text) or _python(text)
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _python(text) if text[:1] == "[" else None
    return text


def is_value(text: str) -> bool:
    """Whether ``text`` is JSON, or a Python literal that JSON can express."""
    return _read(text.strip()) is not None


def _python(text: str) -> str | None:
    value = python_value(text)
    return None if value is None else json.dumps(value, ensure_ascii=False)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def object_text(text: str | None) -> str | None:
    """Return the arguments of a call as the JSON text of an object; None if they are not one.

    No arguments, null and an empty text are an empty object; a string contains the object as text.
    """
    for _ in range(2):
        text = (text or "").strip()
        if text in ("", "null", "None"):
            return "{}"
        if text[0] == "{":
            reader = ObjectReader(lambda path: False, whole=True)
            end = reader.feed(text, 0)
            return reader.text if reader.done and not text[end:].strip() else None
        try:
            inner = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return None
        if not isinstance(inner, str):
            return None
        text = inner
    return None


class _Comparison:
    """A comparison of one value with one schema and those it refers to."""

    def __init__(self, root: Any):
        self._root, self._n_left = root, _MAX_STEPS
        self._known: dict[tuple[int, int], bool] = {}

    def holds(self, schema: Any, value: Any) -> bool:
        """Whether ``value`` fits; it does not if the comparison takes too long."""
        schema = _resolved(self._root, schema)
        if schema is False:
            return False
        if not isinstance(schema, Mapping):
            return True
        key = (id(schema), id(value))
        if key not in self._known:
            self._n_left -= 1
            if self._n_left < 0:
                return False
            self._known[key] = True  # a schema that refers to itself holds if the rest does
            self._known[key] = self._holds(schema, value)
        return self._known[key]

    def _holds(self, schema: Mapping[str, Any], value: Any) -> bool:
        listed = schema.get("enum")  # null where there is none, as clients in Go write it
        return (
            self._is_of_type(schema, value)
            and ("const" not in schema or _same(schema["const"], value))
            and (listed is None or any(_same(v, value) for v in _list(listed)))
            and all(self.holds(part, value) for part in _list(schema.get("allOf")))
            and all(
                parts is None or any(self.holds(p, value) for p in _list(parts))
                for parts in map(schema.get, ("anyOf", "oneOf"))
            )
            and (not isinstance(value, dict) or self._has_members(schema, value))
            and (not isinstance(value, list) or self._has_items(schema, value))
        )

    def _is_of_type(self, schema: Mapping[str, Any], value: Any) -> bool:
        types = schema.get("type")
        types = [types] if isinstance(types, str) else _list(types)
        kind = _kind(value)
        known = [t for t in types if t in _KINDS]
        if kind == "integer" or (kind == "number" and value.is_integer()):
            return not known or "integer" in known or "number" in known
        return not known or kind in known

    def _has_members(self, schema: Mapping[str, Any], value: dict[str, Any]) -> bool:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        if any(key not in value for key in _list(schema.get("required"))):
            return False
        own = "patternProperties" not in schema  # patterns of clients are not run
        rest = schema.get("additionalProperties", True) if own else True
        return all(self.holds(properties.get(key, rest), item) for key, item in value.items())

    def _has_items(self, schema: Mapping[str, Any], value: list[Any]) -> bool:
        first = _list(schema.get("prefixItems"))
        rest = schema.get("items", True)
        rest = True if isinstance(rest, list) else rest
        parts = [*first, *[rest] * max(0, len(value) - len(first))]
        return all(self.holds(part, item) for part, item in zip(parts, value, strict=False))


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)
