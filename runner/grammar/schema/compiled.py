"""Converts a JSON schema to the text of a grammar, with the keywords that were left out."""

from typing import Any

from tamis.grammar.rules import CompiledGrammar
from tamis.grammar.schema.keywords import conj_of
from tamis.grammar.schema.places import Document
from tamis.grammar.schema.reading import Reader
from tamis.grammar.schema.writing import Writer


def compiled_schema(schema: Any, space: str, *, close: bool = True) -> CompiledGrammar:
    """The grammar of a schema. Raises GrammarError with the pointer to the error.

    space: a regular expression of the white space between the tokens of a JSON text. close: objects
    have no properties except the listed ones, unless the schema allows them.
    """
    document = Document(schema)
    reader = Reader(document)
    text, n_level = Writer(reader, space, close=close).grammar(conj_of(document.root, ()))
    return CompiledGrammar(text, n_level, tuple(reader.left_out))
