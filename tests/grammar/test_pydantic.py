"""Models of pydantic: their schemas are taken, and random texts of them are read as the models."""

import json
import warnings
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from grammars import matcher, written

pytest.importorskip("llguidance")
pytest.importorskip("pydantic")

from pydantic import BaseModel, Field, SecretStr, create_model

from tamis.sampling.grammar import compile_schema


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
LEFT_OUT = {"set of text"}  # uniqueItems of any text


@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_of_a_model_are_read_as_the_model(kind):
    model = create_model("Model", field=(KINDS[kind], ...), __base__=BaseModel)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schema = model.model_json_schema()
    found = compile_schema(schema)
    assert bool(found.left_out) == (kind in LEFT_OUT), found.left_out
    allowed = matcher(found.text)
    texts = [text for seed in range(12) if (text := written(allowed, seed)) is not None]
    assert texts
    for text in texts:
        if kind != "decimal" or not isinstance(json.loads(text)["field"], str):
            model.model_validate_json(text)  # of a decimal the schema allows any text
