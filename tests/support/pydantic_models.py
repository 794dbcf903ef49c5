"""Models of pydantic of many kinds: fields of a record, by a word for the kind."""

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, Field, SecretStr


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Tree(BaseModel):
    value: int
    below: list["Tree"] = []


KINDS: dict[str, Any] = {
    "optional": int | None,
    "union": int | str | bool,
    "discriminated union": Annotated[Cat | Dog, Field(discriminator="kind")],
    "set": set[Colour],
    "set of text": set[str],
    "tuple": tuple[int, str, bool],
    "path": Path,
    "secret": SecretStr,
    "datetime": datetime,
    "date": date,
    "time": time,
    "timedelta": timedelta,
    "decimal": Decimal,
    "enum": Colour,
    "nested": Cat,
    "recursive": Tree,
    "dict": dict[str, int],
    "dict of enum": dict[Colour, bool],
    "literal": Literal["a", 1, None],
    "limits": Annotated[int, Field(ge=3, lt=9, multiple_of=2)],
    "text limits": Annotated[str, Field(min_length=2, max_length=4, pattern=r"^\w+$")],
    "uuid": UUID,
    "bytes": bytes,
    "bool": bool,
    "list of models": Annotated[list[Dog], Field(min_length=1, max_length=2)],
}
