"""RWKV-7's scan: a block takes 32 columns of a head's state, one per lane; warps share rows."""

from numba import cuda, float32

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import WARP, WARPS, Launch, lane, sync_block, warp
from tamis.jit_kernels.cuda.lang.intrinsic import load_f32, load_i64, store_f32
from tamis.jit_kernels.cuda.recurrent.linear_scan import MOST_ROWS, over_warps


def wkv(head: int) -> list[Launch]:
    """Kernel of WKV: blocks stride over heads' columns; warps share a state's rows."""
    if head > MOST_ROWS:
        raise ValueError(f"head is {head}, expected at most {MOST_ROWS}")
    n_part, n_held, n_part_sum = (head + WARP - 1) // WARP, WARP * head, WARP * WARPS
    size = 4 * head

    def kernel(tid, n_thread, a):
        held = cuda.shared.array(n_held, float32)
        erased = cuda.shared.array(n_part_sum, float32)
        answers = cuda.shared.array(n_part_sum, float32)
        weights = cuda.shared.array(n_part_sum, float32)
        n_tok, mine = load_i64(a.step + STEP.n_tok), WARP * warp() + lane()
        for item in range(tid, a.n_head * n_part, n_thread):
            h, column = item // n_part, 4 * (WARP * (item % n_part) + lane())
            there = column < size
            own, u = a.state + size * head * h + column, a.u + size * h
            for i in range(warp(), head, WARPS):
                held[WARP * i + lane()] = load_f32(own + size * i) if there else float32(0)
            for t in range(n_tok):
                at = size * (a.n_head * t + h)
                value, part = float32(0), float32(0)
                if there:
                    value = load_f32(a.v + at + column)
                for i in range(warp(), head, WARPS):
                    part += load_f32(a.a + at + 4 * i) * held[WARP * i + lane()]
                erased[mine] = part
                sync_block()
                gone, found, weight = over_warps(erased), float32(0), float32(0)
                for i in range(warp(), head, WARPS):
                    j = at + 4 * i
                    key, query = load_f32(a.k + j), load_f32(a.r + j)
                    row = held[WARP * i + lane()] * load_f32(a.w + j) + key * value
                    row -= load_f32(a.b + j) * gone
                    held[WARP * i + lane()] = row
                    found += query * row
                    weight += query * load_f32(u + 4 * i) * key
                answers[mine] = found
                weights[mine] = weight
                sync_block()
                if warp() == 0 and there:
                    store_f32(a.y + at + column, over_warps(answers))
                    store_f32(a.bonus + at + column, over_warps(weights) * value)
                sync_block()  # before the next token's parts
            for i in range(warp(), head, WARPS):
                if there:
                    store_f32(own + size * i, held[WARP * i + lane()])

    return [Launch(kernel)]
