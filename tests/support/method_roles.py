"""The methods that can take the role of --attn, of --prefill, or of both."""

from tamis.select.base import (
    DECODE,
    PREFILL,
)
from tamis.select.notation import (
    methods,
)


def in_its_roles(text):
    """The method wherever it serves, dense attention elsewhere."""
    roles = (DECODE,) if "@" in text else methods()[text.partition(":")[0].partition("(")[0]].roles
    return {
        "attn": text if DECODE in roles else "dense",
        "prefill": text if PREFILL in roles else "dense",
    }
