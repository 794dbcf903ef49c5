"""The constants of CPE's bounds on a model, and whether the bounds hold on other text.

Appendices E to H of Pre-hoc Sparsity (Gao et al., 2025) bound the mass that PSAW drops and ETF
moves before attention is computed, by constants of the model: how fast attention falls with
distance (Eq. 44's lambda) and how little keys change from layer to layer (Eq. 45's B and mu). They
are fitted here to the last queries of one part of a text, and the bounds (Eq. 46 to 48) are
compared with dense attention on another part. Appendix H's rule then gives phi and the first layer
that freezes.

lambda is the largest for which the tail of attention from any distance D on, the mean over queries
and heads, is at most (1 - sinks) exp(-lambda D), as in theorem 7. Eq. 44 itself, a bound on every
position, can hold with theorem 7's kappa only if attention is that geometric series.

    python -m tamis.tools.fit_cpe -m MODEL -n 8192 --attn cpe:phi=0.7,psi=0.5
"""

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tamis.cli.terminal import table
from tamis.engine.engine import Engine
from tamis.evals.predict import own_text
from tamis.fetch import registry as models
from tamis.jit_kernels.contract.types import KVView, Selection
from tamis.kv.convert import as_float32
from tamis.select.base import DECODE, LastQueries, Recording, SelectorShape, SelectorState
from tamis.select.cpe import CPE, depth
from tamis.select.notation import parse_method


def delta_psaw(sink_mass: float, decay: float, distance: float) -> float:
    """The bound of Eq. 46 with theorem 7 on the attention, of 1, that PSAW drops in a layer.

    sink_mass: of the sinks. decay: Eq. 44's lambda, per token. distance: from a query's position to
    the first that it does not see.
    """
    return (1 - sink_mass) * math.exp(-decay * distance)


def beta_etf(q_norm: float, key_change: float, scale: float) -> float:
    """The bound of Eq. 47 on the attention, of 1, that ETF moves in a layer (half an L1 distance).

    q_norm: the query's length, the longest or the mean. key_change: the largest distance of a
    frozen token's key from its own, Eq. 45's B exp(-mu (layer - first)). scale: of attention.
    """
    return q_norm * scale * key_change


def least_window(beta: float, sink_mass: float, decay: float) -> float:
    """Appendix H: the tokens that the last layer must see so that PSAW drops at most beta.

    Divided by the number of tokens, it is phi ** alpha. 0 if the sinks alone are enough, infinite
    for a decay of 0.
    """
    if beta >= 1 - sink_mass:
        return 0.0
    return math.log((1 - sink_mass) / beta) / decay if decay > 0 else math.inf


def least_depth(beta: float, q_norm: float, change: float, fall: float, scale: float) -> float:
    """Appendix H: the least number of freezing layers so that ETF moves at most beta.

    They count from the first that freezes to the last layer. change and fall: Eq. 45's B and mu. 0
    if B is small enough, infinite for a mu up to 0.
    """
    moved = beta_etf(q_norm, change, scale)
    if moved <= beta:
        return 0.0
    return math.log(moved / beta) / fall if fall > 0 else math.inf


@dataclass(frozen=True, eq=False)
class Probe:
    """Dense attention that keeps the last n queries of each layer."""

    roles: ClassVar[tuple[str, ...]] = (DECODE,)

    n: int
    opened: list["_ProbeState"]

    def open(self, shape: SelectorShape) -> SelectorState:
        """The state of one sequence."""
        self.opened.append(_ProbeState(shape, self.n))
        return self.opened[-1]


class _ProbeState(SelectorState):
    def __init__(self, shape: SelectorShape, n: int) -> None:
        super().__init__(shape)
        self._queries = LastQueries(shape, n)

    def observe(
        self, rec: Recording, layer: int, q: np.ndarray, kv: KVView, sel: Selection
    ) -> None:
        self._queries.record(rec, layer, q)

    def queries(self, layer: int) -> np.ndarray:
        """f64 [n, n_head, head_dim], in the order of their positions."""
        kept = self._queries.of(layer)
        return kept["past"][np.argsort(kept["past_pos"])].astype(float)


@dataclass(frozen=True)
class Read:
    """The data of a prompt: last queries, all keys, and the keys of positions that ETF froze."""

    queries: list[np.ndarray]  # for each layer: f64 [n_query, n_head, head_dim]
    keys: list[np.ndarray]  # f64 [n, n_head_kv, head_dim]
    frozen_keys: list[np.ndarray]
    frozen: list[range]
    scale: float

    def weights(self, layer: int, keys: np.ndarray) -> np.ndarray:
        """Attention f64 [n_query, n_head, n] with these keys."""
        q = self.queries[layer]
        n_query, n_head, head_dim = q.shape
        grouped = q.reshape(n_query, keys.shape[1], -1, head_dim)
        scores = self.scale * np.einsum("tkgd,jkd->tkgj", grouped, keys, optimize=True)
        seen = np.arange(len(keys)) <= np.arange(len(keys) - n_query, len(keys))[:, None]
        scores[~np.broadcast_to(seen[:, None, None], scores.shape)] = -np.inf
        scores -= scores.max(axis=-1, keepdims=True)
        shares = np.exp(scores)
        shares /= shares.sum(axis=-1, keepdims=True)
        return shares.reshape(n_query, n_head, -1)


def read(engine: Engine, ids: list[int], method: CPE, n_query: int) -> Read:
    """Read a prompt twice, densely and with the method's ETF."""
    layers = range(engine.hp.n_layer)

    def keys_of(session: Any) -> list[np.ndarray]:
        session.prefill(ids)
        return [as_float32(session._kv.read(layer, len(ids))[0]).astype(float) for layer in layers]

    probe = Probe(n_query, [])
    keys = keys_of(engine.session(n_ctx=len(ids), attn=probe, prefill="dense"))
    only_etf = CPE(s=0, phi=1, sink=method.sink, psi=method.psi, gamma=method.gamma, kv=method.kv)
    frozen_keys = keys_of(engine.session(n_ctx=len(ids), prefill=only_etf))
    (state,) = probe.opened
    freezing = only_etf.open(state.shape)
    return Read(
        [state.queries(layer) for layer in layers],
        keys,
        frozen_keys,
        [freezing.frozen(layer, len(ids)) for layer in layers],
        state.shape.scale,
    )


def tails(weights: np.ndarray, sink: int) -> np.ndarray:
    """Sums of attention from distance D on, without sinks: f64 [n_query, n_head, n], entry D."""
    n_query, _, n = weights.shape
    found = np.zeros_like(weights)
    for t in range(n_query):
        newest = n - n_query + t
        by_distance = weights[t, :, sink : newest + 1][:, ::-1]
        found[t, :, : newest + 1 - sink] = by_distance[:, ::-1].cumsum(axis=1)[:, ::-1]
    return found


def decay_of(tail: np.ndarray) -> float:
    """The largest lambda with tail[D] <= tail[0] exp(-lambda D) for all D that have a tail."""
    left = np.flatnonzero(tail[1:] > 0) + 1
    return float((np.log(tail[0] / tail[left]) / left).min()) if len(left) else math.inf


def envelope(changes: list[float]) -> tuple[float, float]:
    """Eq. 45's B and mu: mu by least squares over the logs, B the least above all values.

    Layers with unchanged keys are left out: with projected frozen states, the first one.
    """
    steps, found = np.flatnonzero(changes), np.array(changes)
    if len(steps) < 2:
        return max(changes, default=0.0), 0.0
    fall = -float(np.polyfit(steps, np.log(found[steps]), 1)[0])
    return float(max(found * np.exp(fall * np.arange(len(found))))), fall


@dataclass(frozen=True)
class Layer:
    """A layer that PSAW or ETF changes: means over queries and heads."""

    layer: int  # from 0
    distance: int  # from the newest query to the first position PSAW hides
    sink_mass: float
    decay: float
    dropped: float
    q_norm: float
    key_change: float  # the most
    moved: float  # half the L1 distance caused by frozen keys


def layer_of(found: Read, method: CPE, layer: int) -> Layer:
    """Measure one layer."""
    weights = found.weights(layer, found.keys[layer])
    n = len(found.keys[layer])
    tail = tails(weights, method.sink).mean(axis=(0, 1))
    distance = n - 1 - math.floor(method.dropped(layer, len(found.keys)) * (n - 1)) + 1
    frozen = found.frozen[layer]
    part = slice(frozen.start, frozen.stop)
    keys = found.keys[layer].copy()
    keys[part] = found.frozen_keys[layer][part]
    changes = np.linalg.norm(keys[part] - found.keys[layer][part], axis=-1)
    moved = np.abs(found.weights(layer, keys) - weights).sum(axis=-1) / 2
    return Layer(
        layer,
        distance,
        float(weights[:, :, : method.sink].sum(axis=-1).mean()),
        decay_of(tail),
        float(tail[distance]) if distance < n else 0.0,
        float(np.linalg.norm(found.queries[layer], axis=-1).mean()),
        float(changes.max(initial=0.0)),
        float(moved.mean()),
    )


def rows(
    fitted: list[Layer], held: list[Layer], change: float, fall: float, scale: float
) -> list[dict[str, Any]]:
    """One row for each layer: bounds by the fitted constants, and measurements on other text.

    change, fall: Eq. 45's B and mu. scale: of attention.
    """
    found = []
    for i, (fit, own) in enumerate(zip(fitted, held, strict=True)):
        drop = delta_psaw(fit.sink_mass, fit.decay, own.distance)
        move = beta_etf(fit.q_norm, change * math.exp(-fall * i), scale)
        found.append(
            {
                "layer": own.layer + 1,
                "distance": own.distance,
                "sinks": f"{fit.sink_mass:.3f}",
                "lambda": f"{fit.decay:.2e}",
                "dropped": f"{own.dropped:.4f}",
                "eq46": f"{drop:.4f}",
                "change": f"{own.key_change:.2f}",
                "moved": f"{own.moved:.4f}",
                "eq47": f"{move:.2f}",
                "sum": f"{own.dropped + own.moved:.4f}",
                "eq48": f"{drop + move:.2f}",
            }
        )
    return found


COLUMNS = {
    "layer": "layer",
    "distance": "D",
    "sinks": "sinks",
    "lambda": "lambda",
    "dropped": "dropped",
    "eq46": "Eq. 46",
    "change": "key change",
    "moved": "moved",
    "eq47": "Eq. 47",
    "sum": "both",
    "eq48": "Eq. 48",
}


def main() -> None:
    """Read the arguments, print the table and what appendix H advises."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", help="path or name; see tamis models")
    parser.add_argument("-n", "--n-tokens", type=int, default=4096, help="of each of two parts")
    parser.add_argument("--text", help="a file (default: Python's language reference)")
    parser.add_argument("--queries", type=int, default=32, help="last queries of each part")
    parser.add_argument("--attn", default="cpe", help="CPE with phi, alpha, psi, gamma, sink, kv")
    parser.add_argument("--beta-psaw", type=float, default=0.05, help="most mass to drop")
    parser.add_argument("--beta-etf", type=float, default=0.05, help="most mass to move")
    arguments = parser.parse_args()
    method = parse_method(arguments.attn)
    if not isinstance(method, CPE):
        parser.error(f"--attn is {arguments.attn!r}, expected cpe:...")
    n, n_query = arguments.n_tokens, arguments.queries
    if not 1 <= n_query < n - method.sink:
        parser.error(f"--queries is {n_query}, expected 1 to {n - method.sink - 1}: raise -n")
    for name in ("beta_psaw", "beta_etf"):
        if not 0 < (beta := getattr(arguments, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} is {beta}, expected more than 0, below 1")
    engine = Engine.load(models.resolve(arguments.model))
    text = Path(arguments.text).read_text("utf8") if arguments.text else own_text()
    ids = engine.tokenizer.encode(text)
    if len(ids) < 2 * n:
        parser.error(f"the text has {len(ids)} tokens, {2 * n} are needed: a longer one, or -n")
    deep = [i for i in range(engine.hp.n_layer) if depth(i, engine.hp.n_layer) > 0]
    parts = [read(engine, ids[at : at + n], method, n_query) for at in (0, n)]
    fitted, held = ([layer_of(part, method, i) for i in deep] for part in parts)
    last, scale = fitted[-1], parts[0].scale
    change, fall = envelope([layer.key_change for layer in fitted])
    found = rows(fitted, held, change, fall, scale)
    sys.stdout.write("\n".join(table.lines(found, COLUMNS)) + "\n")
    window = least_window(arguments.beta_psaw, last.sink_mass, last.decay)
    apart = least_depth(arguments.beta_etf, last.q_norm, change, fall, scale)
    sys.stdout.write(
        f"B {change:.2f}, mu {fall:.3f} a layer\n"
        f"PSAW drops at most {arguments.beta_psaw}: the last layer sees {window:.0f} tokens, "
        f"phi ** alpha {window / n:.2f} of {n}\n"
        f"ETF moves at most {arguments.beta_etf}: {apart:.1f} layers from the first that freezes "
        "to the last\n"
    )


if __name__ == "__main__":
    main()
