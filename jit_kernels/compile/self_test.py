"""Self-test: whether the kernels that every model runs compute correct results on this machine.

These are products, attention, RoPE and the KV append, norms, gates, embedding and the selection of
logits. A kernel is run once, on one thread, over numbers drawn from a fixed seed, and compared with
NumPy in float64: when it is mapped for the first time here, whether it was shipped or compiled.
Other kernels have only their digest. The code that passed is noted in the user's folder.
"""

import contextlib
import ctypes
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tamis.formats.dequant import dequantize
from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.layout import TURNS
from tamis.jit_kernels.contract.op import STEP_SIZE
from tamis.jit_kernels.contract.program import KernelSpec, Program
from tamis.jit_kernels.contract.types import KV_BLOCK, PAGE, kv_row, zeros
from tamis.platform.private_files import open_private, private_folder, write_whole

NOTED = "checked"  # the file, one digest per line
MOST = 0.01  # the largest error relative to the largest value: 15-bit activations give 0.0003
_ENTRY = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
Address = Callable[[KernelSpec], int | None]
_Found = tuple[np.ndarray, np.ndarray]  # a kernel's result, and the expected one


def passes(spec: KernelSpec, address: Address) -> bool | None:
    """Whether a kernel gives the expected result; address(spec): of a mapped kernel.

    None if it needs others that are not mapped, as a product needs its packed rows. True for a
    kernel without a test.
    """
    check = _CHECKS.get(spec.op)
    if check is None:
        return True
    if (found := check(spec, address)) is None:
        return None
    value, expected = found
    with np.errstate(invalid="ignore"):
        error = np.abs(value - expected).max()
    return bool(error <= MOST * np.abs(expected).max())  # False for NaN


class Checked:
    """The digests of code that has passed on this machine, in a file of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, set[str]()
        # Otherwise nothing has passed yet, or nothing can be stored here.
        with contextlib.suppress(OSError), open_private(folder / NOTED) as file:
            self._known = set(file.read().decode("ascii", "replace").split())

    def __contains__(self, code: bytes) -> bool:
        return _digest(code) in self._known

    def note(self, code: Iterable[bytes]) -> None:
        """Store that these have passed, if the folder is writable."""
        self._known |= {_digest(data) for data in code}
        with contextlib.suppress(OSError):  # they are tested again at the next start
            folder = private_folder(self._folder)
            with write_whole(folder / NOTED, durable=False) as file:
                file.write("\n".join(sorted(self._known)).encode())


def _digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()[:32]


def _run(spec: KernelSpec, address: Address, **fields: Any) -> bool:
    """Call a kernel on one thread; returns False if it is not mapped."""
    at = address(spec)
    if at is None:
        return False
    program = Program()
    program.add(spec.op, spec.constants, **fields)
    (call,), head = program.calls, TURNS // 8
    record = np.zeros(head + len(call.values), np.int64)
    for i, (name, value) in enumerate(zip(spec.op.fields, call.values, strict=True), head):
        view = record[i : i + 1]
        (view.view(np.float64) if name in spec.op.floats else view)[0] = value
    _ENTRY(at)(0, 1, record.ctypes.data)
    return True


def _step(n_tok: int, pos: int = 0) -> np.ndarray:
    return np.array([n_tok, pos, 0, pos, pos + n_tok, 0], np.int64)[:STEP_SIZE]


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def _weights(type: str, n_out: int, n_in: int) -> tuple[np.ndarray, np.ndarray]:
    """Encoded rows and their values in float64: any two of these bytes are a small float16."""
    kind = GGMLType[type]
    data = np.random.default_rng(8).integers(0x2C, 0x34, kind.n_bytes(n_out * n_in), np.uint8)
    if type in ("F32", "BF16"):  # 0x3E2F.... is 0.17
        data = data.reshape(-1, 4 if type == "F32" else 2)
        data[:, -1] = 0x3E
        data = data.reshape(-1)
    return data, dequantize(data, kind, (n_in, n_out)).astype(np.float64)


def _gate(spec: KernelSpec, address: Address) -> _Found:
    gate, up = _normal(2, 40)
    y, x = np.zeros(40, np.float32), gate.astype(np.float64)
    _run(spec, address, step=_step(1), gate=gate, up=up, y=y, n=40)
    inner = 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3) if spec.constants == ("gelu",) else x
    return y, x / (1 + np.exp(-inner)) * up


def _rms_norm(spec: KernelSpec, address: Address) -> _Found:
    (x, w), y = _normal(2, 96), np.zeros(96, np.float32)
    _run(
        spec,
        address,
        step=_step(1),
        x=x,
        w=w,
        y=y,
        n=96,
        rows_per_tok=1,
        x_stride=96,
        y_stride=96,
        eps=1e-6,
    )
    wide = x.astype(np.float64)
    return y, wide / np.sqrt(np.square(wide).mean() + 1e-6) * w


def _embed(spec: KernelSpec, address: Address) -> _Found:
    table, rows = _weights(spec.constants[0], 3, 256)  # type: ignore[arg-type]
    ids, y = np.array([2, 0], np.int32), np.zeros((2, 256), np.float32)
    _run(spec, address, step=_step(2), ids=ids, table=table, y=y, n=256, n_id=1, scale=2.0)
    return y, 2 * rows[ids]


def _matmul(spec: KernelSpec, address: Address) -> _Found | None:
    """The results for one row, and for more than are multiplied without unpacking the weights."""
    name, n_in, n_out, many = str(spec.constants[0]), 256, 32, ops.FEW_ROWS + 3
    type = ops.STRIP_TYPES.get(name, name)
    data, w = _weights(type, n_out, n_in)
    if type != name:
        strips = zeros(ops.strip_bytes(type, n_out, n_in), np.uint8)
        repack = KernelSpec(ops.REPACK, (type,))
        if not _run(repack, address, w=data, strips=strips, n_in=n_in, n_out=n_out):
            return None
        data = strips
    pack = KernelSpec(ops.PACK_ROWS, (ops.packed_form(name), "rows"))
    x, scratch = _normal(many, n_in), zeros(ops.matmul_scratch(n_in), np.uint8)
    y = np.zeros((1 + many, n_out), np.float32)
    for rows, out in ((x[:1], y[:1]), (x, y[1:])):
        packed = zeros(ops.packed_bytes(many, n_in), np.uint8)
        same = {"step": _step(len(rows)), "packed": packed, "scratch": scratch}
        if not _run(pack, address, x=rows, other=None, n=n_in, eps=0.0, **same):
            return None
        _run(
            spec, address, w=data, bias=None, y=out, n_in=n_in, n_out=n_out, y_stride=n_out,
            add=0, **same,
        )  # fmt: skip
    return y, np.concatenate([x[:1], x]) @ w.T


def _pages(type: str, head_dim: int) -> np.ndarray:
    """A page of one head's keys or values, all zeros."""
    # An array of float16 rows is two-dimensional.
    return (
        zeros((PAGE, head_dim), np.float16)
        if type == "f16"
        else zeros(PAGE, kv_row(type, head_dim))
    )


def _values(rows: np.ndarray, type: str) -> np.ndarray:
    """The values of a page's rows, float64 [PAGE, head_dim]."""
    if type == "f16":
        return rows.astype(np.float64)
    if type == "q8_0":
        q = rows["q"].astype(np.float64)
    else:
        pairs = rows["q"].reshape(PAGE, -1, KV_BLOCK // 2)
        q = np.concatenate([pairs & 15, pairs >> 4], axis=2).reshape(PAGE, -1) - 8.0
    return q * np.repeat(rows["d"].astype(np.float64), KV_BLOCK, axis=1)


def _kept(x: np.ndarray, type: str) -> np.ndarray:
    """A row as read back from a page after ROPE_APPEND: rounded to the KV type."""
    if type == "f16":
        return x.astype(np.float16)
    blocks = x.reshape(-1, KV_BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    if type == "q8_0":
        d = np.abs(largest) / 127
        return (np.round(blocks / d) * d).reshape(-1)
    d = largest / -8
    return ((np.minimum(np.floor(blocks / d + 8.5), 15) - 8) * d).reshape(-1)


def _drawn_page(type: str, head_dim: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A random page of one head's keys or values, and its values in float64 [PAGE, head_dim]."""
    rng, rows = np.random.default_rng(seed), _pages(type, head_dim)
    if type == "f16":
        rows[...] = rng.standard_normal(rows.shape)
        return rows, _values(rows, type)
    rows["d"] = rng.uniform(0.005, 0.01, rows["d"].shape) * (1 if type == "q8_0" else 20)
    low, high = (-127, 128) if type == "q8_0" else (0, 256)
    rows["q"] = rng.integers(low, high, rows["q"].shape)
    return rows, _values(rows, type)


def _attend(spec: KernelSpec, address: Address) -> _Found:
    head_dim, group, n_tok, type_k, type_v = (*spec.constants,)
    assert isinstance(head_dim, int)
    assert isinstance(group, int)
    assert isinstance(n_tok, int)
    (k, keys), (v, values) = (
        _drawn_page(str(type), head_dim, seed) for seed, type in enumerate((type_k, type_v), 1)
    )
    q, pos, block, table = _normal(n_tok, group, head_dim), 40, 16, np.zeros(1, np.int32)
    out = np.zeros_like(q)
    _run(
        spec, address, step=_step(n_tok, pos), q=q, k_pages=k, v_pages=v, k_table=table,
        v_table=table, indptr=np.array([0, 4], np.int32), indices=np.arange(4, dtype=np.int32),
        log_weight=None, block=block, n_row=1, heads_per_kv=group, n_head_kv=1, window=0, n_split=1,
        stride=1, partial=None, out=out, lse=None, scale=head_dim**-0.5,
        scratch=zeros(ops.attend_scratch(group, head_dim), np.uint8),
    )  # fmt: skip
    scores = q.astype(np.float64) @ keys.T * head_dim**-0.5
    seen = np.arange(PAGE)[None, None] <= pos + np.arange(n_tok)[:, None, None]
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    return out, weights / weights.sum(axis=2, keepdims=True) @ values


def _turned(x: np.ndarray, angle: np.ndarray, neox: bool) -> np.ndarray:
    """Heads rotated by angles [n_half], in float64: pairs (i, i + n_half) if neox."""
    first = np.arange(len(angle)) * (1 if neox else 2)
    a, b = first, first + (len(angle) if neox else 1)
    y, cos, sin = x.astype(np.float64), np.cos(angle), np.sin(angle)
    y[..., a], y[..., b] = (
        y[..., a] * cos - y[..., b] * sin,
        y[..., a] * sin + y[..., b] * cos,
    )
    return y


def _normed(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + eps) * w


def _angles(head_dim: int) -> tuple[np.ndarray, dict[str, Any]]:
    """The angles of one position, and the fields of an op that reads them."""
    angle = np.linspace(0.1, 3, head_dim // 2)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return angle, {"cos": cos, "sin": sin, "n_half": len(angle)}


def _rope_table(spec: KernelSpec, address: Address) -> _Found:
    inv_freq = 10000.0 ** -np.linspace(0, 0.9, 20)
    out = np.zeros((2, 3, 20), np.float32)
    _run(
        spec, address, step=_step(3, 1000), inv_freq=inv_freq, cos=out[0], sin=out[1], n_half=20,
        scale=1.5,
    )  # fmt: skip
    angles = np.arange(1000, 1003)[:, None] * inv_freq
    return out, 1.5 * np.stack([np.cos(angles), np.sin(angles)])


def _rope_heads(spec: KernelSpec, address: Address) -> _Found:
    head_dim, neox, order = spec.constants
    assert isinstance(head_dim, int)
    angle, fields = _angles(head_dim)
    x, w = _normal(1, 2, head_dim), _normal(head_dim)
    y = x.copy()
    _run(spec, address, step=_step(1), x=y, norm=w, n_head=2, norm_step=0, eps=1e-6, **fields)
    if order == "norm":
        return y, _turned(_normed(x, w, 1e-6), angle, bool(neox))
    return y, _normed(_turned(x, angle, bool(neox)), w, 1e-6)


def _rope_append(spec: KernelSpec, address: Address) -> _Found:
    """The pages' content after two query heads and one KV head at position 5."""
    head_dim, neox, *types = spec.constants
    assert isinstance(head_dim, int)
    angle, fields = _angles(head_dim)
    x, w = _normal(4, head_dim), np.abs(_normal(head_dim))
    heads, table = x.copy(), np.zeros(1, np.int32)
    pages = [_pages(str(type), head_dim) for type in types]
    _run(
        spec, address, step=_step(1, 5), q=heads[:2], k=heads[2], v=heads[3], q_norm=w, k_norm=w,
        k_pages=pages[0], v_pages=pages[1], k_table=table, v_table=table, n_head=2, n_head_kv=1,
        eps=1e-6, **fields,
    )  # fmt: skip
    expected = [*_turned(_normed(x[:3], w, 1e-6), angle, bool(neox)), x[3].astype(np.float64)]
    found = [_values(page, str(type))[5] for page, type in zip(pages, types, strict=True)]
    kept = [_kept(row, str(type)) for row, type in zip(expected[2:], types, strict=True)]
    return np.concatenate([*heads[:2], *found]), np.concatenate([*expected[:2], *kept])


def _logit_parts(spec: KernelSpec, address: Address) -> _Found:
    """The best of two parts in order, by ids and by values, and the sums."""
    logits, n_best = _normal(2, 50), 4
    ids, values = np.zeros((2, n_best), np.int32), np.zeros((2, n_best), np.float32)
    sums = np.zeros((2, 2), np.float32)
    _run(
        spec, address, logits=logits, ids=ids, values=values, sums=sums, n_vocab=100,
        n_best=n_best, n_part=2,
    )  # fmt: skip
    wide, named = logits.astype(np.float64), logits.reshape(-1)[np.clip(ids, 0, 99)]
    best, top = np.sort(wide)[:, -n_best:], wide.max(axis=1, keepdims=True)
    total = np.exp(wide - top).sum(axis=1, keepdims=True)
    found = [np.sort(named), np.sort(values), sums[:, :1], np.log(sums[:, 1:])]
    return np.hstack(found), np.hstack([best, best, top, np.log(total)])


def _logit_best(spec: KernelSpec, address: Address) -> _Found:
    values, ids = _normal(2, 4), np.arange(10, 18, dtype=np.int32)
    sums = np.array([[3, 2], [4, 5]], np.float32)
    best, order = np.zeros((2, 4), np.float32), np.argsort(-values, axis=None)[:4]
    best_ids, total = np.zeros(4, np.int32), np.zeros(2, np.float32)
    _run(
        spec, address, ids=ids, values=values, sums=sums, best_ids=best_ids, best_values=best[0],
        total=total, n_best=4, n_part=2,
    )  # fmt: skip
    best[1] = values.reshape(-1)[np.clip(best_ids - 10, 0, 7)]
    expected = np.tile(values.reshape(-1)[order].astype(np.float64), 2)
    return np.hstack([*best, total]), np.hstack([expected, 4, 5 + 2 * np.exp(-1)])


_CHECKS: dict[ops.Op, Callable[[KernelSpec, Address], _Found | None]] = {
    ops.GATE: _gate,
    ops.RMS_NORM: _rms_norm,
    ops.EMBED: _embed,
    ops.MATMUL: _matmul,
    ops.ATTEND: _attend,
    ops.ROPE_TABLE: _rope_table,
    ops.ROPE_HEADS: _rope_heads,
    ops.ROPE_APPEND: _rope_append,
    ops.LOGIT_PARTS: _logit_parts,
    ops.LOGIT_BEST: _logit_best,
}
