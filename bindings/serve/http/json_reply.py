"""JSON of values from a model's file, which may have invalid UTF-8, NaN and infinities."""

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from tamis.bindings.serve.body import writable
from tamis.bindings.serve.json_text import finite

LONGEST_NAME = 200  # characters of a field's name that a reply repeats
MOST_NAMES = 32


class JsonBytes(Response):
    """A reply of JSON that is already encoded."""

    media_type = "application/json"


class JsonReply(JSONResponse):
    """A JSON reply; what UTF-8 cannot encode becomes U+FFFD, and NaN and infinities become null."""

    def render(self, content: Any) -> bytes:
        """The content as bytes."""
        try:
            return super().render(content)
        except ValueError:
            return super().render(finite(writable(content)))


def told(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names fields without effect; empty if there are none.

    Beyond MOST_NAMES the others are only counted.
    """
    if len(ignored) > MOST_NAMES:
        named = ignored[: MOST_NAMES - 1]
        ignored = (*named, f"{len(ignored) - len(named)} more")
    return {"x-tamis-ignored": _listed(ignored)} if ignored else {}


def _listed(names: Iterable[str]) -> str:
    """Names from a client as the value of a header: some of them, in printable ASCII."""
    cut = (
        name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..." for name in names
    )
    written = ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in name) for name in cut)
    return ", ".join(written).encode("ascii", "backslashreplace").decode()
