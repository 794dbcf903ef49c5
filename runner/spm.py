"""SentencePiece vocabularies: a model for the library, built from the vocabulary of the file."""

import struct

import sentencepiece

from tamis.formats.vocab import TokenType, Vocab, byte_of_token

_BPE = 2  # TrainerSpec.ModelType


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


def _piece(text: bytes, score: float, kind: int) -> bytes:
    body = _bytes(1, text) + b"\x15" + struct.pack("<f", score) + _integer(3, kind)
    return _bytes(1, body)


class SentencePieceEncoder:
    """Encodes text without special tokens, spaces as they are."""

    def __init__(self, vocab: Vocab):
        self._n_vocab = len(vocab)
        self._unk = vocab.unk
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=_model(vocab))

    def encode(self, text: str) -> list[int]:
        """Return the ids of the tokens of ``text``."""
        ids = self._processor.encode(text, add_bos=False, add_eos=False)
        if ids and max(ids) >= self._n_vocab:  # a piece that only the library asked for
            ids = [i if i < self._n_vocab else self._unk for i in ids]
            ids = [i for i in ids if i is not None]
        return ids


def _kinds(vocab: Vocab) -> list[int]:
    """The types of the pieces: user-defined ones are cut out before, here they are normal."""
    normal = (TokenType.UNDEFINED, TokenType.USER_DEFINED, TokenType.UNUSED)
    kinds = [int(TokenType.NORMAL) if k in normal else int(k) for k in vocab.token_types.tolist()]
    unknowns = [i for i, kind in enumerate(kinds) if kind == TokenType.UNKNOWN]
    for i in unknowns[1:]:  # the library takes one
        kinds[i] = TokenType.CONTROL
    return kinds


def _texts(vocab: Vocab, kinds: list[int]) -> list[bytes]:
    """The texts of the pieces, none empty, none twice and all UTF-8, as the library wants them."""
    seen: set[str] = set()
    texts = []
    for i, text in enumerate(vocab.tokens):
        byte = byte_of_token(text)
        if byte is not None:
            text, kinds[i] = f"<0x{byte:02X}>", TokenType.BYTE
        if not text or text in seen or not _is_utf8(text) or "\0" in text:
            text, kinds[i] = f"\ue000unreachable {i}\ue000", TokenType.CONTROL
        elif kinds[i] == TokenType.BYTE and byte is None:
            kinds[i] = TokenType.NORMAL
        seen.add(text)
        texts.append(text.encode())
    return texts


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _model(vocab: Vocab) -> bytes:
    """A ModelProto on the wire: protobuf itself is not needed for four fields."""
    kinds = _kinds(vocab)
    texts = _texts(vocab, kinds)
    scores = [0.0] * len(vocab) if vocab.scores is None else vocab.scores.tolist()
    pieces = [_piece(*piece) for piece in zip(texts, scores, kinds, strict=True)]
    if TokenType.UNKNOWN not in kinds:
        pieces.append(_piece("\ue000unknown\ue000".encode(), 0.0, TokenType.UNKNOWN))
    missing = {f"<0x{byte:02X}>".encode() for byte in range(256)}.difference(texts)
    pieces += [_piece(text, 0.0, TokenType.BYTE) for text in sorted(missing)]
    trainer = _integer(3, _BPE) + _integer(35, 1)  # bytes for what there is no piece for
    # identity; no dummy prefix, no whitespace removed, but spaces written as U+2581
    normalizer = _bytes(1, b"identity") + _integer(3, 0) + _integer(4, 0) + _integer(5, 1)
    return b"".join(pieces) + _bytes(2, trainer) + _bytes(3, normalizer)
