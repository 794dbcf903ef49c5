"""Users' text that stays recognisable, character by character, while a template works on it.

Characters of a user are *veiled*: moved to planes of Unicode that have no characters. They come out
veiled wherever a template puts them, which shows what a user wrote, even if it looks like a control
token. Marks could be lost, and then be forged; veiled characters cannot.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, SupportsIndex

import numpy as np

# Planes 0-3 and 14-16 have characters, the ten between have none: planes 4-7 and 8-10 are veils.
_N_LOW, _FREE, _FREE_END = 0x40000, 0x40000, 0xE0000
_HIGH_SHIFT = 0x60000  # from plane 14-16 down to plane 8-10
_VEILED, _VEILED_END = 0x40000, 0xB0000
# Not veiled: what templates strip and split at, and what JSON escapes. They alone never make a
# control token.
_BARE = "".join(c for c in map(chr, range(0x3001)) if c.isspace() or c < " " or c in '"\\')
_IS_BARE = np.zeros(0x3002, bool)  # the last entry stands for all characters above it
_IS_BARE[[ord(c) for c in _BARE]] = True
_FEW = 16  # characters that are processed faster one by one than as an array
_V = f"{chr(_VEILED)}-{chr(_VEILED_END - 1)}"
_B = re.escape(_BARE)
_ANY_VEILED = re.compile(f"[{_V}]")
_USER_PART = re.compile(f"[{_V}](?:[{_V}{_B}]*[{_V}])?")


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _text(codes: np.ndarray) -> str:
    return codes.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")


def veil(text: str) -> str:
    """Return ``text`` with its characters veiled, one for one.

    Raises ValueError for a code point of planes 4-13, where Unicode has no characters.
    """
    codes = _codes(text)
    free = (codes >= _FREE) & (codes < _FREE_END)
    if free.any():
        code = int(codes[free][0])
        raise ValueError(f"U+{code:X} is not a character of Unicode: remove it from the text")
    veiled = np.where(codes < _N_LOW, codes + _VEILED, codes - _HIGH_SHIFT)
    return _text(np.where(_IS_BARE.take(codes, mode="clip"), codes, veiled))


def unveil(text: str) -> str:
    """Return ``text`` with its veiled characters as the user wrote them."""
    if not has_veiled(text):
        return text if type(text) is str else str.__str__(text)
    if len(text) <= _FEW:
        return "".join(map(_unveiled, str.__iter__(text)))
    codes = _codes(text)
    low = (codes >= _VEILED) & (codes < _VEILED + _N_LOW)
    high = (codes >= _VEILED + _N_LOW) & (codes < _VEILED_END)
    plain = np.where(low, codes - _VEILED, np.where(high, codes + _HIGH_SHIFT, codes))
    return _text(plain)


def _unveiled(c: str) -> str:
    code = ord(c)
    if not _VEILED <= code < _VEILED_END:
        return c
    return chr(code - _VEILED if code < _VEILED + _N_LOW else code + _HIGH_SHIFT)


def has_veiled(text: str) -> bool:
    """Whether a character of ``text`` is veiled."""
    return not str.isascii(text) and _ANY_VEILED.search(text) is not None


def parts(text: str) -> list[tuple[str, bool]]:
    """Split a rendered text into (text, whether it is the template's), unveiled and non-empty."""
    out, end = [], 0
    for match in _USER_PART.finditer(text):
        if match.start() > end:
            out.append((text[end : match.start()], True))
        out.append((unveil(match[0]), False))
        end = match.end()
    if end < len(text):
        out.append((text[end:], True))
    return out


def veiled(value: Any) -> Any:
    """Return ``value`` with all strings in its lists and dicts as UserText.

    Keys that are identifiers stay as they are: no control token is one.
    """
    if isinstance(value, str):
        return UserText(veil(value))
    if isinstance(value, Mapping):
        return {
            key if not isinstance(key, str) or key.isidentifier() else UserText(veil(key)): veiled(
                item
            )
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return type(value)(veiled(item) for item in value)
    return value


def strings(value: Any) -> Iterator[str]:
    """All strings in ``value``, its lists and dicts, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from strings(pair)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return unveil(value)
    return tuple(map(_plain, value)) if isinstance(value, tuple) else value


def _asked(name: str) -> Callable[..., Any]:
    """A read-only method of str, called with the text as the user wrote it."""
    method = getattr(str, name)

    def ask(self: str, *args: Any) -> Any:
        return method(unveil(self), *map(_plain, args))

    return ask


def _cased(name: str) -> Callable[[str], "UserText"]:
    method = getattr(str, name)

    def change(self: str) -> UserText:
        was, now = unveil(self), method(unveil(self))
        # such as "ß" in upper case: the origin of each character is ambiguous
        if len(now) != len(was):
            return UserText(veil(now))
        pairs = zip(self, now, veil(now), strict=True)
        return UserText("".join(v if has_veiled(c) else n for c, n, v in pairs))

    return change


class UserText(str):
    """A string with veiled characters that behaves as if they were not veiled.

    There is one exception: if str's C code makes a plain string of it, a template's test of that
    string sees veiled characters.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return veil(repr(unveil(self)))

    def __hash__(self) -> int:
        return hash(unveil(self))

    def __getitem__(self, key: SupportsIndex | slice) -> "UserText":
        return UserText(str.__getitem__(self, key))

    def __iter__(self) -> Iterator["UserText"]:
        return map(UserText, str.__iter__(self))

    def __add__(self, other: str) -> "UserText":
        return UserText(str.__add__(self, other))

    def __radd__(self, other: str) -> "UserText":
        return UserText(str.__add__(other, self))

    def lstrip(self, chars: str | None = None, /) -> "UserText":
        """Do what str's method does."""
        return self[len(self) - len(unveil(self).lstrip(_plain(chars))) :]

    def rstrip(self, chars: str | None = None, /) -> "UserText":
        """Do what str's method does."""
        return self[: len(unveil(self).rstrip(_plain(chars)))]

    def strip(self, chars: str | None = None, /) -> "UserText":
        """Do what str's method does."""
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> "UserText":
        """Do what str's method does."""
        return self[len(prefix) if self.startswith(prefix) else 0 :]

    def removesuffix(self, suffix: str, /) -> "UserText":
        """Do what str's method does."""
        return self[: len(self) - (len(suffix) if self.endswith(suffix) else 0)]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Do what str's method does."""
        if sep is None:  # white space is not veiled
            return list(map(UserText, str.split(self, None, maxsplit)))
        return self._cut(unveil(self).split(_plain(sep), maxsplit), len(sep))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        """Do what str's method does."""
        if sep is None:
            return list(map(UserText, str.rsplit(self, None, maxsplit)))
        return self._cut(unveil(self).rsplit(_plain(sep), maxsplit), len(sep))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        """Do what str's method does."""
        a, b, c = self._cut(list(unveil(self).partition(_plain(sep))), 0)
        return a, b, c

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        """Do what str's method does."""
        a, b, c = self._cut(list(unveil(self).rpartition(_plain(sep))), 0)
        return a, b, c

    def splitlines(self, keepends: bool = False) -> list[str]:
        """Do what str's method does."""
        return list(map(UserText, str.splitlines(self, keepends)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> "UserText":
        """Do what str's method does; ``new`` keeps its origin."""
        if not old:
            return UserText(str.replace(self, "", new, count))
        return UserText(str.join(new, self.split(old, count)))

    def _cut(self, pieces: list[str], n_between: int) -> list[str]:
        """The pieces of this text that correspond to those of the unveiled one."""
        out, start = [], 0
        for piece in pieces:
            out.append(self[start : start + len(piece)])
            start += len(piece) + n_between
        return list(out)


_ASKED = """__contains__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ startswith endswith find rfind
index rindex count isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric
isprintable isspace istitle isupper"""
for _name in _ASKED.split():
    setattr(UserText, _name, _asked(_name))
for _name in ("upper", "lower", "casefold", "capitalize", "title", "swapcase"):
    setattr(UserText, _name, _cased(_name))
