"""A query and a document as the one text that a ranking model reads."""

import re
from collections.abc import Iterable
from typing import Protocol

from tamis.formats.vocab import Vocab

# Vocabularies whose pairs have a separator, where the file says nothing.
_WITH_SEP = ("jina-v1-en", "jina-v2-code", "roberta-bpe")
_PLACES = re.compile(r"(\{query\}|\{document\})")


class Encoder(Protocol):
    """What is needed of a tokenizer: a Protocol."""

    bos: int | None
    add_bos: bool

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of a text."""
        ...

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """The ids of joined texts; control tokens are parsed only in parts marked True."""
        ...


def encode_pair(vocab: Vocab, tokenizer: Encoder, query: str, document: str) -> list[int]:
    """Token ids of a query and a document, joined as in llama.cpp's server.

    The file's template `rerank` is used, if there is one; else the tokens that its vocabulary puts
    before, between and after two texts. Control tokens written in either are plain text.
    """
    if vocab.rank_template is not None:
        given = {"{query}": query, "{document}": document}
        pieces = _PLACES.split(vocab.rank_template)
        return tokenizer.encode_parts([(given.get(p, p), p not in given) for p in pieces])
    ends = vocab.model == "t5" if vocab.add_eos is None else vocab.add_eos
    parts = vocab.model == "bert" or vocab.pre in _WITH_SEP
    parts = parts if vocab.add_sep is None else vocab.add_sep
    begin = [tokenizer.bos] if tokenizer.add_bos else []
    end = [vocab.sep if vocab.eos is None else vocab.eos] if ends else []
    between = [vocab.sep] if parts else []
    first, second = (tokenizer.encode(text, add_special=False) for text in (query, document))
    found = [*begin, *first, *end, *between, *second, *end]
    return [i for i in found if i is not None]
