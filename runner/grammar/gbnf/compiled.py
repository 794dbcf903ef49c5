"""Converts a GBNF grammar to the text of a grammar for llguidance."""

from typing import Protocol

from tamis.grammar.errors import GrammarError
from tamis.grammar.gbnf.parsing import Token, parsed
from tamis.grammar.gbnf.writing import grammar
from tamis.grammar.rules import CompiledGrammar


class Vocabulary(Protocol):
    """What a grammar that names tokens needs of a model: a Protocol."""

    n_vocab: int

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text."""

    def token(self, text: str) -> int | None:
        """The token that is exactly this text; None if it takes several."""


def compiled_gbnf(text: str, tokenizer: Vocabulary | None) -> CompiledGrammar:
    """The compiled grammar of a text. Raises GrammarError with the line of the error.

    tokenizer: resolves the tokens that the grammar names.
    """

    def token_id(name: str) -> int:
        if tokenizer is None:
            raise GrammarError(
                f"grammar: it names the token {name}, expected a model that knows it"
            )
        found = tokenizer.token(name)
        if found is None:
            raise GrammarError(f"grammar: {name} is no single token of this model, expected one")
        return found

    def symbol(token: Token) -> str:
        if tokenizer is not None and token.token_id >= tokenizer.n_vocab:
            most = tokenizer.n_vocab - 1
            raise GrammarError(f"grammar: token {token.token_id}, expected 0 to {most}")
        if token.wanted:
            return f"<[{token.token_id}]>"
        ends = () if tokenizer is None else tokenizer.ends
        others = ",".join(str(i) for i in sorted({token.token_id, *ends}))
        return f"<[^{others}]>"

    return grammar(parsed(text, token_id), symbol)
