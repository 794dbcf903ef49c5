"""What a method is to stored results: its parameters, and a digest of its code if that is a user's.

Two runs of a method whose file was changed in between are two methods.
"""

import dataclasses
import hashlib
import inspect
import marshal
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from tamis.select.in_numpy import NumpySelector

_OWN = "tamis."  # modules of this package, whose version is in every result


def identity(method: Any) -> str:
    """The parameters of a method and the digest of each of its parts that this package lacks."""
    codes = {_digest(code): None for code in _codes(method)}
    return " ".join([repr(method), *codes])


def _codes(method: Any) -> Iterator[bytes]:
    """Yield the code of a method and of those that it is made of, in their order."""
    code = method.scores if isinstance(method, NumpySelector) else type(method)
    if not str(getattr(code, "__module__", "")).startswith(_OWN):
        yield _code(code)
    if dataclasses.is_dataclass(method):
        for field in dataclasses.fields(method):
            value = getattr(method, field.name)
            for each in value if isinstance(value, tuple) else (value,):
                if hasattr(each, "open") or dataclasses.is_dataclass(each):
                    yield from _codes(each)


def _code(code: Any) -> bytes:
    """The file that defines a class or a function; without one, its functions as compiled."""
    try:
        source = Path(inspect.getsourcefile(code) or "").read_bytes()
    except (TypeError, OSError):
        functions = [code] if isinstance(code, FunctionType) else vars(code).values()
        compiled = (f.__code__ for f in functions if isinstance(f, FunctionType))
        source = b"".join(marshal.dumps(each) for each in compiled)
    cells = getattr(code, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells], getattr(code, "__defaults__", None)
    return source + repr(values).encode()


def _digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()[:16]
