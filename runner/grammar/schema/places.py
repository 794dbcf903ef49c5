"""The places of a schema's parts, and the targets of its references.

A place is a part of a document with its JSON Pointer. $id, $anchor and $dynamicAnchor are found
before anything is read; references lead only into the document, nothing is fetched. A keyword that
is null counts as absent: clients in Go write lists and maps that they do not have as null.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urljoin

from tamis.grammar.errors import GrammarError

MOST_LEVELS = 200
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_ONES: tuple[str, ...] = (
    "items",
    "additionalItems",
    "additionalProperties",
    "propertyNames",
    "contains",
    "not",
)
_ONES += ("if", "then", "else", "unevaluatedItems", "unevaluatedProperties", "contentSchema")


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a document; places with equal pointers are equal."""

    pointer: str
    schema: Any = field(compare=False)
    base: str = field(compare=False)  # the base of relative references

    def part(self, *keys: str | int) -> "Place":
        """The place of a part of this one."""
        schema, pointer = self.schema, self.pointer
        for key in keys:
            schema, pointer = schema[key], f"{pointer}/{escaped(key)}"
        schema = _stated(schema)
        return Place(pointer, schema, _base(self.base, schema))

    def but(self, key: str | int, schema: Any) -> "Place":
        """A part that does not exist in the document, with its own schema."""
        return Place(f"{self.pointer}/{escaped(key)}", schema, self.base)


def escaped(key: str | int) -> str:
    """A key as a token of a JSON Pointer."""
    return str(key).replace("~", "~0").replace("/", "~1")


def wrong(place: Place, what: str) -> GrammarError:
    """The error of a place: what is wrong and what is expected."""
    return GrammarError(f"JSON schema: {place.pointer} {what}")


def shown(value: Any) -> str:
    """The beginning of a value, for an error message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class Document:
    """A schema with the places of its names. Raises GrammarError for one nested too deeply."""

    def __init__(self, schema: Any) -> None:
        schema = _stated(schema)
        base = _base("", schema)
        self.root = Place("#", schema, base)
        self._resources = {base: self.root}
        self._anchors: dict[tuple[str, str], Place] = {}
        self._dynamic: dict[tuple[str, str], Place] = {}
        for place in _all_places(self.root):
            self._name(place)

    @property
    def is_dynamic(self) -> bool:
        """Whether references can depend on the path of references that led to them."""
        return bool(self._dynamic)

    def _name(self, place: Place) -> None:
        if isinstance(place.schema.get("$id"), str):
            self._resources.setdefault(place.base, place)
        for key, found in (("$anchor", self._anchors), ("$dynamicAnchor", self._dynamic)):
            if isinstance(name := place.schema.get(key), str):
                found.setdefault((place.base, name), place)
                self._anchors.setdefault((place.base, name), place)

    def target(self, place: Place, key: str, scope: tuple[str, ...]) -> Place:
        """The target of the reference `key` of a place. Raises GrammarError."""
        reference = place.schema[key]
        if not isinstance(reference, str):
            raise wrong(place, f"has {key} {shown(reference)}, expected text")
        address, _, fragment = _address(place.base, reference).partition("#")
        found = self._found(address, unquote(fragment))
        if found is None:
            raise wrong(
                place,
                f"has {key} {shown(reference)}, which is not in this schema: put what it means "
                "under $defs (nothing is fetched)",
            )
        if key == "$dynamicRef" and (found.base, fragment) in self._dynamic:
            for base in scope:
                if (base, fragment) in self._dynamic:
                    return self._dynamic[base, fragment]
        return found

    def _found(self, address: str, fragment: str) -> Place | None:
        resource = self._resources.get(address)
        if resource is None:
            return None
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((address, fragment))
        for token in fragment.split("/")[1:]:
            key = token.replace("~1", "/").replace("~0", "~")
            schema = resource.schema
            if isinstance(schema, dict) and key in schema:
                resource = resource.part(key)
            elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
                resource = resource.part(int(key))
            else:
                return None
        return resource


def _stated(schema: Any) -> Any:
    """A schema without the keywords that are null; null is a value of const alone."""
    if not isinstance(schema, dict) or all(value is not None for value in schema.values()):
        return schema
    return {k: v for k, v in schema.items() if v is not None or k == "const"}


def _base(base: str, schema: Any) -> str:
    name = schema.get("$id") if isinstance(schema, dict) else None
    return _address(base, name).partition("#")[0] if isinstance(name, str) else base


def _address(base: str, reference: str) -> str:
    if reference.startswith("#"):
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _all_places(root: Place) -> Iterator[Place]:
    """Yield every schema in the document that is an object."""
    left = [(root, 0)]
    while left:
        place, level = left.pop()
        if level > MOST_LEVELS:
            raise GrammarError(
                f"JSON schema: nested too deeply, expected at most {MOST_LEVELS} levels"
            )
        schema = place.schema
        if not isinstance(schema, dict):
            continue
        yield place
        below: list[tuple[str | int, ...]] = []
        for key in _MAPS:
            if isinstance(schema.get(key), dict):
                below += [(key, name) for name in schema[key]]
        for key in _LISTS:
            if isinstance(schema.get(key), list):
                below += [(key, i) for i in range(len(schema[key]))]
        below += [(key,) for key in _ONES if isinstance(schema.get(key), dict)]
        left += [(place.part(*keys), level + 1) for keys in below]
