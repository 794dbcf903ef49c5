"""Rows of a table for the last few tokens, hashed."""

from numba import int64, uint64

from tamis.jit_kernels.contract.ops import STEP
from tamis.jit_kernels.cuda.lang.grid import Launch, thread
from tamis.jit_kernels.cuda.lang.intrinsic import device, load_i32, load_i64, store_i32


@device
def token_back(a, t, j):
    """The token j before token t of the call, + 1; 0: there is none."""
    return load_i32(a.ids + 4 * (t - j)) + 1 if j <= t else load_i32(a.state + 4 * (j - t - 1))


def hash_ngrams() -> list[Launch]:
    """Kernel of HASH_NGRAMS. A few thousand integers: one thread writes them."""

    def kernel(tid, n_thread, a):
        if tid != 0 or thread() != 0:
            return
        n_tok, n_row = load_i64(a.step + STEP.n_tok), (a.n_gram - 1) * a.n_each
        for t in range(n_tok):
            mix = uint64(load_i32(a.ids + 4 * t)) * uint64(load_i64(a.factors))
            is_cut = False
            for j in range(1, a.n_gram):
                token = token_back(a, t, j) - 1
                is_cut = is_cut or token < 0 or token == a.eos
                token = a.eos if is_cut else token
                mix ^= uint64(token) * uint64(load_i64(a.factors + 8 * j))
                for h in range(a.n_each * (j - 1), a.n_each * j):
                    row = int64(mix % uint64(load_i64(a.sizes + 8 * h)))
                    store_i32(a.rows + 4 * (n_row * t + h), row + load_i64(a.first + 8 * h))
        # Entry j comes from entry j - n_tok < j: descending, none is read too late.
        for j in range(a.n_gram - 1, 0, -1):
            store_i32(a.state + 4 * (j - 1), token_back(a, n_tok - 1, j - 1))

    return [Launch(kernel)]
