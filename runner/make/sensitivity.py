"""Types of tensors by measurement: how far a model's answers move when one tensor is encoded.

Each matrix is encoded alone, in one type, while a short text is read; the KL divergence of the
answers from those of the unchanged model is its sensitivity. For other types it is scaled by the
squared errors of their values, which a divergence that is small grows with.
"""

import heapq
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from tamis.engine.engine import Engine
from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf import GGUFFile, TensorInfo
from tamis.jit_kernels.contract.types import QTensor
from tamis.make.importance import Importance
from tamis.make.mixes import is_kept
from tamis.make.quantize import Encoder, n_bytes
from tamis.make.watching import with_tensors

_T = GGMLType
LADDER = (_T.Q2_K, _T.Q3_K, _T.Q4_K, _T.Q5_K, _T.Q6_K, _T.Q8_0)
NARROW = (_T.Q4_0, _T.Q5_0, _T.Q5_1, _T.Q8_0)  # for rows that are no multiple of 256
PROBES = {LADDER: _T.Q3_K, NARROW: _T.Q4_0}
SAMPLE = 64  # rows of a matrix whose errors are measured
TRIES = 5  # choices that are verified before --max-kl is met
N_TEXT = 128  # tokens that are read for each tensor


class Option(NamedTuple):
    """A type of a tensor: its bytes, and how far it alone moves the answers (KL, nats a token)."""

    type: GGMLType
    n_bytes: int
    kl: float


class Chosen(NamedTuple):
    """Types by tensors' names, all tensors' bytes, and the KL divergence that was measured."""

    types: dict[str, GGMLType]
    n_bytes: int
    kl: float


class Sensitivity:
    """A model's answers to a text, and what becomes of them with tensors in other types.

    ids: int64 [n], at most N_TEXT tokens of a text. each(done, all) is called for each tensor.
    """

    def __init__(
        self, engine: Engine, ids: np.ndarray, encoder: Encoder, importance: Importance
    ) -> None:
        self._engine, self._ids, self._encoder = engine, ids.tolist(), encoder
        self._file: GGUFFile = engine.loaded.file
        self._weights = importance.values
        self._base = _log_probabilities(self._logits({}))
        self.options: dict[str, list[Option]] = {}

    def measure(self, each: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Measure every matrix that may have another type. Raises CompileError, ValueError."""
        names = [n for n, t in self._file.tensors.items() if not is_kept(self._file, n, t.shape)]
        types = {t for name in names for t in _ladder(self._file.tensors[name])}
        self._encoder.compile({(t.name, bool(self._weights)) for t in types} | {
            (t.name, False) for t in types
        })  # fmt: skip
        for done, name in enumerate(names):
            self.options[name] = self._options(self._file.tensors[name])
            each(done + 1, len(names))

    def smallest(self, limit: int) -> Chosen:
        """The types of at most `limit` bytes that move the answers least. Raises ValueError."""
        steps = self._steps()
        types, size, _ = self._start()
        if size > limit:
            raise ValueError(
                f"with the smallest types the model has {size} bytes, {limit} are wanted: "
                "allow more, or take a smaller model"
            )
        for name, option, more, _ in steps:
            if size + more <= limit:
                types[name], size = option.type, size + more
        return Chosen(types, size, self.divergence(types))

    def nearest(self, limit: float) -> Chosen:
        """Small types whose measured divergence is at most `limit`. Raises ValueError."""
        aim = limit
        for _ in range(TRIES):
            types, size, kl = self._start()
            for name, option, more, less in self._steps():
                if kl <= aim:
                    break
                types[name], size, kl = option.type, size + more, kl - less
            found = Chosen(types, size, self.divergence(types))
            if found.kl <= limit:
                return found
            aim *= 0.9 * limit / found.kl
        raise ValueError(
            f"the KL divergence is {found.kl:.4f} with types for {aim:.4f}, {limit} is wanted: "
            "allow more"
        )

    def divergence(self, types: Mapping[str, GGMLType]) -> float:
        """The mean KL divergence with tensors in these types, in nats a token."""
        tensors = self._file.tensors
        changed = {
            n: self._encoded(tensors[n], t) for n, t in types.items() if tensors[n].type != t
        }
        return self._kl(changed)

    def _start(self) -> tuple[dict[str, GGMLType], int, float]:
        """The smallest types, their bytes, and the divergence that they are expected to have."""
        types = {name: info.type for name, info in self._file.tensors.items()}
        for name, options in self.options.items():
            types[name] = options[0].type
        return types, n_bytes(self._file, types), sum(o[0].kl for o in self.options.values())

    def _steps(self) -> list[tuple[str, Option, int, float]]:
        """Steps to larger types, those first that lessen the divergence most for their bytes."""
        heap: list[tuple[float, str, int, int]] = []

        def push(name: str, i: int) -> None:
            options = self.options[name]
            here = options[i]
            gains = [((here.kl - o.kl) / (o.n_bytes - here.n_bytes), j) for j, o in
                     enumerate(options) if j > i]  # fmt: skip
            if gains:
                gain, j = max(gains)
                heapq.heappush(heap, (-gain, name, i, j))

        for name in self.options:
            push(name, 0)
        steps = []
        while heap:
            _, name, i, j = heapq.heappop(heap)
            before, after = self.options[name][i], self.options[name][j]
            steps.append((name, after, after.n_bytes - before.n_bytes, before.kl - after.kl))
            push(name, j)
        return steps

    def _options(self, info: TensorInfo) -> list[Option]:
        ladder = _ladder(info)
        probe = PROBES[ladder]
        kl = self._kl({info.name: self._encoded(info, probe)})
        values, importance = self._sample(info), self._importance(info)
        errors = {type: self._error(values, type, importance) for type in ladder}
        scale = kl / errors[probe] if errors[probe] else 0.0
        n = int(np.prod(info.shape, dtype=np.int64))
        found: list[Option] = []
        for type in ladder:
            option = Option(type, type.n_bytes(n), scale * errors[type])
            if not found or option.n_bytes > found[-1].n_bytes:
                found.append(option)
        return found

    def _sample(self, info: TensorInfo) -> np.ndarray:
        """Some rows of a matrix, f32 [n_row, n]."""
        n, row = info.shape[0], info.type.n_bytes(info.shape[0])
        data = self._file.data(info.name).reshape(-1, row)
        at = np.unique(np.linspace(0, len(data) - 1, SAMPLE).astype(np.int64))
        values = dequantize(data[at].reshape(-1), info.type, (n, len(at)))
        return np.ascontiguousarray(values)

    def _error(self, values: np.ndarray, type: GGMLType, importance: np.ndarray | None) -> float:
        """The mean squared error of rows, weighted by the importance of columns."""
        rows = self._encoder.encoded(values, type, importance)
        shape = (values.shape[1], values.shape[0])
        errors = (dequantize(rows, type, shape) - values).astype(np.float64) ** 2
        return float((errors * (1.0 if importance is None else importance)).mean())

    def _importance(self, info: TensorInfo) -> np.ndarray | None:
        """The importance of columns, of experts' matrices the mean."""
        weights = self._weights.get(info.name)
        return None if weights is None else np.ascontiguousarray(weights.mean(0), np.float32)

    def _encoded(self, info: TensorInfo, type: GGMLType) -> QTensor:
        parts = self._encoder.parts(self._file, info, type, self._weights.get(info.name))
        n_row = int(np.prod(info.shape[1:], dtype=np.int64))
        n_matrix = int(np.prod(info.shape[2:], dtype=np.int64))
        data = np.concatenate([part.reshape(-1) for part in parts])
        return QTensor(data, type.name, n_row, info.shape[0], n_matrix)

    def _kl(self, changed: Mapping[str, QTensor]) -> float:
        found = _log_probabilities(self._logits(changed))
        return float((np.exp(self._base) * (self._base - found)).sum(-1).mean())

    def _logits(self, changed: Mapping[str, QTensor]) -> np.ndarray:
        with with_tensors(self._engine, changed, len(self._ids)) as session:
            return np.concatenate([part.copy() for part in session.logits(self._ids)])


def _ladder(info: TensorInfo) -> tuple[GGMLType, ...]:
    return LADDER if info.shape[0] % 256 == 0 else NARROW


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    """float64 [n_row, n_vocab]."""
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    found: np.ndarray = x - np.log(np.exp(x).sum(-1, keepdims=True))
    return found
