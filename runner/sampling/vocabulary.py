"""A model's vocabulary in the form that llguidance reads."""

from typing import Protocol

from tamis.grammar.probe import llguidance
from tamis.sampling.base import SamplerError


class Pieces(Protocol):
    """What a grammar needs of a tokenizer: a Protocol."""

    bos: int | None
    eos: int | None
    eog: frozenset[int]

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        compose: bool = True,
    ) -> list[int]:
        """The token ids of a text; without compose their bytes are exactly the text's."""

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """The bytes of a token."""


class GrammarTokenizer:
    """A vocabulary in the form that llguidance reads.

    Takes half a second for 150,000 tokens: keep it.
    """

    def __init__(self, tokenizer: Pieces, n_vocab: int) -> None:
        library, self.n_vocab = llguidance(), n_vocab
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

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text."""
        return self._tokenizer.eog

    def token(self, text: str) -> int | None:
        """The token of this text, special or not; None if it takes several."""
        found = self._tokenizer.encode(text, add_special=False, parse_special=True)
        return found[0] if len(found) == 1 else None

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special=False, compose=False)


class Bytes:
    """A vocabulary of the 256 bytes and an end token, for trials."""

    n_vocab = 257
    bos: int | None = None
    eos: int | None = 256
    eog = frozenset([256])

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        compose: bool = True,
    ) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """A byte; for the end token nothing, unless special."""
        return bytes([token_id]) if token_id < 256 else b"<end>" * special
