"""`--attn auto`: the cheapest method that keeps enough attention, found on the document itself.

The last tokens of what a session holds are decoded again with each candidate, every step beside
dense attention. Cost is bytes: keys and values attended to and whatever is read to choose them.
One method serves all layers.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tamis.jit_kernels.workers import NoKernelError

if TYPE_CHECKING:
    from tamis.engine import Engine
    from tamis.session import Session

NAME = "auto"
# From the fewest bytes to the most, as measured at 16K tokens: an order of trying, no more.
CANDIDATES = ("lfps", "hip", "cpe", "tactic:rows=joint,sample=128", "hip:k=2048", "quest", "tactic")
DENSE = "dense"


class AutoError(ValueError):
    """The text after `auto` has a parameter that there is not, or a value out of range."""


@dataclasses.dataclass(frozen=True)
class Auto:
    """How a method is chosen."""

    mass: float = 0.95  # attention weight that must be kept, the mean over layers, heads and steps
    probe: int = 8  # tokens that are decoded again with each candidate
    least: int = 8192  # tokens; with fewer, choosing takes longer than it can save
    share: float = 0.5  # of dense attention's bytes; who reads more is not worth it

    def __post_init__(self) -> None:
        if not 0 < self.mass <= 1:
            raise AutoError(f"mass is {self.mass}, expected more than 0 and at most 1")
        if self.probe < 1 or self.least < self.probe + 1:
            raise AutoError(f"probe is {self.probe}, expected 1 to least - 1, {self.least - 1}")


class Tried(NamedTuple):
    """A candidate: the mass it kept, and its bytes as a share of dense attention's."""

    attn: str
    mass: float
    share: float


class Choice(NamedTuple):
    """The method for a document, and why."""

    attn: str
    reason: str
    tried: tuple[Tried, ...]


def parse_auto(text: str) -> Auto | None:
    """The settings of `auto` or `auto:mass=0.9,...`; None for another method. Raises AutoError."""
    name, _, rest = text.partition(":")
    if name != NAME:
        return None
    kinds: dict[str, Callable[[str], float]] = {
        "mass": float,
        "probe": int,
        "least": int,
        "share": float,
    }
    values = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        try:
            values[key] = kinds[key](value)
        except (KeyError, ValueError):
            raise AutoError(
                f"{item!r} in {text!r}: auto takes mass=, probe=, least=, share= and numbers"
            ) from None
    return Auto(**values)  # type: ignore[arg-type]


def choose(
    engine: "Engine",
    base: "Session",
    how: Auto,
    candidates: Sequence[str] = CANDIDATES,
    tell: Callable[[str], None] = lambda _: None,
) -> Choice:
    """The method for what `base` holds; base stays as it is.

    Candidates that the backend has no kernels for are passed over. tell(candidate): called before
    each is tried. Raises MethodError, MemoryError, CompileError.
    """
    n = base.n_past
    if n < how.least:
        return Choice(DENSE, f"{n} tokens are fewer than {how.least}", ())
    tried = []
    for attn in candidates:
        tell(attn)
        with contextlib.suppress(NoKernelError):
            tried.append(_tried(engine, base, attn, how.probe))
    if not tried:
        return Choice(DENSE, "no other method runs here", ())
    able = [t for t in tried if t.mass >= how.mass and t.share <= how.share]
    if not able:
        best = max(tried, key=lambda t: t.mass)
        reason = (
            f"none keeps {how.mass:g} of the attention with at most {how.share:g} of the bytes; "
            f"{best.attn} keeps {best.mass:.3f} with {best.share:.2f}"
        )
        return Choice(DENSE, reason, tuple(tried))
    best = min(able, key=lambda t: t.share)
    return Choice(
        best.attn,
        f"keeps {best.mass:.3f} of the attention with {best.share:.2f} of the bytes",
        tuple(tried),
    )


def _tried(engine: "Engine", base: "Session", attn: str, n_probe: int) -> Tried:
    session = engine.session(
        n_ctx=base.n_ctx,
        attn=attn,
        audit=1,
        type_k=base.kv_types.k,
        type_v=base.kv_types.v,
    )
    session.copy(base)
    probe = session.tokens[-n_probe:]
    session.truncate(base.n_past - n_probe)
    session.recall()
    for token in probe:
        session.decode(token)
    assert session.audit is not None
    attended, selecting, dense = session.audit.n_bytes()
    return Tried(attn, session.audit.total().mass, (attended + selecting) / dense)
