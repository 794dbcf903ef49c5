"""JSON of whatever a model's file has: texts that are no UTF-8, numbers that are none."""

import math
from typing import Any

from starlette.responses import JSONResponse

from tamis.bindings.serve.body import writable


class JsonReply(JSONResponse):
    """A reply in JSON: what UTF-8 has not is U+FFFD, and what JSON has not of numbers null."""

    def render(self, content: Any) -> bytes:
        """Its bytes."""
        try:
            return super().render(content)
        except ValueError:
            return super().render(_finite(writable(content)))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return value
