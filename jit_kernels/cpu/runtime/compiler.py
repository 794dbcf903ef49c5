"""Compile kernels to object code: Numba down to LLVM IR, one C entry, everything else private.

A worker of the kernel library calls `main`: see jit_kernels/compile/worker.py.
"""

import importlib
import inspect
import re
from pathlib import Path
from types import NoneType
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from numba import njit, types
from numba._dynfunc import make_function
from numba.core import codegen, config, cpu
from numba.core.dispatcher import Dispatcher

from tamis.jit_kernels.compile.worker import serve
from tamis.jit_kernels.contract.layout import TURNS
from tamis.jit_kernels.contract.op import COMMON, PARAMETERS, WORKERS, Op, module_of
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cpu.lang import features
from tamis.jit_kernels.cpu.lang.intrinsic import struct_reader

_HEADER = re.compile(r"^target (?:triple|datalayout) = .*\n", re.MULTILINE)
ENTRY = types.void(types.int64, types.int64, types.int64)
# Sums may be reordered, so that they vectorise; infinities and NaN keep their meaning.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
OPTIONS: dict[str, Any] = {
    "error_model": "numpy",
    "nogil": True,
    "boundscheck": False,
    "fastmath": FASTMATH,
}


def _entry(op: Op, constants: dict[str, int | str]) -> Any:
    """The entry void(int64, int64, int64) of a kernel; checks the kernel against the contract."""
    module = importlib.import_module(module_of("cpu", op))
    function = getattr(module, op.name)(**constants)
    if not op.fields:
        return function
    found = list(inspect.signature(function).parameters)
    shares = found[2:3] == ["turns"]  # see cpu/lang/work_sharing.py
    expected = WORKERS if op.file.startswith(COMMON) else PARAMETERS
    if found[:2] + found[2 + shares :] != expected:
        raise TypeError(f"kernel {op.name} takes {found}, the contract says {expected}")
    kernel, record = njit(**OPTIONS)(function), struct_reader(op, constants)

    def entry(tid, n_thread, args):
        kernel(tid, n_thread, record(args + TURNS))

    def entry_with_turns(tid, n_thread, args):
        kernel(tid, n_thread, args, record(args + TURNS))

    return entry_with_turns if shares else entry


def _private(module: Any, symbol: str, native: str) -> None:
    """Give the module one public function, `symbol`, that calls the native one."""
    wrapper = llvm.parse_assembly(f"""
        declare i32 @"{native}"(ptr, ptr, i64, i64, i64)
        define void @{symbol}(i64 %a, i64 %b, i64 %c) {{
          %result = alloca ptr
          %exception = alloca ptr
          %status = call i32 @"{native}"(ptr %result, ptr %exception, i64 %a, i64 %b, i64 %c)
          ret void
        }}""")
    module.link_in(wrapper)
    own = [f for f in module.functions if not f.is_declaration and f.name != symbol]
    own += [v for v in module.global_variables if not v.is_declaration]
    for i, value in enumerate(own):
        # Numba's names count what this process compiled before; object code must not depend on it.
        value.linkage, value.name = "internal", f"own.{i}"


def compile_kernel(spec: KernelSpec) -> bytes:
    """Object code of one kernel at `features.current()`; `spec.symbol` is its only public name."""
    machine = target_machine()
    return machine.emit_object(optimised(spec, machine))


def optimised(spec: KernelSpec, machine: Any) -> Any:
    """The LLVM module of one kernel, ready to be emitted for `machine`.

    Numba must run at optimisation level 0 (NUMBA_OPT). Above it, Numba emits each called function
    before it links it to its caller, and LLVM's code generator leaves addresses in that function
    that are `getelementptr null, integer`; the caller's passes then delete every load and store
    through them as undefined. All optimisation happens here, once, on the whole kernel.
    Raises TypeError where the kernel does not take the op's record.
    """
    level = vars(config)["OPT"]
    assert level == 0, f"NUMBA_OPT is {level}, must be 0"
    constants = dict(zip(spec.op.constants, spec.constants, strict=True))
    dispatcher = njit(ENTRY, **OPTIONS)(_entry(spec.op, constants))
    compiled: Any = dispatcher.overloads[ENTRY.args]
    module = retargeted(dispatcher.inspect_llvm(ENTRY.args), machine)
    _private(module, spec.symbol, compiled.fndesc.llvm_func_name)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
    builder.getModulePassManager().run(module, builder)
    return module


def retargeted(text: str, machine: Any) -> Any:
    """A module of LLVM IR that Numba made for this machine, retargeted to `machine`.

    Nothing else in it is specific to this machine: types, calls and record layouts are the same on
    both.
    """
    head = f'target triple = "{machine.triple}"\ntarget datalayout = "{machine.target_data}"\n'
    return llvm.parse_assembly(head + _HEADER.sub("", text))


def target_machine() -> Any:
    """The machine that object code of this process's level is made for: see features.target."""
    target = features.target(features.current())
    for initialize in (
        (llvm.initialize_all_targets, llvm.initialize_all_asmprinters)
        if target.triple
        else (llvm.initialize_native_target, llvm.initialize_native_asmprinter)
    ):
        initialize()
    triple = target.triple or llvm.get_default_triple()
    return llvm.Target.from_triple(triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, reloc="pic", codemodel="small"
    )


def share_functions() -> None:
    """Make `njit` return one dispatcher for equal functions; for compile workers.

    A kernel's builder makes its functions anew for each value of its constants. Those of the same
    code over the same values are typed and lowered once a process. Kernel modules import `njit` by
    name: this must be called before.
    """
    shared, njit_anew = dict[Any, Any](), numba.njit

    def njit(function: Any = None, /, **options: Any) -> Any:
        if function is None:
            return lambda f: njit(f, **options)
        if not inspect.isfunction(function) or (key := _made_of(function)) is None:
            return njit_anew(function, **options)
        key = key, repr(sorted(options.items()))
        if key not in shared:
            shared[key] = njit_anew(function, **options)
        return shared[key]

    vars(numba)["njit"] = njit


def _made_of(function: Any) -> Any:
    """A key of a function's code and of the values it closes over; None: unknown.

    Types are part of it: 1, 1.0 and True are equal as keys, but are three constants.
    """

    def key(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value), tuple(key(item) for item in value)
        if isinstance(value, int | float | str | np.generic | Dispatcher | NoneType):
            return type(value), value
        raise TypeError

    try:
        cells = tuple(key(cell.cell_contents) for cell in function.__closure__ or ())
        # Equal code of two modules may refer to other globals.
        return function.__code__, id(function.__globals__), key(function.__defaults__), cells
    except (TypeError, ValueError):
        return None


def take_only_ir() -> None:
    """Keep Numba from making machine code in this process: it can then compile, but not run.

    Kernels are optimised and emitted here, from the IR. Numba's own code for each of their
    functions, and the wrappers by which Python would call it, are a third of the time.
    """

    def finalize(library: Any) -> None:
        vars(library)["_finalized"] = True

    def executable(_context: Any, library: Any, fndesc: Any, env: Any) -> Any:
        library._ensure_finalized()  # links the functions that this one calls
        # Numba identifies functions by this object; its address is never called.
        return make_function(fndesc.lookup_module(), fndesc.qualname, "", 1, env, (library,))

    def options(self: Any, flags: Any, given: Any) -> None:
        set_options(self, flags, given)
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True

    set_options = cpu.CPUTargetOptions.finalize
    replaced = [
        (codegen.JITCodeLibrary, "_finalize_final_module", finalize),
        (cpu.CPUContext, "get_executable", executable),
        (cpu.CPUTargetOptions, "finalize", options),
    ]
    for owner, name, function in replaced:
        assert hasattr(owner, name), f"this Numba has no {owner.__name__}.{name}"
        setattr(owner, name, function)


def main(folder: str, level: str) -> None:
    """Serve as a worker whose kernels are of a level of CPU features."""
    features.use(level)
    share_functions()
    take_only_ir()
    serve(Path(folder), compile_kernel)
