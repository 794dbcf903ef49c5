"""Converts a GBNF grammar to the text of a grammar for llguidance."""

from tamis.grammar.gbnf.parsing import Token, Vocabulary, parsed
from tamis.grammar.gbnf.writing import grammar
from tamis.grammar.rules import CompiledGrammar


def compiled_gbnf(text: str, tokenizer: Vocabulary | None) -> CompiledGrammar:
    """The compiled grammar of a text. Raises GrammarError with the place of the error.

    tokenizer: resolves the tokens that the grammar names.
    """

    def symbol(token: Token) -> str:
        if token.wanted:
            return f"<[{token.token_id}]>"
        ends = () if tokenizer is None else tokenizer.ends
        others = ",".join(str(i) for i in sorted({token.token_id, *ends}))
        return f"<[^{others}]>"

    return grammar(parsed(text, tokenizer), symbol)
