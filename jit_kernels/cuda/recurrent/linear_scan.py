"""Linear attention over a state: a block takes 32 columns of a head, one per lane.

Warps share rows.
"""

from numba import cuda, float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import WARP, WARPS, Launch, lane, sync_block, warp
from tamis.jit_kernels.cuda.lang.intrinsic import device, load_f32, load_i64, store_f32

MOST_ROWS = 320  # of a state: those of 32 columns are in 40 KB of shared memory


@device
def over_warps(parts):
    """The sum over the block's warps of their partial sums for this lane."""
    total = float32(0)
    for w in range(WARPS):
        total += parts[WARP * w + lane()]
    return total


def linear_scan(rule: str, decay: str, head_k: int, head_v: int) -> list[Launch]:
    """Kernel of LINEAR_SCAN: blocks stride over heads' columns; warps share a state's rows."""
    if rule not in ("add", "delta") or decay not in ("head", "channel"):
        raise ValueError(f"no rule {rule!r} with a decay a {decay!r}")
    if head_k > MOST_ROWS:
        raise ValueError(f"head_k is {head_k}, expected at most {MOST_ROWS}")
    n_part, delta, by_channel = (head_v + WARP - 1) // WARP, rule == "delta", decay == "channel"
    per_head, n_held, n_part_sum = head_k if by_channel else 1, WARP * head_k, WARP * WARPS

    def kernel(tid, n_thread, a):
        held = cuda.shared.array(n_held, float32)
        recalled = cuda.shared.array(n_part_sum, float32)
        answers = cuda.shared.array(n_part_sum, float32)
        n_tok, mine = load_i64(a.step + STEP.n_tok), WARP * warp() + lane()
        for item in range(tid, a.n_head * n_part, n_thread):
            h, column = item // n_part, WARP * (item % n_part) + lane()
            kv = h % a.n_head_k if a.tiled != 0 else h // (a.n_head // a.n_head_k)
            there = column < head_v
            own = a.state + 4 * (head_k * head_v * h + column)
            through = load_f32(a.skip + 4 * h) if a.skip != 0 else float32(0)
            for i in range(warp(), head_k, WARPS):
                held[WARP * i + lane()] = load_f32(own + 4 * head_v * i) if there else float32(0)
            for t in range(n_tok):
                at = 4 * (a.stride * t + a.qk_step * kv)
                gates = a.decay + 4 * (a.decay_stride * t + per_head * h)
                value = float32(0)
                if there:
                    value = load_f32(a.v + 4 * (a.stride * t + a.v_step * h + column))
                new, part = value, float32(0)
                if delta:
                    for i in range(warp(), head_k, WARPS):
                        kept = load_f32(gates + 4 * i) if by_channel else load_f32(gates)
                        part += kept * load_f32(a.k + at + 4 * i) * held[WARP * i + lane()]
                    recalled[mine] = part
                    sync_block()
                    new = value - over_warps(recalled)
                if a.beta != 0:
                    new *= load_f32(a.beta + 4 * (a.n_head * t + h))
                part = float32(0)
                for i in range(warp(), head_k, WARPS):
                    kept = load_f32(gates + 4 * i) if by_channel else load_f32(gates)
                    row = kept * held[WARP * i + lane()] + load_f32(a.k + at + 4 * i) * new
                    held[WARP * i + lane()] = row
                    part += load_f32(a.q + at + 4 * i) * row
                answers[mine] = part
                sync_block()
                if warp() == 0 and there:
                    out = a.y + 4 * (head_v * (a.n_head * t + h) + column)
                    store_f32(out, over_warps(answers) * a.scale + through * value)
                sync_block()  # before the next token's parts
            for i in range(warp(), head_k, WARPS):
                if there:
                    store_f32(own + 4 * head_v * i, held[WARP * i + lane()])

    return [Launch(kernel)]
