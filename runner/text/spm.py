"""SentencePiece vocabularies: a model for the library, built from the vocabulary of the file."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import sentencepiece

from tamis.formats.vocab import TokenType, Vocab, byte_of_token

_BPE = 2  # TrainerSpec.ModelType
_NO_SCORE = bytes(4)
_AFTER_TEXT = 7  # bytes of a piece: score and kind, each with its tag


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


@cache
def _head(n: int) -> bytes:
    """The bytes that precede a piece's text of ``n`` bytes."""
    head = b"\x0a" + _varint(n)
    return b"\x0a" + _varint(len(head) + n + _AFTER_TEXT) + head


def _piece(text: bytes, score: bytes, kind: int) -> bytes:
    """Field 1 of a model: a piece with fields 1 (text), 2 (float32 in four bytes) and 3."""
    return b"%b%b\x15%b\x18%c" % (_head(len(text)), text, score, kind)


class SentencePieceEncoder:
    """Encodes text without special tokens; spaces are not changed."""

    def __init__(self, vocab: Vocab):
        self._n_vocab = len(vocab)
        self._unk = vocab.unk
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=_model(vocab))

    def encode(self, text: str) -> list[int]:
        """Return the ids of the tokens of ``text``."""
        ids = self._processor.encode(text, add_bos=False, add_eos=False)
        if ids and max(ids) >= self._n_vocab:  # a piece that was added only for the library
            ids = [i if i < self._n_vocab else self._unk for i in ids]
            ids = [i for i in ids if i is not None]
        return ids


def _kinds(vocab: Vocab) -> list[int]:
    """The types of the pieces: user-defined ones are cut out earlier and are normal here."""
    kinds = vocab.token_types.copy()
    normal = (TokenType.UNDEFINED, TokenType.USER_DEFINED, TokenType.UNUSED)
    kinds[np.isin(kinds, normal)] = TokenType.NORMAL
    unknowns = np.flatnonzero(kinds == TokenType.UNKNOWN)
    kinds[unknowns[1:]] = TokenType.CONTROL  # the library allows only one
    return kinds.tolist()


def _texts(vocab: Vocab) -> Iterator[tuple[bytes, int]]:
    """Yield text and type of the pieces: non-empty, distinct and UTF-8, as the library requires."""
    control, normal, byte_kind = map(int, (TokenType.CONTROL, TokenType.NORMAL, TokenType.BYTE))
    seen: set[bytes] = set()
    for i, (text, kind) in enumerate(zip(vocab.tokens.raws(), _kinds(vocab), strict=True)):
        byte = byte_of_token(text.decode("latin-1")) if text.startswith(b"<0x") else None
        if byte is not None:
            text, kind = f"<0x{byte:02X}>".encode(), byte_kind
        elif kind == byte_kind:
            kind = normal
        if not text or text in seen or b"\0" in text or not _is_utf8(text):
            text, kind = f"\ue000unreachable {i}\ue000".encode(), control
        seen.add(text)
        yield text, kind


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _model(vocab: Vocab) -> bytes:
    """A ModelProto on the wire: protobuf itself is not needed for four fields.

    It grows piece by piece: lists of a quarter of a million pieces would leave 30 MB of holes.
    """
    model = bytearray()
    given = np.zeros(len(vocab)) if vocab.scores is None else vocab.scores
    scores = given.astype("<f4").tobytes()
    missing = {f"<0x{byte:02X}>".encode() for byte in range(256)}
    unknown = int(TokenType.UNKNOWN)
    has_unknown = False
    for i, (text, kind) in enumerate(_texts(vocab)):
        model += _piece(text, scores[4 * i : 4 * i + 4], kind)
        missing.discard(text)
        has_unknown |= kind == unknown
    if not has_unknown:
        model += _piece("\ue000unknown\ue000".encode(), _NO_SCORE, TokenType.UNKNOWN)
    for text in sorted(missing):
        model += _piece(text, _NO_SCORE, TokenType.BYTE)
    trainer = _integer(3, _BPE) + _integer(35, 1)  # bytes for text without a piece
    # identity; no dummy prefix, no whitespace removed, but spaces written as U+2581
    normalizer = _bytes(1, b"identity") + _integer(3, 0) + _integer(4, 0) + _integer(5, 1)
    return bytes(model + _bytes(2, trainer) + _bytes(3, normalizer))
