"""LlamaTokenizer: a Llama's tokenizer as an object of its own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol


class TextModel(Protocol):
    """What a tokenizer needs of a Llama: a Protocol."""

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of a text in UTF-8."""

    def detokenize(
        self,
        tokens: Sequence[int],
        prev_tokens: Sequence[int] | None = None,
        special: bool = False,
    ) -> bytes:
        """The bytes of tokens."""


class BaseLlamaTokenizer(ABC):
    """The interface of a tokenizer that can be passed to a Llama."""

    @abstractmethod
    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text in UTF-8."""

    @abstractmethod
    def detokenize(
        self,
        tokens: Sequence[int],
        prev_tokens: Sequence[int] | None = None,
        special: bool = False,
    ) -> bytes:
        """The bytes of tokens."""


class LlamaTokenizer(BaseLlamaTokenizer):
    """A Llama's tokenizer, with methods for bytes and for str."""

    def __init__(self, llama: TextModel) -> None:
        self._llama = llama

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text in UTF-8."""
        return self._llama.tokenize(text, add_bos, special)

    def detokenize(
        self,
        tokens: Sequence[int],
        prev_tokens: Sequence[int] | None = None,
        special: bool = False,
    ) -> bytes:
        """The bytes of tokens."""
        return self._llama.detokenize(tokens, prev_tokens, special)

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text."""
        return self.tokenize(text.encode("utf-8", "ignore"), add_bos, special)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self.detokenize(tokens).decode("utf-8", "ignore")
