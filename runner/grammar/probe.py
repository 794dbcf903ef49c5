"""Tests of what a terminal matches, by llguidance's automata, which do not backtrack."""

from functools import lru_cache
from types import ModuleType
from typing import Any


def llguidance() -> ModuleType:
    """The library that follows grammars. Raises an ImportError that names the extra."""
    try:
        import llguidance
    except ImportError as e:
        raise ImportError("grammars need llguidance: pip install 'tamis[grammar]'") from e
    return llguidance


class _Bytes:
    """A vocabulary of the 256 bytes and an end token."""

    def __init__(self) -> None:
        self.eos_token_id, self.bos_token_id = 256, None
        self.special_token_ids = [256]
        self.tokens = [bytes([i]) for i in range(256)] + [b"\xff<end>"]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(maxsize=1)
def byte_vocabulary() -> Any:
    """An llguidance tokenizer whose tokens are the 256 bytes, then an end token."""
    library = llguidance()
    return library.LLTokenizer(library.TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=[256])


@lru_cache(maxsize=512)
def _matcher(terminal: str) -> Any:
    grammar = f"start: WHOLE\nWHOLE: {terminal}\n"
    return llguidance().LLMatcher(byte_vocabulary(), grammar, log_level=0)


def trouble(terminal: str) -> str:
    """The reason why llguidance cannot follow a terminal; "" if it can."""
    found = _matcher(terminal)
    return str(found.get_error()).splitlines()[0] if found.is_error() else ""


@lru_cache(maxsize=2048)
def is_empty(terminal: str) -> bool:
    """Whether a terminal that llguidance accepts matches no text at all."""
    found = _matcher(terminal).deep_copy()
    try:
        mask = found.compute_bitmask()
    except ValueError:
        return True
    return bool(found.is_error()) or not any(mask)


def matches(terminal: str, text: str) -> bool:
    """Whether a terminal that llguidance accepts matches the whole of a text."""
    data = list(text.encode())
    found = _matcher(terminal).deep_copy()
    return bool(found.try_consume_tokens(data) == len(data) and found.is_accepting())


def refused(symbol: str) -> bool:
    """Whether llguidance refuses a symbol of a rule."""
    wrong, _ = llguidance().LLMatcher.validate_grammar_with_warnings(f"start: {symbol}\n")
    return bool(wrong)
