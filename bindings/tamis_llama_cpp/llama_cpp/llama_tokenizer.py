"""Tokenizers; the one of the package transformers is only here, tamis does not need it."""

from collections.abc import Sequence
from typing import Any

from tamis.bindings.drop_in.tokenizer import BaseLlamaTokenizer, LlamaTokenizer

__all__ = ["BaseLlamaTokenizer", "LlamaHFTokenizer", "LlamaTokenizer"]


class LlamaHFTokenizer(BaseLlamaTokenizer):
    """A tokenizer of the package transformers."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf_tokenizer = hf_tokenizer

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str) -> "LlamaHFTokenizer":
        """The tokenizer of a model of the Hugging Face hub.

        Raises ImportError without transformers.
        """
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(pretrained_model_name_or_path))

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids of a text in UTF-8."""
        decoded = text.decode("utf-8", "ignore")
        found: list[int] = self.hf_tokenizer.encode(decoded, add_special_tokens=special)
        return found

    def detokenize(
        self,
        tokens: Sequence[int],
        prev_tokens: Sequence[int] | None = None,
        special: bool = False,
    ) -> bytes:
        """The bytes of tokens, as they stand after prev_tokens."""
        decode, before = self.hf_tokenizer.decode, list(prev_tokens or ())
        whole = decode([*before, *tokens], skip_special_tokens=not special)
        start = decode(before, skip_special_tokens=not special) if before else ""
        return whole[len(start) :].encode("utf-8", "ignore")
