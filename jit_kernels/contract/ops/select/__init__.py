"""The ops of selection methods, one file a method."""

from tamis.jit_kernels.contract.ops.select.bigbird import *
from tamis.jit_kernels.contract.ops.select.common import *
from tamis.jit_kernels.contract.ops.select.cpe import *
from tamis.jit_kernels.contract.ops.select.delta import *
from tamis.jit_kernels.contract.ops.select.double_sparsity import *
from tamis.jit_kernels.contract.ops.select.h2o import *
from tamis.jit_kernels.contract.ops.select.hip import *
from tamis.jit_kernels.contract.ops.select.hshare import *
from tamis.jit_kernels.contract.ops.select.hyperattention import *
from tamis.jit_kernels.contract.ops.select.lfps import *
from tamis.jit_kernels.contract.ops.select.magicpig import *
from tamis.jit_kernels.contract.ops.select.quest import *
from tamis.jit_kernels.contract.ops.select.snapkv import *
from tamis.jit_kernels.contract.ops.select.tactic import *
from tamis.jit_kernels.contract.ops.select.vertical_slash import *
