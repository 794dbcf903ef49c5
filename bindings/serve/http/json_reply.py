"""JSON of whatever a model's file has: texts that are no UTF-8, numbers that are none."""

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from tamis.bindings.serve.body import writable
from tamis.bindings.serve.json_text import finite

LONGEST_NAME = 200  # characters of a field's name that a reply repeats
MOST_NAMES = 32


class JsonBytes(Response):
    """A reply in JSON that is written already."""

    media_type = "application/json"


class JsonReply(JSONResponse):
    """A reply in JSON: what UTF-8 has not is U+FFFD, and what JSON has not of numbers null."""

    def render(self, content: Any) -> bytes:
        """Its bytes."""
        try:
            return super().render(content)
        except ValueError:
            return super().render(finite(writable(content)))


def told(ignored: Sequence[str]) -> dict[str, str]:
    """The header that names fields which were not heeded; none where there are none.

    Of more than MOST_NAMES the others are counted.
    """
    if len(ignored) > MOST_NAMES:
        named = ignored[: MOST_NAMES - 1]
        ignored = (*named, f"{len(ignored) - len(named)} more")
    return {"x-tamis-ignored": _listed(ignored)} if ignored else {}


def _listed(names: Iterable[str]) -> str:
    """Names of a client's as the value of a header: some of them, of printable ASCII."""
    cut = (
        name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 3] + "..." for name in names
    )
    written = ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in name) for name in cut)
    return ", ".join(written).encode("ascii", "backslashreplace").decode()
