"""Compile kernels to PTX with Numba-CUDA; no GPU and no driver is needed.

A worker of the kernel library calls `main`: see jit_kernels/compile/worker.py.
"""

import importlib
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llvmlite import ir
from numba import cuda, int32, types
from numba.cuda import dispatcher
from numba.cuda.extending import intrinsic

from tamis.jit_kernels.common.view import opened
from tamis.jit_kernels.compile.worker import serve
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.op import EACH, PARAMETERS, Op, module_of
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cuda.lang.grid import THREADS, Launch, thread
from tamis.jit_kernels.cuda.lang.intrinsic import (
    FLOAT,
    I64,
    const_i64,
    device,
    load_constant,
    quotient,
)
from tamis.jit_kernels.cuda.lang.ptx import let_next_start, wait_for_kernel
from tamis.jit_kernels.cuda.lang.target import TARGETS, Target, use


def launches(spec: KernelSpec) -> list[Launch]:
    """The kernels of an op. Raises TypeError if one does not take the op's record."""
    module = importlib.import_module(module_of("cuda", spec.op))
    found = getattr(module, spec.op.name.removeprefix(EACH))(**constants_of(spec))
    if not isinstance(found, list):  # a kernel of both backends: threads are its workers
        found = [of_workers(found)]
    for launch in found:
        names = list(inspect.signature(launch.kernel).parameters)
        names = names[:-1] if launch.hands_on else names
        if names != PARAMETERS:
            raise TypeError(f"kernel {spec.op.name} takes {names}, the contract says {PARAMETERS}")
    return found


def constants_of(spec: KernelSpec) -> dict[str, int | str]:
    """The values of an op's constants by name."""
    return dict(zip(spec.op.constants, spec.constants, strict=True))


def of_workers(kernel: Any) -> Launch:
    """The launch of a kernel of common/, whose workers are threads."""
    body = device(kernel)

    def each_thread(tid, n_thread, a):
        body(tid * THREADS + thread(), n_thread * THREADS, a)

    return Launch(each_thread, blocks=4)


def viewing(op: Op, constants: dict[str, int | str]) -> Any:
    """The function that replaces typed arrays of an op's record by Views."""
    plain = record_type(op)
    record, views = opened(op, constants, plain)

    def view(_typing_context, _given):
        def codegen(context, b, sig, values):
            fields = [b.extract_value(values[0], i) for i in range(len(plain.types))]
            return context.make_tuple(b, sig.return_type, views(b, fields))

        return record(plain), codegen

    return intrinsic(view)


def reading(op: Op) -> Any:
    """The function (address) -> the op's record stored there, in the form of EachRow."""
    kind = record_type(op)

    def read(_typing_context, _address):
        def codegen(context, b, _signature, values):
            found = []
            for i, type in enumerate(kind.types):
                at = b.add(values[0], ir.Constant(I64, 8 * i))
                found.append(load_constant(b, at, FLOAT if type == types.float32 else I64, 8))
            return context.make_tuple(b, kind, found)

        return kind(types.int64), codegen

    return intrinsic(read)


def record_type(op: Op) -> Any:
    """Numba's type of an op's record."""
    fields = [types.float32 if name in op.floats else types.int64 for name in op.fields]
    return types.BaseTuple.from_types(fields, op.values)


@device
def of_all(given, block, n_block):
    """The record of a launch, the block's number, the number of blocks, and whether it has work."""
    return given, block, n_block, True


def of_one(op: Op, cluster: int) -> Any:
    """The function of_all for rows of a batch, which gives a block its row's record.

    It gives the first record if the block has no row. A row has whole clusters.
    """
    read = reading(ops.declared()[op.name.removeprefix(EACH)])

    @device
    def of(rows, block, n_block):
        # The first blocks of all rows come first: in a launch with more blocks than fit the GPU at
        # a time, those without work wait, not those with it. A cluster stays whole.
        unit = quotient(block, cluster)
        nth = quotient(unit, rows.n_slot)
        row = unit - rows.n_slot * nth
        tid = nth * cluster + block - unit * cluster
        share = quotient(n_block, rows.n_slot * cluster) * cluster
        live = row < const_i64(rows.n_row) and tid < share
        at = rows.records + rows.stride * (row if live else 0)
        return read(at), int32(tid), int32(share), live

    return of


def kernel_ptx(spec: KernelSpec, launch: Launch, name: str, target: Target) -> str:
    """The PTX of one kernel, whose entry is `name`.

    Its parameters are the fields of its op, then whether it may run concurrently with the kernel
    before it. For an op over the rows of a batch, each row has equally many blocks.
    """
    body, overlaps = device(launch.kernel), target.overlaps
    starts, hands_on = launch.start is not None, launch.hands_on
    start: Any = device(launch.start) if starts else None
    own = ops.declared()[spec.op.name.removeprefix(EACH)]
    opened_record = viewing(own, constants_of(spec))
    of = of_one(spec.op, launch.cluster) if spec.op.name.startswith(EACH) else of_all

    def entry(given, beside):
        plain, tid, n_thread, live = of(given, cuda.blockIdx.x, cuda.gridDim.x)
        record = opened_record(plain)
        handed = None
        if starts:
            handed = start(tid, n_thread, record)
        if overlaps:
            # When this kernel starts, all blocks of the one before it have waited for its
            # predecessor: running concurrently, it misses nothing.
            if beside == 0:
                wait_for_kernel()
            let_next_start()
        if live:
            if hands_on:
                body(tid, n_thread, record, handed)
            else:
                body(tid, n_thread, record)
        if overlaps and beside != 0:
            wait_for_kernel()  # a kernel that waits for this one also waits for the concurrent one

    # Numba asks the current GPU what to compile an entry's callees for.
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=target.capability)
    ptx, _ = cuda.compile(
        entry, (record_type(spec.op), types.int64), cc=target.capability, output="ptx",
        device=False, abi="numba", launch_bounds=(launch.threads, launch.blocks),
    )  # fmt: skip
    return _retargeted(ptx if isinstance(ptx, str) else ptx.decode(), name, target)


def _retargeted(ptx: str, name: str, target: Target) -> str:
    """The text with our own entry name, target and version, without Numba's unused variables."""
    (mangled,) = re.findall(r"\.visible \.entry (\w+)\(", ptx)
    ptx = ptx[ptx.index(".version") :].replace(mangled, name)
    ptx = re.sub(r"\.version \S+", f".version {target.ptx}", ptx, count=1)
    ptx = re.sub(r"\.target \S+", f".target {target.name}", ptx, count=1)
    return re.sub(r"^(?:\.common )?\.global [^\n]*NumbaEnv[^\n]*\n", "", ptx, flags=re.MULTILINE)


def compile_kernel(spec: KernelSpec, target: Target) -> bytes:
    """The launches of an op in the form of the kernel library: ptx_library.py reads them."""
    use(target)
    found = []
    for i, launch in enumerate(launches(spec)):
        name = f"{spec.symbol}_{i}"
        found.append(
            {
                "name": name,
                "ptx": kernel_ptx(spec, launch, name, target),
                "threads": launch.threads,
                "blocks": launch.blocks,
                "shared": launch.shared,
                "rows": launch.rows,
                "cluster": launch.cluster,
            }
        )
    return json.dumps(found).encode()


def main(folder: str, name: str) -> None:
    """Serve as a worker whose kernels are for a target."""
    target = TARGETS[name]
    serve(Path(folder), lambda spec: compile_kernel(spec, target))
