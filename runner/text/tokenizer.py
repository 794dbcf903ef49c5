"""Text to token ids and back, by the vocabulary of a GGUF file."""

import importlib
import re
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

from tamis.formats.vocab import TokenType, Vocab, byte_of_token
from tamis.text import pretokenize
from tamis.text.bpe import BytePairEncoder, CharacterPairEncoder, DnaEncoder, byte_alphabet

_HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)
_LITERAL = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
# llama.cpp treats this as a control token whatever its type in the file, unless one of the others
# is one.
_READ_AS_CONTROL = "</s>"
_KEEPS_ITS_TYPE = ("<|tool_response>", "<|plamo:eos|>")
# Some files, and llama.cpp for gpt-oss, declare marks between messages to be text.
_MARK = re.compile(r"<[|｜].*[|｜]>|<(start|end)_of_turn>", re.DOTALL)


class TokenizerError(ValueError):
    """A vocabulary that no tokenizer can be built from, or a token outside of it."""


# Byte-level BPE: texts are written in an alphabet that has a letter for each byte.
_BYTE_LEVEL = ("gpt2", "hybriddna")
_C_SPACES = " \t\n\v\f\r"


class Encoder(Protocol):
    """Encodes text without special tokens: a Protocol."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of the tokens of ``text``."""


class _Cutter:
    """Finds tokens in text that are matched literally, before any merging.

    Longer tokens are placed first, those of one length from left to right. llama.cpp does the same,
    except that its order of overlapping different tokens of one length is arbitrary.
    """

    def __init__(self, texts: dict[str, int], control: frozenset[int] = frozenset()):
        self._ids = texts
        self._control = control
        # by the first two characters, or the only one: the lengths to try, longest first
        self._lengths: dict[str, list[int]] = {}
        for text in sorted(texts, key=len, reverse=True):
            lengths = self._lengths.setdefault(text[:2], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        for head, lengths in self._lengths.items():
            if len(head) == 2 and head[0] in texts:
                lengths.append(1)
        first = "".join(re.escape(c) for c in sorted({text[0] for text in texts}))
        self._first = re.compile(f"[{first}]") if first else None

    def cut(self, text: str, closed: bytes = b"") -> Iterator[str | int]:
        """Yield the ids of the tokens found and the stretches of text between them, in order.

        No character of a control token is one where ``closed`` is 1.
        """
        end = 0
        for start, length in sorted(self._taken(text, closed)):
            if start > end:
                yield text[end:start]
            end = start + length
            yield self._ids[text[start:end]]
        if end < len(text):
            yield text[end:]

    def _taken(self, text: str, closed: bytes) -> list[tuple[int, int]]:
        """The positions (start, length) of the tokens in ``text``; no two overlap."""
        places: dict[int, list[int]] = {}  # starts by length
        if self._first is not None:
            for match in self._first.finditer(text):
                self._propose(places, text, match.start(), len(text), closed=closed)
        used, taken = bytearray(len(text)), []
        while places:
            length = max(places)
            for start in sorted(places.pop(length)):
                if used[start]:
                    continue
                if used.find(1, start, start + length) < 0:
                    used[start : start + length] = b"\1" * length
                    taken.append((start, length))
                else:  # a longer token is in the way: the rest is searched for shorter ones later
                    self._propose(places, text, start, length - 1, closed=closed)
        return taken

    def _propose(
        self,
        places: dict[int, list[int]],
        text: str,
        start: int,
        max_length: int,
        *,
        closed: bytes,
    ) -> None:
        """Add the longest token at ``start`` that is not longer than allowed."""
        head = text[start : start + 2]
        limit = min(max_length, len(text) - start)
        for n in self._lengths.get(head) or self._lengths.get(head[0], []):
            token = self._ids.get(text[start : start + n]) if n <= limit else None
            if token is None:
                continue
            if token not in self._control or closed.find(1, start, start + n) < 0:
                places.setdefault(n, []).append(start)
                return


class Tokenizer:
    """Encodes and decodes with one vocabulary; build it with ``tokenizer_for``."""

    def __init__(self, vocab: Vocab, encoder: Encoder):
        self._vocab = vocab
        self._encoder = encoder
        self._types = vocab.token_types.astype(np.uint8).tobytes()
        self._bytes = {ord(letter): byte for byte, letter in enumerate(byte_alphabet())}
        spm = vocab.model == "llama"
        self._space_prefix = spm and vocab.add_space_prefix
        self.composes = vocab.model == "gpt2" and vocab.pre in pretokenize.COMPOSED
        default_bos = spm or vocab.model == "bert" or vocab.pre in pretokenize.ADDS_BOS
        self.n_vocab = len(vocab)
        self.bos, self.eos, self.eog = vocab.bos, vocab.eos, vocab.eog
        self.add_bos = default_bos if vocab.add_bos is None else vocab.add_bos
        if vocab.model == "gemma4" or vocab.pre in pretokenize.ALWAYS_ADDS_BOS:
            self.add_bos = True  # whatever the file says, as some files deny it
        self.add_eos = vocab.model == "t5" if vocab.add_eos is None else vocab.add_eos
        self._end = vocab.eos
        if vocab.model == "bert":
            self.add_eos, self._end = True, vocab.sep
        elif vocab.model in ("rwkv", "plamo2"):
            self.add_bos = self.add_eos = False
        self._user_cutter = _Cutter(self._texts((TokenType.USER_DEFINED,)))
        literal = self._texts(_LITERAL)
        marks = {i for text, i in literal.items() if _MARK.fullmatch(text)}
        self._control = frozenset(marks.union(self._texts(_HIDDEN).values()))
        self._special_cutter = _Cutter(literal, self._control)

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.n_vocab} tokens, {self._vocab.model} {self._vocab.pre}>"

    def _texts(self, types: tuple[TokenType, ...]) -> dict[str, int]:
        """The tokens of these types by their text; of equal ones the last, as in a lookup."""
        tokens = self._vocab.tokens
        ids = np.flatnonzero(np.isin(self._vocab.token_types, types)).tolist()
        texts = {text: i for i in ids if (text := tokens[i])}
        if tokens.places(_KEEPS_ITS_TYPE):
            return texts
        texts.pop(_READ_AS_CONTROL, None)
        if TokenType.CONTROL in types:
            texts |= tokens.places([_READ_AS_CONTROL])
        return texts

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        compose: bool = True,
    ) -> list[int]:
        """Return the ids of the tokens of ``text``.

        ``add_special`` adds BOS and EOS where the vocabulary asks for them; ``parse_special``
        reads control tokens that are written out in the text, which otherwise are plain text.
        Where the model's tokenizer composes characters (``composes``), the tokens spell the text
        in NFC; without ``compose`` they spell it as it is.
        """
        cutter = self._special_cutter if parse_special else self._user_cutter
        ids = self._encode_pieces(cutter.cut(_well_formed(text)), compose=compose)
        if add_special and self.add_bos and self.bos is not None:
            ids.insert(0, self.bos)
        if add_special and self.add_eos and self._end is not None:
            ids.append(self._end)
        return ids

    def encode_parts(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Return the ids of the joined texts of ``parts``, without BOS and EOS.

        Control tokens, and what marks messages like one, are read only in parts marked True, and
        never across the border to one that is not. Other tokens do not care for the borders.
        """
        texts, closed = [], bytearray()
        for text, parse_special in parts:
            texts.append(_well_formed(text))
            closed += bytes([not parse_special]) * len(texts[-1])
        return self._encode_pieces(self._special_cutter.cut("".join(texts), bytes(closed)))

    def has_special(self, text: str) -> bool:
        """Whether a control token is written out in ``text``."""
        return any(part in self._control for part in self._special_cutter.cut(_well_formed(text)))

    def _encode_pieces(self, pieces: Iterable[str | int], *, compose: bool = True) -> list[int]:
        ids: list[int] = []
        after_special = True
        for piece in self._stripped(pieces):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                if self.composes and compose:
                    piece = pretokenize.normalized("NFC", piece)
                prefix = " " if self._space_prefix and after_special else ""
                ids += self._encoder.encode(prefix + piece)
            after_special = isinstance(piece, int)
        return ids

    def _stripped(self, pieces: Iterable[str | int]) -> Iterable[str | int]:
        """The pieces without the white space that neighbouring tokens absorb."""
        lstrip, rstrip = self._vocab.lstrip, self._vocab.rstrip
        if not lstrip and not rstrip:
            return pieces
        some = list(pieces)
        for i, piece in enumerate(some):
            if isinstance(piece, str):
                if i and some[i - 1] in rstrip:
                    piece = piece.lstrip(_C_SPACES)
                if i + 1 < len(some) and some[i + 1] in lstrip:
                    piece = piece.rstrip(_C_SPACES)
                some[i] = piece
        return [piece for piece in some if piece != ""]

    def piece(self, token_id: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token; those of a control token only if ``special``."""
        if not isinstance(token_id, int | np.integer):
            raise TypeError(
                f"a token is {token_id!r}, expected a whole number from 0 to {self.n_vocab - 1}"
            )
        if not 0 <= token_id < self.n_vocab:
            raise TokenizerError(f"token {token_id} is outside the vocabulary of {self.n_vocab}")
        text, kind = self._vocab.tokens[token_id], self._types[token_id]
        if kind in _HIDDEN and not special:
            return b""
        if kind in _LITERAL:
            return text.encode("utf-8", "surrogateescape")
        if kind in (TokenType.UNUSED, TokenType.UNDEFINED):
            return b""
        if self._vocab.model in _BYTE_LEVEL:
            return self._from_alphabet(text.removesuffix(DnaEncoder.MARK))
        if self._vocab.model == "rwkv":
            from tamis.text.longest_match import unescaped

            return unescaped(self._vocab.tokens.raw(token_id))
        byte = byte_of_token(text) if kind == TokenType.BYTE else None
        if byte is not None:
            return bytes([byte])
        return text.replace("\u2581", " ").encode("utf-8", "surrogateescape")

    def _from_alphabet(self, text: str) -> bytes:
        if all(ord(c) in self._bytes for c in text):
            return bytes(self._bytes[ord(c)] for c in text)
        return text.encode("utf-8", "surrogateescape")

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of the tokens, without the space that encoding puts before it.

        Bytes that are not UTF-8 become U+FFFD.
        """
        out = bytearray()
        strip = self._space_prefix
        for i in ids:
            piece = self.piece(i, special=special)
            if strip and self._types[i] not in _LITERAL:
                piece, strip = piece.removeprefix(b" "), False
            out += piece
        return out.decode("utf-8", "replace")


def _well_formed(text: str) -> str:
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def tokenizer_for(vocab: Vocab) -> Tokenizer:
    """Build the tokenizer of a vocabulary; TokenizerError if its kind is not known."""
    try:
        return Tokenizer(vocab, _encoder(vocab))
    except (RuntimeError, ValueError) as e:
        if isinstance(e, TokenizerError):
            raise
        raise TokenizerError(f"the vocabulary ({vocab.model}) cannot be used: {e}") from e


def _encoder(vocab: Vocab) -> Encoder:
    others = {  # file and class: only the needed one is imported
        "llama": ("spm", "SentencePieceEncoder"),
        "bert": ("wordpiece", "WordPieceEncoder"),
        "t5": ("unigram", "UnigramEncoder"),
        "rwkv": ("longest_match", "LongestMatchEncoder"),
        "plamo2": ("plamo", "PlamoEncoder"),
    }
    if vocab.model in others:
        file, name = others[vocab.model]
        encoder: Encoder = getattr(importlib.import_module(f"tamis.text.{file}"), name)(vocab)
        return encoder
    if vocab.model not in ("gpt2", "gemma4", "whitespace", "hybriddna"):
        raise TokenizerError(f"tokenizer model {vocab.model!r} is not supported")
    if not pretokenize.is_known(vocab.pre):
        raise TokenizerError(
            f"pre-tokenizer {vocab.pre!r} (tokenizer.ggml.pre) is not known: words would be cut in "
            "the wrong places. Use a file that names one of these, if its model was trained so: "
            + ", ".join(pretokenize.known())
        )
    control = frozenset(np.flatnonzero(np.isin(vocab.token_types, _HIDDEN)).tolist())
    parts = (vocab.tokens, vocab.merges, vocab.pre, control)
    if vocab.pre in pretokenize.OF_CHARACTERS:
        return CharacterPairEncoder(*parts, lowercase=vocab.normalizer.lowercase)
    bpe = BytePairEncoder(*parts)
    return DnaEncoder(vocab.tokens, bpe) if vocab.model == "hybriddna" else bpe
