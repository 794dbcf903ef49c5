"""The op contract: every op once, its argument struct and its compile-time constants, no body."""

from tamis.jit_kernels.contract.op import *
from tamis.jit_kernels.contract.op import READS_NOTHING, Op
from tamis.jit_kernels.contract.ops.attention import *
from tamis.jit_kernels.contract.ops.audit import *
from tamis.jit_kernels.contract.ops.fused import *
from tamis.jit_kernels.contract.ops.kv import *
from tamis.jit_kernels.contract.ops.linear import *
from tamis.jit_kernels.contract.ops.moe import *
from tamis.jit_kernels.contract.ops.norm import *
from tamis.jit_kernels.contract.ops.recurrent import *
from tamis.jit_kernels.contract.ops.runtime import *
from tamis.jit_kernels.contract.ops.sampling import *
from tamis.jit_kernels.contract.ops.select import *

# What ops read, by the name that KV_TAKE has for it.
KV_READERS = {
    found.reads.name: found.reads
    for found in list(globals().values())
    if isinstance(found, Op) and found.reads is not READS_NOTHING
}
