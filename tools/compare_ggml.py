"""Compare matrix-vector products with ggml's: every weight type, alternating runs in one process.

    python -m tamis.tools.compare_ggml [--types Q4_1,Q8_0] [-t 2] [--rounds 7] [--log FILE]

It needs the package llama-cpp-python, see compare_llamacpp.py; its ggml libraries are called
directly. Both multiply the same matrix, larger than the caches, with the same vector: tamis in the
layout that an engine makes at load, ggml in its plain one; ggml's repacking is not measured. A row
is GB/s of both (medians), the share of the read bandwidth that tamis reaches, and the ratio of
speeds with minimum and maximum; the last line is JSON.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from tamis.formats.ggml_types import GGMLType
from tamis.jit_kernels.backends import roofline as ceiling
from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import QTensor, zeros
from tamis.model.repack import in_strips

TYPES = "F16,BF16,Q8_0,Q6_K,Q5_K,Q5_1,Q5_0,Q4_K,Q4_1,Q4_0,IQ4_XS,IQ4_NL,MXFP4,Q3_K,Q2_K"
N_IN, N_WEIGHT = 2048, 128 << 20
PAUSE = 0.05  # seconds between alternating runs, for the other's threads to fall asleep
N_RUN = 4  # products of a run
WORK = 1 << 30  # bytes of address space; each run of ggml takes some of it


class _InitParams(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def _function(library: Any, name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


class Ggml:
    """The few functions of ggml that a product needs. Raises ImportError without its libraries."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("llama_cpp")
        if spec is None or spec.origin is None:
            raise ImportError("no package llama-cpp-python: pip install llama-cpp-python")
        folder = Path(spec.origin).parent / "lib"
        base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)
        p, i32, i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self.init = _function(base, "ggml_init", p, _InitParams)
        self.free = _function(base, "ggml_free", None, p)
        self.tensor = _function(base, "ggml_new_tensor_2d", p, p, i32, i64, i64)
        self.data = _function(base, "ggml_get_data", p, p)
        self.mul_mat = _function(base, "ggml_mul_mat", p, p, p, p)
        self.new_graph = _function(base, "ggml_new_graph", p, p)
        self.expand = _function(base, "ggml_build_forward_expand", None, p, p)
        self.quantize = _function(
            base, "ggml_quantize_chunk", ctypes.c_size_t, i32, p, p, i64, i64, i64, p
        )
        self.compute = _function(cpu, "ggml_graph_compute_with_ctx", i32, p, p, i32)
        _function(cpu, "ggml_cpu_init", None)()


class GgmlProduct:
    """y = w @ x as a graph of one node."""

    def __init__(self, ggml: Ggml, type_: GGMLType, w: np.ndarray, x: np.ndarray) -> None:
        n_in = len(x)
        n_out = w.nbytes * type_.block_size // type_.type_size // n_in
        self._ggml = ggml
        self._context = ggml.init(_InitParams(w.nbytes + WORK, None, False))
        weights = ggml.tensor(self._context, int(type_), n_in, n_out)
        source = ggml.tensor(self._context, int(GGMLType.F32), n_in, 1)
        ctypes.memmove(ggml.data(weights), w.ctypes.data, w.nbytes)
        ctypes.memmove(ggml.data(source), x.ctypes.data, x.nbytes)
        product = ggml.mul_mat(self._context, weights, source)
        self._graph = ggml.new_graph(self._context)
        ggml.expand(self._graph, product)
        numbers = ctypes.cast(ggml.data(product), ctypes.POINTER(ctypes.c_float))
        self.y = np.ctypeslib.as_array(numbers, (n_out,))

    def run(self, n_threads: int) -> None:
        """Compute y."""
        self._ggml.compute(self._context, self._graph, n_threads)

    def close(self) -> None:
        """Free the matrix; y must not be used afterwards."""
        self._ggml.free(self._context)


def tamis_product(
    backend: CpuBackend, type_: GGMLType, w: np.ndarray, x: np.ndarray
) -> tuple[Any, np.ndarray]:
    """The linked Program of y = w @ x, and y."""
    n_in = len(x)
    n_out = w.nbytes * type_.block_size // type_.type_size // n_in
    copies = in_strips([QTensor(w, type_.name, n_out, n_in)], backend)
    (matrix,) = copies.matrices
    backend.run(backend.link(copies.program))
    y, program, step = zeros(n_out, np.float32), Program(), np.array([1, 0, 0, 0, 0], np.int64)
    packed = zeros(ops.packed_bytes(1, n_in), np.uint8)
    scratch = zeros(backend.n_thread * ops.matmul_scratch(n_in), np.uint8)
    program.add(
        ops.PACK_ROWS,
        (ops.packed_form(type_.name), "rows"),
        step=step,
        x=x,
        other=None,
        packed=packed,
        n=n_in,
        scratch=scratch,
        eps=0.0,
    )
    program.add(
        ops.MATMUL,
        (matrix.type,),
        step=step,
        packed=packed,
        w=matrix.data,
        bias=None,
        y=y,
        n_in=n_in,
        n_out=n_out,
        y_stride=n_out,
        add=0,
        scratch=scratch,
    )
    return backend.link(program), y


def random_weights(ggml: Ggml, type_: GGMLType) -> np.ndarray:
    """uint8: rows of N_IN normal numbers, quantised by ggml; a block of rows over and over."""
    n_row = 256
    rows = np.random.default_rng(0).normal(size=(n_row, N_IN)).astype(np.float32)
    size = N_IN // type_.block_size * type_.type_size
    block = np.empty(n_row * size, np.uint8)
    ggml.quantize(int(type_), rows.ctypes.data, block.ctypes.data, 0, n_row, N_IN, None)
    copies = -(-N_WEIGHT // (N_IN * n_row))
    w = zeros(copies * len(block), np.uint8)
    w.reshape(copies, -1)[:] = block
    return w


def _seconds(run: Any) -> float:
    """Seconds of a product after others, as in a model; the first is not timed."""
    time.sleep(PAUSE)
    run()
    start = time.perf_counter()
    for _ in range(N_RUN):
        run()
    return (time.perf_counter() - start) / N_RUN


def compare(
    ggml: Ggml, backend: CpuBackend, type_: GGMLType, rounds: int, ceil: float
) -> dict[str, Any]:
    """The row of one type."""
    w = random_weights(ggml, type_)
    x = zeros(N_IN, np.float32)
    x[:] = np.random.default_rng(1).normal(size=N_IN)
    linked, y = tamis_product(backend, type_, w, x)
    other = GgmlProduct(ggml, type_, w, x)
    backend.run(linked)
    other.run(backend.n_thread)
    error = float(np.linalg.norm(y - other.y) / np.linalg.norm(y))
    assert error < 0.03, f"{type_.name}: the products differ by {error:.3f}"
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(_seconds(lambda: backend.run(linked)))
        theirs.append(_seconds(lambda: other.run(backend.n_thread)))
    other.close()
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    speed = w.nbytes / statistics.median(ours) / 1e9
    return {
        "type": type_.name,
        "mb": round(w.nbytes / 1e6),
        "tamis_gb_s": round(speed, 1),
        "best_gb_s": round(w.nbytes / min(ours) / 1e9, 1),
        "ggml_gb_s": round(w.nbytes / statistics.median(theirs) / 1e9, 1),
        "of_ceiling": round(speed * 1e9 / ceil, 2),
        "ratio": round(statistics.median(ratios), 2),
        "min": round(min(ratios), 2),
        "max": round(max(ratios), 2),
    }


def main() -> None:
    """Read the arguments, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", default=TYPES)
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--log", help="append the JSON line to this file")
    arguments = parser.parse_args()
    ggml, backend = Ggml(), CpuBackend(arguments.threads)
    rows = []
    for name in arguments.types.split(","):
        # Beside each type: the machine is not the same from minute to minute.
        ceil = ceiling.measure(backend).read_bytes
        row = compare(ggml, backend, GGMLType[name], arguments.rounds, ceil)
        row["ceiling_gb_s"] = round(ceil / 1e9, 1)
        rows.append(row)
        print(
            f"{name:7} {row['mb']:4} MB  tamis {row['tamis_gb_s']:5} GB/s (best {row['best_gb_s']})"
            f" = {row['of_ceiling']:.0%} of {row['ceiling_gb_s']}   ggml {row['ggml_gb_s']:5}"
            f"   ratio {row['ratio']} ({row['min']} to {row['max']})",
            flush=True,
        )
    line = json.dumps({"tool": "compare_ggml", "threads": arguments.threads, "rows": rows})
    print(line)
    if arguments.log:
        with Path(arguments.log).open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
