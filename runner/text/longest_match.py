"""RWKV's tokens: at each position of a text the longest token, byte by byte."""

from tamis.formats.vocab import TokenType, Vocab
from tamis.text.token_lookup import TokenLookup

_ESCAPES = {ord("t"): 9, ord("n"): 10, ord("r"): 13}
_DIGITS = b"0123456789abcdef"


def unescaped(text: bytes) -> bytes:
    r"""Return the bytes of a token, which files write with escapes as in ``\xe4`` and ``\n``."""
    out, i = bytearray(), 0
    while i < len(text):
        if text[i] != ord("\\") or i + 1 == len(text):
            out.append(text[i])
            i += 1
        elif text[i + 1] == ord("x") and i + 3 < len(text):
            high, low = (_DIGITS.find(c | 0x20 if c > 0x39 else c) for c in text[i + 2 : i + 4])
            out.append((high * 16 + low) & 0xFF)
            i += 4
        else:
            out.append(_ESCAPES.get(text[i + 1], text[i + 1]))
            i += 2
    return bytes(out)


class LongestMatchEncoder:
    """Encodes text without special tokens; a byte that begins no token becomes the unknown one."""

    def __init__(self, vocab: Vocab):
        hidden = (TokenType.CONTROL, TokenType.UNKNOWN)
        kinds = vocab.token_types.tolist()
        self._tokens = TokenLookup(
            (unescaped(raw), i)
            for i, (raw, kind) in enumerate(zip(vocab.tokens.raws(), kinds, strict=True))
            if raw and kind not in hidden
        )
        self._unk = vocab.unk

    def encode(self, text: str) -> list[int]:
        """Return the ids of the tokens of ``text``."""
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            found = self._tokens.at(data, at)
            if found:
                at, token = found[-1]
                ids.append(token)
            else:
                at += 1
                ids += [] if self._unk is None else [self._unk]
        return ids
