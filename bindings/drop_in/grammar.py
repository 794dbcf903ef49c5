"""LlamaGrammar: a grammar's text, compiled for a vocabulary when it is used."""

import json
import warnings
from pathlib import Path
from typing import Any

from tamis.grammar.rules import CompiledGrammar
from tamis.sampling.grammar import (
    Grammar,
    compile_gbnf,
    compile_schema,
    tried,
)
from tamis.sampling.vocabulary import GrammarTokenizer

JSON_GBNF = r"""
root ::= object
value ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (pair ("," ws pair)*)? "}" ws
pair ::= string ":" ws value
array ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= [ \t\n]{0,20}
"""  # any JSON object (RFC 8259)


class SchemaText(str):
    """A JSON schema where a program expects the text of a grammar."""


def json_schema_to_gbnf(schema: str, prop_order: list[str] | None = None) -> SchemaText:
    """A schema as LlamaGrammar.from_string takes it; it is compiled without conversion.

    Raises ValueError.
    """
    json.loads(schema)
    return SchemaText(schema)


class LlamaGrammar:
    """What an answer must look like. Build it with from_string, from_file or from_json_schema."""

    def __init__(self, *args: Any, _grammar: str, _is_schema: bool = False, **kwargs: Any) -> None:
        self._grammar, self._is_schema = _grammar, _is_schema

    def __repr__(self) -> str:
        kind = "a JSON schema" if self._is_schema else "GBNF"
        return f"<LlamaGrammar of {kind}: {len(self._grammar)} characters>"

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> "LlamaGrammar":
        """A grammar in GBNF, llama.cpp's notation, whose rule `root` is the answer.

        The result of json_schema_to_gbnf is taken, too, and remains a schema.
        """
        return cls(_grammar=grammar, _is_schema=isinstance(grammar, SchemaText))

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> "LlamaGrammar":
        """A grammar in a file. Raises OSError, ValueError for an empty one."""
        grammar = Path(file).read_text(encoding="utf-8")
        if not grammar.strip():
            raise ValueError(f"{file} is empty, expected a grammar")
        return cls.from_string(grammar, verbose=verbose)

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> "LlamaGrammar":
        """A grammar of the JSON texts that fit a schema.

        Raises ValueError if the schema is not JSON.
        """
        json.loads(json_schema)
        return cls(_grammar=json_schema, _is_schema=True)

    def step(self, tokenizer: GrammarTokenizer) -> Grammar:
        """The sampler's step for the grammar; warns about parts of a schema that are not enforced.

        Raises SamplerError, ImportError.
        """
        found = tried(self.compiled_here(tokenizer))
        if found.left_out:
            warnings.warn(f"the grammar does not enforce {', '.join(found.left_out)}", stacklevel=2)
        return Grammar(found.text, tokenizer)

    def compiled_here(self, tokenizer: GrammarTokenizer | None = None) -> CompiledGrammar:
        """Compile the grammar in this process, without a trial compilation elsewhere before."""
        if self._is_schema:
            return compile_schema(json.loads(self._grammar))
        return compile_gbnf(self._grammar, tokenizer)
