"""The compiler of CPU kernels: functions that kernels share, code that order does not change."""

import json
import subprocess
import sys

CODE = """
import hashlib, json, sys
from tamis.jit_kernels.contract import ops
from tamis.jit_kernels.contract.program import KernelSpec
from tamis.jit_kernels.cpu.runtime import compiler
if sys.argv[1] == "shared":
    compiler.share_functions()
compiler.take_only_ir()
from numba.core.dispatcher import Dispatcher
n_typed, compile = 0, Dispatcher.compile
def counted(self, signature):
    global n_typed
    n_typed += signature not in self.overloads
    return compile(self, signature)
Dispatcher.compile = counted
specs = [KernelSpec(ops.LFPS_BYPASS, (64, 2, group)) for group in map(int, sys.argv[2:])]
code = {spec.symbol: compiler.compile_kernel(spec) for spec in specs}
print(json.dumps([n_typed, {s: hashlib.sha256(c).hexdigest() for s, c in code.items()}]))
"""


def compiled(*words):
    """How many functions were typed, and the digest of each kernel's object code."""
    command = [sys.executable, "-c", CODE, *words]
    done = subprocess.run(command, env={"NUMBA_OPT": "0"}, capture_output=True, check=True)
    return json.loads(done.stdout)


def test_object_code_is_the_same_in_any_order_and_with_shared_functions():
    """Numba's own names count what was compiled before; releases are to be the same to the byte."""
    n_shared, shared = compiled("shared", "1", "2")
    n_apart, apart = compiled("apart", "2", "1")
    assert shared == apart
    assert len(set(shared.values())) == 2
    assert n_shared < n_apart
