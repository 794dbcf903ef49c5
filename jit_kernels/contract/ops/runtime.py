"""The thread team's entries and what measures the roofline."""

from tamis.jit_kernels.contract.op import op

# What bounds every other op; profiles compare with it. Reads n float32 at x once; y f32 [n_thread]:
# the sum of each thread's share (a rest of less than 128 may be left out).
READ_RATE = op("runtime.roofline", "read_rate", "", "x y n")

# n products and n sums a thread, in registers (rounded down to whole rounds): y f32 [n_thread] is
# drawn towards 1.
FMA_RATE = op("runtime.roofline", "fma_rate", "", "y n")

# The thread team's own entries: no argument struct, see cpu/runtime/team.py.
TEAM_RUN = op("runtime.team", "team_run", "", "")
TEAM_WORKER = op("runtime.team", "team_worker", "", "")
