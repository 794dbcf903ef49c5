"""Keys of a file that one architecture reads, declared where it reads them."""

from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

UNLIMITED = 1e12  # for numbers that are not counts


class Key(NamedTuple):
    """A key of the file and its range: a number from low to high, or one for each layer."""

    name: str  # without the architecture
    low: float
    high: float
    default: float | None  # None: the key is required
    each_layer: bool = False  # a tuple; the key has no architecture in front of it


@dataclass(frozen=True, slots=True)
class ArchKeys:
    """The base of an architecture's record of keys: a dataclass whose fields are made by `key`.

    A field of type int is a count, one of float a number, and a tuple has a number for each layer.
    """


Keys = TypeVar("Keys", bound=ArchKeys)


def key(name: str, low: float, high: float, default: float | None = None) -> Any:
    """Declare a field of ArchKeys: a number of the file from low to high."""
    return field(metadata={"key": Key(name, low, high, default)})


def key_each_layer(name: str, low: float = -float("inf"), high: float = float("inf")) -> Any:
    """Declare a field of ArchKeys: a number for each layer, or one for all."""
    return field(metadata={"key": Key(name, low, high, None, each_layer=True)})


def declared(kind: type[ArchKeys]) -> list[tuple[Field[Any], Key]]:
    """The fields of a record of keys, each with its key."""
    return [(f, f.metadata["key"]) for f in fields(kind)]
