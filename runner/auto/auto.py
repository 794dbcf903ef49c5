"""`--attn auto`: for each quarter of the layers the cheapest method that keeps enough attention.

The last tokens of what a session holds are decoded again with each candidate, from the cheapest to
the dearest, and what it keeps is weighed (see tamis.auto.attention_mass). A quarter that has found
its method keeps it while the next candidate is tried in the others, so that what is weighed last is
what is chosen, but for quarters that stay dense. Cost is bytes: the K and V attended to and
whatever is read to choose them. Scattered keys take up to twice as long a byte as all of them in
their order.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tamis.auto.attention_mass import Weighed, Weight
from tamis.jit_kernels.compile.workers import NoKernelError
from tamis.model.placement import devices
from tamis.select.notation import DENSE, of_layers, parse_method

if TYPE_CHECKING:
    from tamis.engine.engine import Engine
    from tamis.engine.session import Session

NAME = "auto"
N_GROUP = 4  # first, last and middle layers differ most; means over fewer layers are of few heads
# With fewer tokens choosing takes longer than it can save; on a GPU, whose every launch takes
# microseconds, dense attention is as fast as HiP up to here whatever the model.
LEAST, LEAST_ON_GPU = 7500, 1 << 17
# Of n tokens, HiP's k: n // 8 and n // 4. At any mass it was the fastest of those that have nothing
# to do before their first step, which LFPS and Tactic gain back in hundreds of tokens only.
PARTS = (8, 4)


class AutoError(ValueError):
    """The text after `auto` has a parameter that there is not, or a value out of range."""


@dataclass(frozen=True)
class Auto:
    """How a method is chosen."""

    mass: float = 0.95  # attention weight to be kept: a quarter's mean over layers, heads and steps
    probe: int = 4  # tokens that are decoded again with each candidate
    least: int | None = None  # tokens; with fewer it stays dense. None: what suits the device
    share: float = 0.5  # of dense attention's bytes; who reads more is not faster

    def __post_init__(self) -> None:
        if not 0 < self.mass <= 1:
            raise AutoError(f"mass is {self.mass}, expected more than 0 and at most 1")
        least = LEAST if self.least is None else self.least
        if self.probe < 1 or least < self.probe + 1:
            raise AutoError(f"probe is {self.probe}, expected 1 to least - 1, {least - 1}")


class Tried(NamedTuple):
    """A candidate in the layers where it was tried, and what every quarter then kept and read."""

    attn: str
    groups: tuple[Weight, ...]


class Choice(NamedTuple):
    """The method for a document, and why."""

    attn: str
    reason: str
    tried: tuple[Tried, ...] = ()
    seconds: float = 0.0  # that choosing took

    def __str__(self) -> str:
        took = f" (chosen in {self.seconds:.1f} s)" if self.tried else ""
        return f"{self.attn}; {self.reason}{took}"


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


def candidates(n_token: int) -> tuple[str, ...]:
    """The methods that are tried after n_token tokens, from the cheapest."""
    sizes = (n_token // part // 64 * 64 for part in PARTS)
    return tuple(f"hip:k={max(64, k)},l_d=0" for k in sizes)


def choose(
    engine: "Engine",
    base: "Session",
    how: Auto,
    methods: Sequence[str] | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Choice:
    """The method for what `base` holds; base stays as it is.

    methods: the candidates, from the cheapest; those that the backend has no kernels for are passed
    over. tell(attn): called before each is tried. Raises MethodError, MemoryError, CompileError.
    """
    n, start = base.n_past, time.perf_counter()
    if base.kv_ram is not None:
        return Choice(DENSE, "the KV cache is in a file, which candidates would have to copy")
    if base.kv_vram is not None:
        return Choice(DENSE, "the GPU has no room for the whole KV cache, which candidates copy")
    least = how.least
    if least is None:
        least = LEAST if any(b.on_host for b in devices(engine.places).values()) else LEAST_ON_GPU
    if n < least:
        return Choice(DENSE, f"{n} tokens are fewer than {least}")
    groups = _groups(engine)
    found: list[str | None] = [None] * len(groups)
    tried: list[Tried] = []
    for method in candidates(n) if methods is None else methods:
        trial = [method if known is None else known for known in found]
        attn = of_layers(_of_each_layer(engine, groups, trial))
        tell(attn)
        try:
            weighed = _weighed(engine, base, attn, how.probe)
        except NoKernelError:
            continue
        tried.append(Tried(attn, tuple(weighed.of(group) for group in groups)))
        able = [w.mass >= how.mass and w.share <= how.share for w in tried[-1].groups]
        found = [name if fits else None for name, fits in zip(trial, able, strict=True)]
        if None not in found:
            break
    chosen = [known or DENSE for known in found]
    attn = of_layers(_of_each_layer(engine, groups, chosen))
    return Choice(
        attn, _reason(how, groups, found, tried), tuple(tried), time.perf_counter() - start
    )


def _groups(engine: "Engine") -> list[list[int]]:
    """The layers without a window of their own, in quarters of equal size, or nearly."""
    full = [i for i in range(engine.hp.n_layer) if not engine.model.window(i)]
    n = min(N_GROUP, len(full))
    return [full[len(full) * i // n : len(full) * (i + 1) // n] for i in range(n)]


def _of_each_layer(
    engine: "Engine", groups: Sequence[Sequence[int]], names: Sequence[str]
) -> list[str]:
    """The method of every layer: those with a window have the one of the layers after them."""
    ends = [group[-1] for group in groups[:-1]]
    return [names[sum(end < layer for end in ends)] for layer in range(engine.hp.n_layer)]


def _reason(
    how: Auto, groups: list[list[int]], found: list[str | None], tried: Sequence[Tried]
) -> str:
    """What the choice keeps and reads, by the last weighing; where nothing fits, what came near."""
    if not tried:
        return "no other method runs here"
    wanted = f"{how.mass:g} of the attention with at most {how.share:g} of the bytes"
    sizes = [len(group) for group in groups]
    if not any(found):
        best = max(tried, key=lambda t: _mean([w.mass for w in t.groups], sizes))
        mass, share = (_mean(values, sizes) for values in zip(*best.groups, strict=True))
        return f"none keeps {wanted} in any quarter; {best.attn} keeps {mass:.3f} with {share:.2f}"
    last = [
        Weight(1, 1) if name is None else weight
        for name, weight in zip(found, tried[-1].groups, strict=True)
    ]
    mass, share = (_mean(values, sizes) for values in zip(*last, strict=True))
    return f"keeps {mass:.3f} of the attention with {share:.2f} of the bytes"


def _mean(values: Sequence[float], sizes: Sequence[int]) -> float:
    """Over layers, of values that groups of these sizes have."""
    return sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)


def _weighed(engine: "Engine", base: "Session", attn: str, n_probe: int) -> Weighed:
    weighed = Weighed(parse_method(attn))
    session = engine.session(
        n_ctx=base.n_ctx, attn=weighed, type_k=base.kv_types.k, type_v=base.kv_types.v
    )
    session.copy(base, base.n_past - n_probe)
    for token in base.tokens[-n_probe:]:
        session.decode(token)
        weighed.take(engine.places, session.n_past - 1)
    return weighed
