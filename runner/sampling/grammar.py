"""A step that keeps the tokens a grammar allows: GBNF or a JSON schema, through llguidance.

llguidance follows the bytes of a text through an Earley parser and gives, for every step, the set
of tokens whose bytes can come next.
"""

import json
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from tamis.sampling.base import Candidates, SamplerError, Step

# Between the marks of a JSON text. Without a limit, small models write nothing else for ever.
_SPACE = r"[ \n\t]{0,16}"


class Pieces(Protocol):
    """What a grammar needs of a tokenizer."""

    bos: int | None
    eos: int | None
    eog: frozenset[int]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text."""

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes of a token."""


def _llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError as e:
        raise ImportError("grammars need llguidance: pip install 'tamis[grammar]'") from e
    return llguidance


class GrammarTokenizer:
    """A vocabulary as llguidance reads it. Takes half a second for 150,000 tokens: keep it."""

    def __init__(self, tokenizer: Pieces, n_vocab: int) -> None:
        library, self.n_vocab = _llguidance(), n_vocab
        self._tokenizer = tokenizer
        if not tokenizer.eog:
            raise SamplerError("the vocabulary has no token that ends a text: no grammar can end")
        plain = [tokenizer.piece(i) for i in range(n_vocab)]
        # Tokens without bytes of their own never continue a text.
        self.special_token_ids = [i for i, piece in enumerate(plain) if not piece]
        self.tokens = [
            piece or b"\xff" + tokenizer.piece(i, special=True) for i, piece in enumerate(plain)
        ]
        eog = sorted(tokenizer.eog)
        self.bos_token_id = tokenizer.bos
        self.eos_token_id = tokenizer.eos if tokenizer.eos is not None else eog[0]
        self.wrapped = library.LLTokenizer(
            library.TokenizerWrapper(self), n_vocab=n_vocab, eos_token=eog
        )

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special=False)


def json_grammar(schema: Any) -> str:
    """A JSON schema as text for llguidance. Raises SamplerError, ImportError.

    As llama.cpp reads schemas, an object with properties has no others unless the schema says so.
    """
    text = json.dumps(_closed(schema))
    overrides: Any = {"whitespace_pattern": _SPACE}
    try:
        found = _llguidance().LLMatcher.grammar_from_json_schema(text, overrides=overrides)
    except ValueError as e:
        raise SamplerError(f"JSON schema: {e}") from e
    return _checked(found)


def _closed(schema: Any) -> Any:
    """A schema whose objects have the properties named in it; parts of an allOf stay open."""
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for key in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(found.get(key), Mapping):
            found[key] = {name: _closed(part) for name, part in found[key].items()}
    for key in ("items", "additionalProperties"):
        found |= {key: _closed(found[key])} if key in found else {}
    for key in ("anyOf", "oneOf", "prefixItems"):
        if isinstance(found.get(key), list):
            found[key] = [_closed(part) for part in found[key]]
    if "properties" in found and "allOf" not in found:
        found.setdefault("additionalProperties", False)
    return found


def gbnf_grammar(text: str) -> str:
    """A GBNF grammar, as llama.cpp writes it, as text for llguidance. Raises SamplerError."""
    library = _llguidance()
    try:
        found = library.grammar_from("gbnf", text)
    except Exception as e:  # its parser raises whatever a wrong text runs into
        raise SamplerError(f"grammar: {e}") from e
    return _checked(found)


def _checked(grammar: str) -> str:
    wrong, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        raise SamplerError(f"grammar: {messages[0].splitlines()[0]}")
    return grammar


class Grammar(Step):
    """Keeps the tokens that can come next; where the text may end, those that end it too."""

    def __init__(self, grammar: str, tokenizer: GrammarTokenizer) -> None:
        matcher = _llguidance().LLMatcher(tokenizer.wrapped, grammar, log_level=0)
        if matcher.is_error():
            raise SamplerError(f"grammar: {matcher.get_error().splitlines()[0]}")
        self._matcher, self._n_vocab = matcher, tokenizer.n_vocab
        self._accepted: list[int] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "Grammar":
        other = object.__new__(Grammar)
        other._matcher, other._n_vocab = self._matcher.deep_copy(), self._n_vocab
        other._accepted = list(self._accepted)
        return other

    def apply(self, c: Candidates) -> Candidates:
        """Return the candidates that the grammar allows. SamplerError where there are none."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._raise_error()
        allowed = np.unpackbits(bits, count=self._n_vocab, bitorder="little").astype(bool)
        kept = c.take(allowed[c.ids], c.sorted)
        if not len(kept):
            raise SamplerError("the grammar allows none of the tokens left: put it first")
        return kept

    def accept(self, token_id: int) -> None:
        """Go on with a token. SamplerError where the grammar does not allow it; nothing changes."""
        if self._matcher.is_stopped():
            return
        if self._matcher.try_consume_tokens([token_id]) != 1:
            raise SamplerError(f"the grammar does not allow token {token_id} here")
        self._accepted.append(token_id)

    def _raise_error(self) -> None:
        if self._matcher.is_error():
            # The rest of the message is the parser's state, page after page.
            raise SamplerError(f"grammar: {self._matcher.get_error().splitlines()[0]}")

    def reset(self) -> None:
        """Begin the text again."""
        self._matcher.reset()
        self._accepted = []

    def get_state(self) -> dict[str, Any]:
        """Return the tokens so far."""
        return {"accepted": list(self._accepted)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on after these tokens."""
        self.reset()
        self.accept_all(state["accepted"])

    def accept_all(self, token_ids: Iterable[int]) -> None:
        """Go on with several tokens."""
        for token_id in token_ids:
            self.accept(int(token_id))
