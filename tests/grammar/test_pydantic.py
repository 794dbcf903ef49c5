"""Models of pydantic: their schemas are taken, and random texts of them are read as the models."""

import json
import warnings

import pytest
from grammars import matcher, written

pytest.importorskip("llguidance")
pytest.importorskip("pydantic")

from pydantic import BaseModel, create_model
from pydantic_models import KINDS

from tamis.sampling.grammar import compile_schema

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
