"""JSON of whatever a model's file has: texts that are no UTF-8, numbers that are none."""

from collections.abc import Iterable, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from tamis.bindings.serve.body import writable
from tamis.bindings.serve.json_text import finite

LONGEST_NAME = 64  # characters of a field's name that a reply repeats


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
    """The header that names fields which were not heeded; none where there are none."""
    return {"x-tamis-ignored": _listed(ignored)} if ignored else {}


def _listed(names: Iterable[str]) -> str:
    """Names of a client's as the value of a header: some of them, of printable ASCII."""
    written = (
        "".join(c if c.isprintable() else ascii(c)[1:-1] for c in name[:LONGEST_NAME])
        for name in names
    )
    return ", ".join(written).encode("ascii", "backslashreplace").decode()
