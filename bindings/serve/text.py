"""The text side of a model for the server: vocabulary, template, and a limited tokenizer."""

from collections.abc import Iterable
from functools import cached_property

from tamis.formats.gguf import GGUFFile
from tamis.formats.vocab import Vocab
from tamis.text.chat_template import ChatTemplate, default_template
from tamis.text.tokenizer import Tokenizer, tokenizer_for


class TooManyTokens(Exception):
    """The length of a text alone shows that it has at least `n` tokens."""

    def __init__(self, n: int) -> None:
        super().__init__(f"at least {n} tokens")
        self.n = n


class BoundedTokenizer:
    """A tokenizer that refuses, unread, texts that must have more than `most` tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab: Vocab, most: int) -> None:
        self._tokenizer, self._most = tokenizer, most
        # The bytes of a token in the file are at least those it stands for; composed characters
        # shrink to a third of their bytes at most.
        self.longest = max(map(len, vocab.tokens.raws())) * (3 if tokenizer.composes else 1)
        self.bos, self.add_bos = tokenizer.bos, tokenizer.add_bos

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """The result of Tokenizer.encode. Raises TooManyTokens."""
        self._check(text)
        return self._tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """The result of Tokenizer.encode_parts. Raises TooManyTokens."""
        parts = list(parts)
        self._check("".join(text for text, _ in parts))
        return self._tokenizer.encode_parts(parts)

    def has_special(self, text: str) -> bool:
        """The result of Tokenizer.has_special."""
        return self._tokenizer.has_special(text)

    def _check(self, text: str) -> None:
        n_byte = len(text.encode("utf-8", "surrogatepass"))
        least = -(-n_byte // self.longest)
        if least > self._most:
            raise TooManyTokens(least)


class TextModel:
    """A model's vocabulary and chat template, with a tokenizer limited to a context.

    template: replaces the model file's own.
    """

    def __init__(
        self, vocab: Vocab, tokenizer: Tokenizer, n_ctx: int, template: str | None = None
    ) -> None:
        self.given_template = template
        self.template_source = template or vocab.chat_template or ""
        self.vocab, self.unbounded, self.n_ctx = vocab, tokenizer, n_ctx
        self.tokenizer = BoundedTokenizer(tokenizer, vocab, n_ctx)

    @classmethod
    def load(cls, path: str, n_ctx: int, template: str | None = None) -> "TextModel":
        """Load the text side of a model file. Raises OSError, GGUFError, TokenizerError."""
        vocab = Vocab.from_gguf(GGUFFile(path))
        return cls(vocab, tokenizer_for(vocab), n_ctx, template)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template that was passed, the file's, or the usual one for its tokens.

        Raises PromptError.
        """
        source = self.template_source or default_template(self.vocab.tokens)
        tokens = self.vocab.tokens
        bos, eos = ("" if i is None else tokens[i] for i in (self.vocab.bos, self.vocab.eos))
        return ChatTemplate(source, bos=bos, eos=eos)
