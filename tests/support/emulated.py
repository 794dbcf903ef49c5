"""Run compiled functions of AArch64 in an emulated process: qemu-aarch64 and nothing else.

The process is one file that is made here: the code, relocated as the loader does it, the arrays
that the function is called with, and a few instructions that call it and write the arrays to
standard output. It has no C library, so a function that needs one is a LinkError.
"""

import shutil
import struct
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np

from tamis.jit_kernels.compile.elf import Image

# A processor that has a level's instructions and not those of the next one.
PROCESSORS = {"neon": "cortex-a72", "neon-dotprod": "neoverse-n1", "neon-i8mm": "max"}
CODE, DATA = 0x10000000, 0x20000000  # addresses
GRAIN, GUARD = 65536, 64  # of segments; bytes around an array
WRITE, EXIT = 64, 93  # system calls of AArch64
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_CALL_X16, _SYSTEM = 0xD63F0200, 0xD4000001  # blr x16; svc #0


@cache
def emulator() -> str | None:
    """The program that runs AArch64's, where there is one."""
    return shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def entry(name: str, native: str, types: list[str]) -> str:
    """LLVM IR of a function without a result that calls a Numba function of these types."""
    declared = ", ".join(["ptr", "ptr", *types])
    given = "".join(f", {kind} %a{i}" for i, kind in enumerate(types))
    return f"""
        declare i32 @"{native}"({declared})
        define void @{name}({given[2:]}) {{
          %result = alloca [64 x i8]
          %exception = alloca ptr
          %status = call i32 @"{native}"(ptr %result, ptr %exception{given})
          ret void
        }}"""


def call(level: str, code: bytes, symbol: str, *arguments: np.ndarray | int) -> None:
    """Call a function of object code with arrays, which it may change, and integers."""
    image = Image({symbol: code}, "aarch64")
    text = bytearray(GRAIN + image.size)
    with memoryview(text) as view:
        image.write(view[GRAIN:], CODE + GRAIN, lambda name: None)
    data, places, numbers = bytearray(GUARD), [], []
    for argument in arguments:
        if isinstance(argument, int):
            numbers.append(argument)
            continue
        data += bytes(-len(data) % 64)
        places.append((len(data), argument))
        numbers.append(DATA + len(data))
        data += argument.tobytes() + bytes(GUARD)
    words = [word for i, n in enumerate(numbers) for word in _set(i, n)]
    words += [*_set(16, CODE + GRAIN + image.offsets[symbol]), _CALL_X16]
    for number, *given in ((WRITE, 1, DATA, len(data)), (EXIT, 0)):
        words += [word for i, n in enumerate(given) for word in _set(i, n)]
        words += [*_set(8, number), _SYSTEM]
    struct.pack_into(f"<{len(words)}I", text, 0, *words)
    found = _run(PROCESSORS[level], _program(bytes(text), bytes(data)))
    assert len(found) == len(data), f"the emulated process wrote {len(found)} of {len(data)} bytes"
    for at, array in places:
        own = np.frombuffer(found, array.dtype, array.size, at)
        array[...] = own.reshape(array.shape)


def _set(register: int, value: int) -> list[int]:
    """Instructions that set a register to 64 bits: MOVZ and three MOVK."""
    value &= (1 << 64) - 1
    parts = [(value >> 16 * i & 0xFFFF) << 5 | i << 21 | register for i in range(4)]
    return [0xD2800000 | parts[0], *(0xF2800000 | part for part in parts[1:])]


def _program(text: bytes, data: bytes) -> bytes:
    """A static executable of two segments that starts with the first instruction of `text`."""
    at_data = GRAIN + -(-len(text) // GRAIN) * GRAIN
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = _HEADER.pack(ident, 2, 183, 1, CODE, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    segments = [
        _SEGMENT.pack(1, flags, at, address, address, len(part), len(part), GRAIN)
        for flags, at, address, part in ((5, GRAIN, CODE, text), (6, at_data, DATA, data))
    ]
    head = (header + b"".join(segments)).ljust(GRAIN, b"\0")
    return (head + text).ljust(at_data, b"\0") + data


def _run(processor: str, program: bytes) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        path.write_bytes(program)
        path.chmod(0o700)
        command = [emulator() or "", "-cpu", processor, str(path)]
        done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-500:].decode()}"
    return done.stdout


def emitted(machine: llvm.TargetMachine, dispatcher, symbol: str) -> bytes:
    """Object code of a compiled Numba function; its entry is `symbol`."""
    from tamis.jit_kernels.cpu.runtime.compiler import retargeted

    (signature,) = dispatcher.signatures
    native = dispatcher.overloads[signature].fndesc.llvm_func_name
    module = retargeted(dispatcher.inspect_llvm(signature), machine)
    types = ["i64"] * len(signature)
    module.link_in(retargeted(entry(symbol, native, types), machine))
    for function in module.functions:
        if not function.is_declaration and function.name != symbol:
            function.linkage = "internal"
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)
