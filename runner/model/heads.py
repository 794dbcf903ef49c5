"""Embeddings of whole texts from their rows: pooling, a projection, or a classification head."""

from dataclasses import dataclass

import numpy as np

from tamis.formats.dequant import dequantize
from tamis.formats.gguf import GGUFFile
from tamis.formats.strings import Strings

# By the numbers of files and of llama.h.
POOLINGS = ("none", "mean", "cls", "last", "rank")


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix f32 [n_out, n_in] and a bias f32 [n_out]."""

    w: np.ndarray
    bias: np.ndarray | None = None

    def of(self, x: np.ndarray) -> np.ndarray:
        """The product with x f32 [..., n_in]."""
        y = x @ self.w.T
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True, slots=True)
class Heads:
    """The parts of a file for embeddings and for ranking."""

    arch: str
    pooling: str | None  # one of POOLINGS; None: the file names none
    classifies: str  # the row that is classified: "mean", "cls" or "last"
    cls: Projection | None
    cls_norm: np.ndarray | None
    out: Projection | None
    labels: tuple[str, ...]  # the labels of `out`'s elements
    dense: tuple[Projection, ...]  # the projections of embeddings, in order
    eps: float

    @property
    def ranks(self) -> bool:
        """Whether there is a classification head."""
        return self.cls is not None or self.out is not None

    @property
    def pooling_or_mean(self) -> str:
        """The file's pooling; "mean" if it has none."""
        return self.pooling if self.pooling not in (None, "none") else "mean"

    def numbered(self, number: int) -> str:
        """The pooling of llama.h's number; -1: the file's, or "none". Raises ValueError."""
        if number == -1:
            return self.pooling or "none"
        if number not in range(len(POOLINGS)):
            most = len(POOLINGS) - 1
            raise ValueError(f"pooling_type is {number!r}, expected -1 to {most}")
        self.check(POOLINGS[number])
        return POOLINGS[number]

    def check(self, pooling: str) -> None:
        """Raise ValueError for an unknown pooling, or one that this model does not support."""
        if pooling not in POOLINGS:
            raise ValueError(f"pooling is {pooling!r}, expected one of {', '.join(POOLINGS)}")
        if pooling == "rank" and not self.ranks:
            raise ValueError("this model has no head that ranks: its file has no cls tensors")

    def pooled(self, rows: np.ndarray, pooling: str) -> np.ndarray:
        """The embedding of a text from its rows f32 [n_tok, n_embd].

        "mean", "cls" (the first), "last": f32 [n_embd]; "none": the rows; "rank": a score for each
        label, f32 [n_label]. Embeddings are projected if the file has projections. Raises
        ValueError.
        """
        self.check(pooling)
        if pooling == "rank":
            return self._ranked(rows)
        found = rows if pooling == "none" else _one(rows, pooling)
        for projection in self.dense:
            found = projection.of(found)
        return found

    def _ranked(self, rows: np.ndarray) -> np.ndarray:
        """The scores of a text's labels: see llama.h's LLAMA_POOLING_TYPE_RANK."""
        found = _one(rows, self.classifies)
        if self.cls is not None:
            found = self.cls.of(found)
            found = _gelu(found) if self.arch == "modern-bert" else np.tanh(found)
            if self.cls_norm is not None:
                centred = found - found.mean()
                found = centred / np.sqrt(np.square(centred).mean() + self.eps) * self.cls_norm
        if self.out is not None:
            found = self.out.of(found)
        if self.arch in ("qwen3", "qwen3vl"):
            found = np.exp(found - found.max())
            found /= found.sum()
        return found.astype(np.float32)


def _one(rows: np.ndarray, pooling: str) -> np.ndarray:
    if pooling == "mean":
        return rows.mean(axis=0, dtype=np.float64).astype(np.float32)
    return rows[0 if pooling == "cls" else -1]


def _gelu(x: np.ndarray) -> np.ndarray:
    """GELU in its tanh form."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def load_heads(file: GGUFFile, n_embd: int, *, is_encoder: bool) -> Heads:
    """Read and check them. Raises GGUFError."""
    arch = file.get("general.architecture", str)
    pooling = _pooling(file, f"{arch}.pooling_type")
    classifies = _pooling(file, f"{arch}.classifier.pooling_type")
    if classifies is None and arch == "modern-bert":
        classifies = "mean"
    labels = file.metadata.get(f"{arch}.classifier.output_labels", ())
    if not isinstance(labels, Strings | tuple):
        raise file.error("is no list of texts", key=f"{arch}.classifier.output_labels")
    dense = _projection(file, "dense_2", n_embd)
    last = _projection(file, "dense_3", n_embd if dense is None else len(dense.w))
    found = Heads(
        arch=arch,
        pooling=pooling,
        classifies=classifies if classifies == "mean" else "cls" if is_encoder else "last",
        cls=_projection(file, "cls", n_embd),
        cls_norm=_vector(file, "cls.norm.weight", n_embd),
        out=_projection(file, "cls.output", n_embd),
        labels=tuple(labels),
        dense=tuple(each for each in (dense, last) if each is not None),
        eps=float(file.metadata.get(f"{arch}.attention.layer_norm_epsilon", 1e-5)),
    )
    if found.out is not None and found.labels and len(found.out.w) != len(found.labels):
        what = f"has {len(found.out.w)} rows, there are {len(found.labels)} labels"
        raise file.error(what, key="cls.output.weight")
    return found


def _pooling(file: GGUFFile, key: str) -> str | None:
    value = file.metadata.get(key)
    if value is None or value in (-1, 0xFFFFFFFF):
        return None
    if not isinstance(value, int) or not 0 <= value < len(POOLINGS):
        raise file.error(f"is {value!r}, expected 0 to {len(POOLINGS) - 1}", key=key)
    return POOLINGS[value]


def _projection(file: GGUFFile, name: str, n_in: int) -> Projection | None:
    whole = f"{name}.weight"
    if whole not in file.tensors:
        return None
    info = file.tensors[whole]
    if not 1 <= len(info.shape) <= 2 or info.shape[0] != n_in:
        raise file.error(f"has shape {info.shape}, expected ({n_in}, any)", key=whole)
    w = dequantize(file.data(whole), info.type, info.shape)
    w = np.ascontiguousarray(w, np.float32).reshape(-1, n_in)
    return Projection(w, _vector(file, f"{name}.bias", len(w)))


def _vector(file: GGUFFile, name: str, n: int) -> np.ndarray | None:
    if name not in file.tensors:
        return None
    info = file.tensors[name]
    if int(np.prod(info.shape)) != n:
        raise file.error(f"has shape {info.shape}, expected ({n},)", key=name)
    return np.asarray(dequantize(file.data(name), info.type, info.shape), np.float32).reshape(n)
