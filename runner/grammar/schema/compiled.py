"""A JSON schema as the text of a grammar, with what was left out."""

from typing import Any

from tamis.grammar.rules import CompiledGrammar
from tamis.grammar.schema.keywords import conj_of
from tamis.grammar.schema.places import Document
from tamis.grammar.schema.reading import Reader
from tamis.grammar.schema.writing import Writer


def compiled_schema(schema: Any, space: str, *, close: bool = True) -> CompiledGrammar:
    """The grammar of a schema. Raises GrammarError with the place that is wrong.

    space: a regular expression of what may stand between the marks of a JSON text. close: objects
    have no properties but those that are listed, unless the schema says so.
    """
    document = Document(schema)
    reader = Reader(document)
    text, n_level = Writer(reader, space, close=close).grammar(conj_of(document.root, ()))
    return CompiledGrammar(text, n_level, tuple(reader.left_out))
