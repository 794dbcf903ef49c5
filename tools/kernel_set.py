"""The kernels that a release ships: the constants for which each op is compiled ahead of time.

Nothing here lists kernels. Ops that depend on a weight's type are combined with all types; the rest
is recorded by sessions over random models of published shapes, in all KV types, with every
registered method. Kernels of other shapes are compiled when they are first needed.

`python -m tamis.tools.kernel_set` counts them by op.
"""

import contextlib
import dataclasses
import itertools
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from tamis.arch.load import load_model
from tamis.engine.engine import Engine
from tamis.formats.dequant import decodable
from tamis.formats.gguf import GGUFFile
from tamis.formats.vocab import Vocab
from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.backends.cpu import RUN, WORKER, CpuBackend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.op import Op
from tamis.jit_kernels.contract.program import KernelSpec, Program
from tamis.jit_kernels.contract.types import KV_TYPES
from tamis.model.placement import on_one_device
from tamis.model.repack import Copies, Filling
from tamis.select.base import DECODE, PREFILL
from tamis.select.notation import MethodError, methods, needs_inner
from tamis.tools.random_model import Shape, write_random_model

# Head widths, and query heads of a KV head, of published models of supported architectures.
HEADS = (
    *((64, group) for group in (1, 2, 3, 4, 7, 8)),
    (80, 1),
    (80, 4),
    (96, 1),
    *((128, group) for group in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)),
    *((256, group) for group in (1, 2, 4, 6, 8)),
)
STORED = [type.name for type in decodable()]  # types of weights
# The constants of ops that no session over a llama-like model records, by the ops' names:
# activations, forms and rules of other layers, and the shapes of published recurrent states.
STATES = ((128, 128), (128, 64), (256, 64), (256, 32), (64, 64))
OTHERS: dict[Op, list[tuple[int | str, ...]]] = {
    ops.PACK_ROWS: list(
        itertools.product(("float", "quantised", "bytes"), ("rows", "norm", "silu", "gelu"))
    ),
    ops.MAP_ROWS: list(itertools.product(ops.ACTIVATIONS, (0, 1))),
    ops.INDEX_SCORE: [(576 + 128, 128, "f16")],
    ops.HEAD_SCORE: [(128, 128, "f16")],
    ops.RMS_NORM: [(0,), (1,)],
    ops.ENCODE: list(itertools.product(ops.ENCODED, (0, 1))),
    ops.GATE: [("silu",), ("gelu",)],
    ops.GATE_ROWS: [("none",), ("silu",), ("sigmoid",)],
    ops.SHORT_CONV: [("none",), ("silu",)],
    ops.MOE_ROUTE: [("softmax",), ("sigmoid",), ("softplus",), ("chosen",)],
    ops.GATE_CLAMPED: [("gpt_oss",), ("before",), ("after",)],
    ops.GATED_NORM: list(itertools.product(("norm", "gate"), ("silu", "sigmoid"))),
    ops.SELECTIVE_SCAN: [(16,)],
    ops.WKV: [(64,)],
    ops.LINEAR_SCAN: [(rule, "head", *state) for rule in ("add", "delta") for state in STATES],
}
# The words that methods take as parameters; a method that does not take one raises an error.
WORDS = ("group", "head", "union", "reuse", "mean", "centre", "apart", "skip")
N_CTX, N_PROMPT, N_STEP = 4096, 40, 10


class Noted:
    """A Program that is not run."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def __len__(self) -> int:
        return len(self.program)


class Recorder(Backend):
    """A backend that runs nothing and notes the kernels that it is asked for."""

    name, on_host, strips = CpuBackend.name, True, False
    kv_types = CpuBackend.kv_types
    timed, clock = False, None

    def __init__(self, n_thread: int = 1, n_part: int = 1) -> None:
        self.n_thread, self.n_part, self.specs = n_thread, n_part, set[KernelSpec]()

    def load(
        self, rows: Iterable[KernelSpec], own: Iterable[KernelSpec] = (), progress: Any = None
    ) -> None:
        """Note the kernels."""
        self.specs |= {*rows, *own}

    def link(self, program: Program) -> "Noted":
        """Note a Program's kernels."""
        self.specs |= program.specs
        return Noted(program)

    def run(self, linked: Any, first: int = 0, last: int | None = None) -> None:
        """Do nothing."""

    def send(self, *arrays: Any) -> None:
        """Do nothing."""

    def fetch(self, *arrays: Any) -> None:
        """Do nothing."""

    def free_bytes(self, n_weight: int = 0, /) -> int:
        """A number of bytes above any model's."""
        return 1 << 40

    def close(self) -> None:
        """Do nothing."""


def recorded(path: Path, sessions: Iterable[dict[str, Any]]) -> set[KernelSpec]:
    """The kernels of sessions of a model with these options, for a prompt and decode steps.

    A session whose method excludes another option needs none.
    """
    file = GGUFFile(path)
    model, backend = load_model(file), Recorder(n_thread=2, n_part=16)
    places = on_one_device(backend, model.hp.n_layer)
    filled = Filling(backend, Copies([], Program()), lambda: None)
    engine = Engine(file, model, Vocab.from_gguf(file), places, filled)
    found = set[KernelSpec]()
    for options in sessions:
        with contextlib.suppress(MethodError, ValueError):
            found |= recorded_by(engine, [options], N_PROMPT, N_STEP)
    return found


def recorded_by(
    engine: Engine, sessions: Iterable[dict[str, Any]], n_prompt: int, n_step: int
) -> set[KernelSpec]:
    """The kernels of an engine's sessions, for a prompt and decode steps."""
    recorder = Recorder(engine.backend.n_thread, engine.backend.n_part)
    filled = Filling(recorder, Copies([], Program()), lambda: None)
    places = on_one_device(recorder, engine.hp.n_layer)
    stand_in = Engine(engine.file, engine.model, engine.vocab, places, filled)
    for options in sessions:
        session = stand_in.session(**options)
        session.prefill([3] * n_prompt)
        for _ in range(n_step):
            session.decode(3)
    return recorder.specs


def kernel_set(
    heads: Iterable[tuple[int, int]] = HEADS, types: Iterable[str] = ()
) -> list[KernelSpec]:
    """All kernels of a release, each once, ordered by name.

    For a trial: heads, a part of HEADS; types, a part of the types of weights.
    """
    found = {RUN, WORKER, *_plain(), *_of_types({*types} or STORED)}
    found |= {KernelSpec(op, tuple(constants)) for op, all in OTHERS.items() for constants in all}
    for head_dim, group in heads:
        found |= _of_heads(head_dim, group)
    return sorted(found, key=lambda spec: spec.symbol)


def _ops() -> Iterator[Op]:
    return (op for op in ops.declared().values() if op not in ops.LAUNCHED)


def _plain() -> Iterator[KernelSpec]:
    """Kernels of ops without constants."""
    return (KernelSpec(op, ()) for op in _ops() if not op.constants)


def _of_types(types: Collection[str]) -> Iterator[KernelSpec]:
    """Kernels of ops whose only constant is the type of weights, stored or interleaved."""
    interleaved = {name: type for name, type in ops.STRIP_TYPES.items() if type in types}
    for op in _ops():
        if op.constants == ("type",):
            arranged: dict[Op, Iterable[str]] = {
                ops.MATMUL: [*types, *interleaved],
                ops.MOE_MATMUL: [*types, *interleaved],
                ops.REPACK: interleaved.values(),
            }
            yield from (KernelSpec(op, (type,)) for type in arranged.get(op, types))


def _of_heads(head_dim: int, group: int) -> set[KernelSpec]:
    """Kernels of the heads of a llama-like model: rotation, attention, methods."""
    n_head_kv = 2
    shape = Shape(5, n_head_kv * group, n_head_kv, head_dim, 64, 64, 300, N_CTX)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_random_model(path, shape, "Q8_0")
        found = recorded(path, _sessions())
    rotated = [spec for spec in found if spec.op is ops.ROPE_APPEND]
    for spec in rotated:
        found |= {
            KernelSpec(spec.op, (spec.constants[0], neox, *spec.constants[2:])) for neox in (0, 1)
        }
    for neox, order in itertools.product((0, 1), ("norm", "rope")):
        found.add(KernelSpec(ops.ROPE_HEADS, (head_dim, neox, order)))
    found.add(KernelSpec(ops.MASS_BRACKET, (head_dim,)))  # for audits of methods with int8 keys
    attend = [spec.constants for spec in found if spec.op is ops.ATTEND]
    return found | {KernelSpec(ops.ATTEND_SCORE_MOD, c) for c in attend if c[3:] == ("f16", "f16")}


def _sessions() -> Iterator[dict[str, Any]]:
    """Yield options of sessions: all pairs of KV types when dense, each method with each type."""
    for type_k, type_v in itertools.product(KV_TYPES, KV_TYPES):
        yield {"type_k": type_k, "type_v": type_v, "n_ctx": N_CTX, "audit": 4}
    roles = {DECODE: "attn", PREFILL: "prefill"}
    for name, method in methods().items():
        fields = {field.name: field for field in dataclasses.fields(cast(Any, method))}
        text = f"{name}(window)" if needs_inner(method) else name
        for role, type in itertools.product(method.roles, KV_TYPES):
            yield {roles[role]: text, "type_k": type, "type_v": type, "n_ctx": N_CTX}
        words = [f"{f}={word}" for f in fields if fields[f].type is str for word in WORDS]
        for role, words_of in itertools.product(method.roles, words):
            yield {roles[role]: f"{text}:{words_of}", "n_ctx": N_CTX}
    yield {"attn": "tactic:rows=joint,sample=128", "n_ctx": N_CTX}
    yield {"prefill": "vertical_slash(window)", "n_ctx": N_CTX}


def main() -> None:
    """Count the kernels by op."""
    found = Counter(spec.op.name for spec in kernel_set())
    for name, n in found.most_common():
        print(f"{n:6} {name}")
    print(f"{found.total():6} kernels of {len(found)} ops")


if __name__ == "__main__":
    main()
