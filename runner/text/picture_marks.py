"""Marks of pictures in messages, and the ids that stand for them in a prompt.

A mark is a text with a number drawn at random for the process, so that no message contains one by
chance or by intent: what users write is never taken for a picture.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Sequence

_NONCE = secrets.token_hex(16)
_MARK = re.compile(f"<picture-{_NONCE}-([0-9]{{1,9}})>")
Part = tuple[str, bool]  # a text, and whether control tokens are read in it


def mark(number: int) -> str:
    """The text that stands for a picture of this number in a message."""
    return f"<picture-{_NONCE}-{number}>"


def numbers(text: str) -> list[int]:
    """The numbers of a text's marks, in order."""
    return [int(found[1]) for found in _MARK.finditer(text)]


def shown(text: str, by: str) -> str:
    """A text for people, with `by` in place of marks."""
    return _MARK.sub(by, text)


def split(parts: Iterable[Part]) -> list[list[Part] | int]:
    """Parts of a prompt cut at marks: neighbouring parts, and the numbers between them."""
    found: list[list[Part] | int] = [[]]
    for text, own in parts:
        pieces = _MARK.split(text)
        for i, piece in enumerate(pieces):
            if i % 2:
                found += [int(piece), []]
            elif piece:
                last = found[-1]
                assert isinstance(last, list)
                last.append((piece, own))
    return found


def encode(
    encode_parts: Callable[[Sequence[Part]], list[int]],
    parts: Iterable[Part],
    ids_of: Callable[[int], Sequence[int]],
) -> list[int]:
    """Ids of the parts of a prompt; ids_of: those of the picture of a number."""
    ids: list[int] = []
    for piece in split(parts):
        if isinstance(piece, int):
            ids += ids_of(piece)
        elif piece:
            ids += encode_parts(piece)
    return ids


def check_kept(texts: Iterable[str], parts: Iterable[Part]) -> None:
    """Raise ValueError if a prompt has other marks than the texts that it was made of."""
    wanted = sorted(number for text in texts for number in numbers(text))
    found = sorted(piece for piece in split(parts) if isinstance(piece, int))
    if wanted != found:
        raise ValueError(
            f"the chat template keeps {len(found)} of {len(wanted)} pictures: use another template"
        )
