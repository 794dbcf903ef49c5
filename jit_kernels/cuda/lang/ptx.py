"""Instructions of NVIDIA GPUs as inline PTX: matrix units, copies to shared memory, exchange, exp2.

Names and semantics are those of the PTX ISA 8.0, whose sections the docstrings name. Registers are
uint32 (two float16, low element in the low half) and float32; shared addresses are the 32-bit
addresses that `shared_address` gives.
"""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.cuda.extending import intrinsic

from tamis.jit_kernels.cuda.lang.intrinsic import (
    FLOAT,
    I32,
    I64,
    float32,
    int32,
    int64,
    op,
    uint32,
    void,
)

U2, U4 = types.UniTuple(uint32, 2), types.UniTuple(uint32, 4)
F4, F8 = types.UniTuple(float32, 4), types.UniTuple(float32, 8)
_IR: dict[Any, Any] = {uint32: I32, int32: I32, float32: FLOAT, int64: I64}
_LETTER: dict[Any, str] = {uint32: "r", int32: "r", float32: "f", int64: "l"}


def _flat(kind: types.Type) -> list[types.Type]:
    """The registers of a value."""
    if isinstance(kind, types.UniTuple):
        return [kind.dtype] * len(kind)
    return [] if kind == void else [kind]


class Text(NamedTuple):
    """One PTX text: $0.. are the results, then the arguments, tuples in order.

    volatile: it touches memory or other threads, so it stays where it is and memory is read anew
    after it.
    """

    text: str
    ret: types.Type
    args: tuple[types.Type, ...]
    volatile: bool = False


def emit(b: Any, ptx: Text, values: list[Any]) -> list[Any]:
    """Emit a text whose arguments are these registers; returns its results."""
    outs, ins = _flat(ptx.ret), [register for arg in ptx.args for register in _flat(arg)]
    constraints = [f"={_LETTER[r]}" for r in outs] + [_LETTER[r] for r in ins]
    constraints += ["~{memory}"] if ptx.volatile else []
    registers, result = [_IR[r] for r in outs], ir.VoidType()
    if outs:
        result = ir.LiteralStructType(registers) if len(outs) > 1 else registers[0]
    signature = ir.FunctionType(result, [_IR[r] for r in ins])
    asm = ir.InlineAsm(signature, ptx.text, ",".join(constraints), side_effect=ptx.volatile)
    found = b.call(asm, values)
    if len(outs) > 1:
        return [b.extract_value(found, i) for i in range(len(outs))]
    return [found] if outs else []


def _intrinsic(ptx: Text, docstring: str) -> Any:
    """A text as a function of kernels."""

    def body(b: Any, *values: Any) -> Any:
        flat = [x for value in values for x in (value if isinstance(value, list) else [value])]
        found = emit(b, ptx, flat)
        return found if isinstance(ptx.ret, types.UniTuple) else (found[0] if found else None)

    body.__doc__ = docstring
    return op(ptx.ret, *ptx.args)(body)


def _ptx(text: str, ret: types.Type, *args: types.Type, volatile: bool = False) -> Any:
    """A decorator-like function of the docstring: the intrinsic of a text."""
    return lambda docstring: _intrinsic(Text(text, ret, args, volatile), docstring)


# ---- matrix units --------------------------------------------------------------------------------
MMA_F16 = Text(
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    " {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    F4,
    (U4, U2, F4),
)
mma_f16 = _intrinsic(
    MMA_F16,
    """A [16, 16] @ B [16, 8] + C of a warp, f16 in and f32 out (9.7.13.4.8). sm_80.

    With g = lane / 4 and t = lane % 4: A's registers hold rows g, g + 8, g, g + 8, columns 2t and
    2t + 1 (then 8 more); B's rows 2t and 2t + 1 (then 8 more) of column g; C's row g, columns 2t
    and 2t + 1, then row g + 8.
    """,
)
mma_bf16 = _ptx(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    " {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    F4, U4, U2, F4,
)("As mma_f16, of bfloat16.")  # fmt: skip
# A [16, 32] @ B [32, 8] + C of int8 in int32 (9.7.13.4.10). sm_80. Registers hold four neighbouring
# elements where mma_f16's hold two.
MMA_S8 = Text(
    "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"
    " {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
    U4,
    (U4, U2, U4),
)
# The same of unsigned bytes of A and signed ones of B.
MMA_U8_S8 = MMA_S8._replace(text=MMA_S8.text.replace("s32.s8.s8", "s32.u8.s8"))
dot_u8 = _ptx("dp4a.u32.s32 $0, $1, $2, $3;", int32, uint32, uint32, int32)(
    "The sum of $3 and of four products of unsigned bytes of $1 and signed ones of $2 (9.7.1.23)."
)
DOT_S8 = Text("dp4a.s32.s32 $0, $1, $2, $3;", int32, (uint32, uint32, int32))
dot_s8 = _intrinsic(DOT_S8, "As dot_u8, all bytes signed.")

# ---- shared memory -------------------------------------------------------------------------------
LOAD_MATRICES = Text(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", U4, (uint32,), volatile=True
)
load_matrices = _intrinsic(
    LOAD_MATRICES,
    """Four 8 x 8 matrices of 16 bits (9.7.13.4.15).

    Lane 8i + r gives the address of row r of matrix i; register i gets elements 2 (lane % 4) and
    the next of row lane / 4.
    """,
)
LOAD_MATRICES_TRANSPOSED = Text(
    "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];",
    U4,
    (uint32,),
    volatile=True,
)
load_matrices_transposed = _intrinsic(
    LOAD_MATRICES_TRANSPOSED, "As load_matrices, each matrix transposed."
)
# The 16 bytes at $4, constant and a multiple of 16, or zeros if $5 is 0.
LOAD_IF = Text(
    "{ .reg .pred p; setp.ne.u32 p, $5, 0; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0;"
    " mov.u32 $3, 0; @p ld.global.nc.v4.u32 {$0,$1,$2,$3}, [$4]; }",
    U4,
    (int64, uint32),
)
# The same for data that is read once: it takes no room in the first-level cache.
STREAM_IF = Text(
    "{ .reg .pred p; setp.ne.u32 p, $5, 0; mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0;"
    " mov.u32 $3, 0; @p ld.global.nc.L1::no_allocate.v4.u32 {$0,$1,$2,$3}, [$4]; }",
    U4,
    (int64, uint32),
)
# The two float32 at $2, a multiple of 8, or $4 and 0 if $3 is 0.
LOAD_PAIR_IF = Text(
    "{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.f32 $0, $4; mov.f32 $1, 0f00000000;"
    " @p ld.global.v2.f32 {$0,$1}, [$2]; }",
    types.UniTuple(float32, 2),
    (int64, uint32, float32),
    volatile=True,
)
LOAD_SHARED_PAIR = Text(
    "ld.shared.v2.u32 {$0,$1}, [$2];", types.UniTuple(uint32, 2), (uint32,), volatile=True
)
load_shared_f32x8 = _ptx(
    "ld.shared.v4.f32 {$0,$1,$2,$3}, [$8]; ld.shared.v4.f32 {$4,$5,$6,$7}, [$8+16];",
    F8, uint32, volatile=True,
)("Eight float32 at a shared address, a multiple of 16.")  # fmt: skip
store_shared_f32x8 = _ptx(
    "st.shared.v4.f32 [$0], {$1,$2,$3,$4}; st.shared.v4.f32 [$0+16], {$5,$6,$7,$8};",
    void, uint32, F8, volatile=True,
)("Write eight float32 at a shared address, a multiple of 16.")  # fmt: skip
LOAD_SHARED_WORD = Text("ld.shared.u32 $0, [$1];", uint32, (uint32,), volatile=True)
STORE_SHARED_WORD = Text("st.shared.u32 [$0], $1;", void, (uint32, uint32), volatile=True)
STORE_SHARED = Text("st.shared.f32 [$0], $1;", void, (uint32, float32), volatile=True)
load_shared_u128 = _ptx("ld.shared.v4.u32 {$0,$1,$2,$3}, [$4];", U4, uint32, volatile=True)(
    "The 16 bytes at a shared address, a multiple of 16."
)
STORE_SHARED_U128 = Text("st.shared.v4.u32 [$0], {$1,$2,$3,$4};", void, (uint32, U4), volatile=True)
store_shared_u128 = _intrinsic(
    STORE_SHARED_U128, "Write 16 bytes at a shared address, a multiple of 16."
)
load_shared = _ptx("ld.shared.f32 $0, [$1];", float32, uint32, volatile=True)(
    "The float32 at a shared address."
)
load_shared_i32 = _ptx("ld.shared.s32 $0, [$1];", int32, uint32, volatile=True)(
    "The int32 at a shared address."
)
load_shared_i64 = _ptx("ld.shared.s64 $0, [$1];", int64, uint32, volatile=True)(
    "The int64 at a shared address."
)
STORE_SHARED_IF = Text(
    "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p st.shared.f32 [$0], $1; }",
    void,
    (uint32, float32, uint32),
    volatile=True,
)
store_shared_f32 = _intrinsic(STORE_SHARED, "Write the float32 $1 at the shared address $0.")
store_shared_i32 = _ptx("st.shared.s32 [$0], $1;", void, uint32, int32, volatile=True)(
    "Write the int32 $1 at the shared address $0."
)
store_shared_i64 = _ptx("st.shared.s64 [$0], $1;", void, uint32, int64, volatile=True)(
    "Write the int64 $1 at the shared address $0."
)
copy_async = _ptx(
    "cp.async.cg.shared.global [$0], [$1], 16, $2;", void, uint32, int64, uint32, volatile=True
)(
    """Start a copy of 16 bytes from device memory at $1 to shared memory at $0 (9.7.8.22). sm_80.

    The first $2 bytes are read, the rest become 0: with 0, nothing is read.
    """
)
copy_commit = _ptx("cp.async.commit_group;", void, volatile=True)(
    "Close a group of copies: all that this thread started since the last one."
)


def copy_wait(n: int) -> Any:
    """The intrinsic that waits until at most n of this thread's groups of copies are open."""
    return _ptx(f"cp.async.wait_group {n};", void, volatile=True)(
        f"Wait until at most {n} groups of copies are open."
    )


fence_async = _ptx("fence.proxy.async.shared::cta;", void, volatile=True)(
    "Show what this thread wrote to shared memory to the units that read it by descriptor. sm_90."
)


def _shared_address(_typing_context, array):
    """The shared address of an array made by cuda.shared.array."""

    def codegen(context, builder, sig, values):
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        text = "{ .reg .u64 t; cvta.to.shared.u64 t, $1; cvt.u32.u64 $0, t; }"
        convert = ir.InlineAsm(ir.FunctionType(I32, [I64]), text, "=r,l")
        return builder.call(convert, [builder.ptrtoint(data, I64)])

    return uint32(array), codegen


shared_address: Any = intrinsic(_shared_address)

# ---- barriers in shared memory (9.7.12.15) ---------------------------------------------------
barrier_init = _ptx("mbarrier.init.shared::cta.b64 [$0], $1;", void, uint32, uint32, volatile=True)(
    "Make the 8 bytes at $0 a barrier that a phase of which ends with $1 arrivals. sm_90."
)
barrier_arrive = _ptx(
    "{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [$0]; }",
    void, uint32, volatile=True,
)("Arrive at a barrier: who waits for the phase sees what this thread did before.")  # fmt: skip
barrier_arrive_copied = _ptx(
    "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", void, uint32, volatile=True
)("Arrive at a barrier once all copies that this thread has started are done.")
barrier_expect = _ptx(
    "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared::cta.b64 state, [$0], $1; }",
    void, uint32, uint32, volatile=True,
)("Arrive at a barrier whose phase ends when $1 more bytes were copied, too.")  # fmt: skip
barrier_shown = _ptx("fence.mbarrier_init.release.cluster;", void, volatile=True)(
    "Show barriers that this thread made to the unit that copies (9.7.12.4)."
)
copy_bulk = _ptx(
    "{ .reg .b64 once; createpolicy.fractional.L2::evict_first.b64 once, 1.0;"
    " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    " [$0], [$1], $2, [$3], once; }",
    void, uint32, int64, uint32, uint32, volatile=True,
)(
    """Start a copy of $2 bytes from device memory at $1 to shared memory at $0 (9.7.8.24). sm_90.

    All are multiples of 16. The barrier at $3 hears of it. In the L2 cache they are the first to
    go: what kernels share stays there while weights pass.
    """
)  # fmt: skip
barrier_ended = _ptx(
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2;"
    " selp.u32 $0, 1, 0, p; }",
    uint32, uint32, uint32, volatile=True,
)("Whether the phase of this parity (0 or 1) has ended, after a while of waiting.")  # fmt: skip
sync_warpgroup = _ptx(
    "{ .reg .u32 id; add.u32 id, $0, 1; bar.sync id, 128; }", void, uint32, volatile=True
)("Wait for all threads of warpgroup $0 (9.7.12.1).")

sync_threads = _ptx("bar.sync 1, $0;", void, uint32, volatile=True)(
    "Wait for $0 threads of the block, a multiple of 32: all that come here (9.7.12.1)."
)

# ---- other lanes ---------------------------------------------------------------------------------
SHUFFLE_XOR = Text(
    "shfl.sync.bfly.b32 $0, $1, $2, 31, 0xffffffff;", float32, (float32, uint32), volatile=True
)
shuffle_xor = _intrinsic(
    SHUFFLE_XOR,
    "The value of the lane whose number differs by xor with $2 (9.7.8.6). All lanes take part.",
)
shuffle = _ptx(
    "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", float32, float32, uint32, volatile=True
)("The value of lane $2. All lanes take part.")
SHUFFLE_I32 = Text(
    "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", int32, (int32, uint32), volatile=True
)
shuffle_i32 = _intrinsic(SHUFFLE_I32, "As shuffle, of int32.")
lowest_of_warp = _ptx("redux.sync.min.s32 $0, $1, 0xffffffff;", int32, int32, volatile=True)(
    "The least value of any lane (9.7.13.6). All lanes take part."
)
sync_warp = _ptx("bar.warp.sync 0xffffffff;", void, volatile=True)(
    "Wait for all lanes, and see what they wrote to shared memory (9.7.12.2)."
)
ballot = _ptx(
    "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }",
    uint32, uint32, volatile=True,
)("A bit a lane, the lowest of lane 0: set where $1 is not 0 (9.7.13.3).")  # fmt: skip
equal_lanes = _ptx("match.any.sync.b32 $0, $1, 0xffffffff;", uint32, uint32, volatile=True)(
    "A bit a lane, the lowest of lane 0: set where $1 is this lane's (9.7.13.5). All take part."
)

# ---- arithmetic ----------------------------------------------------------------------------------
EXP2 = Text("ex2.approx.ftz.f32 $0, $1;", float32, (float32,))
exp2 = _intrinsic(EXP2, "2^x within 2 units of the last place (9.7.3.21); 0 below -126.")

reciprocal = _ptx("rcp.approx.ftz.f32 $0, $1;", float32, float32)(
    "1 / x within a unit of the last place (9.7.3.13); of less than 2^-126, infinite."
)
inverse_root = _ptx("rsqrt.approx.ftz.f32 $0, $1;", float32, float32)(
    "1 / sqrt(x) within 2^-22 of it (9.7.3.17)."
)
product = _ptx("mul.rn.f32 $0, $1, $2;", float32, float32, float32)(
    "$1 * $2, rounded, whatever it is added to (9.7.3.5)."
)

# Two float16 that begin with a byte each, the low ones or the high ones of a word, and end in 0x64.
LOW_BYTES = Text("prmt.b32 $0, $1, 0x64646464, 0x4140;", uint32, (uint32,))
HIGH_BYTES = Text("prmt.b32 $0, $1, 0x64646464, 0x4342;", uint32, (uint32,))
# Operations on two float16 each (9.7.4).
SUBTRACT_HALVES = Text("sub.rn.f16x2 $0, $1, $2;", uint32, (uint32, uint32))
MULTIPLY_HALVES = Text("mul.rn.f16x2 $0, $1, $2;", uint32, (uint32, uint32))
FMA_HALVES = Text("fma.rn.f16x2 $0, $1, $2, $3;", uint32, (uint32, uint32, uint32))
# Halves of two words: both low ones, both high ones (9.7.9.7).
LOW_HALVES = Text("prmt.b32 $0, $1, $2, 0x5410;", uint32, (uint32, uint32))
HIGH_HALVES = Text("prmt.b32 $0, $1, $2, 0x7632;", uint32, (uint32, uint32))


def _bytes_as_f16(signed: bool, docstring: str) -> Any:
    """The intrinsic that makes float16 of sixteen bytes."""

    def body(b: Any, words: Any, factor: Any, less: Any, scale: Any, offset: Any) -> Any:
        found = []
        for word in words:
            if signed:
                word = b.xor(word, ir.Constant(I32, 0x80808080))
            for pick in (LOW_BYTES, HIGH_BYTES):
                numbers = emit(b, FMA_HALVES, [*emit(b, pick, [word]), factor, less])
                found += emit(b, FMA_HALVES, [*numbers, scale, offset])
        return found

    body.__doc__ = docstring
    return op(types.UniTuple(uint32, 8), U4, uint32, uint32, uint32, uint32)(body)


bytes_f16 = _bytes_as_f16(
    False,
    """Sixteen bytes as float16, in order: (byte + 1024) * factor + less, times scale, plus offset.

    The last four are pairs of float16. With less = -1024 * factor, factor a power of two, only the
    last operation rounds.
    """,
)
signed_bytes_f16 = _bytes_as_f16(True, "As bytes_f16, of signed bytes, less being -1152 * factor.")
# $1 & $2 | $3, and $1 & $2 ^ $3, as one instruction each (9.7.7.6).
AND_OR = Text("lop3.b32 $0, $1, $2, $3, 0xEA;", uint32, (uint32, uint32, uint32))
AND_XOR = Text("lop3.b32 $0, $1, $2, $3, 0x6A;", uint32, (uint32, uint32, uint32))
BYTES_OF_TWO = Text("prmt.b32 $0, $1, $2, $3;", uint32, (uint32, uint32, uint32))
bytes_of_two = _intrinsic(
    BYTES_OF_TWO,
    "Four of the eight bytes of two words, by the nibbles of $3, each of which is at most 7.",
)
LANE = Text("mov.u32 $0, %laneid;", uint32, ())  # grid.lane, as a text
keep = _ptx("mov.b64 $0, $1;", int64, int64, volatile=True)(
    "The same number; what it is made of is not computed again wherever it is used."
)
keep_u32 = _ptx("mov.b32 $0, $1;", uint32, uint32, volatile=True)("As keep, of 32 bits.")
keep_f32 = _ptx("mov.f32 $0, $1;", float32, float32, volatile=True)("As keep, of a float32.")
count_bits = _ptx("popc.b32 $0, $1;", uint32, uint32)("How many bits are set (9.7.1.14).")
exchange_i32 = _ptx("atom.global.exch.b32 $0, [$1], $2;", int32, int64, int32, volatile=True)(
    "Write an int32, atomically; the one before (9.7.12.4)."
)
add_i32 = _ptx("atom.global.add.u32 $0, [$1], $2;", int32, int64, int32, volatile=True)(
    "Add to an int32, atomically; what it was (9.7.13.5)."
)
add_i64 = _ptx("red.global.add.u64 [$0], $1;", void, int64, int64, volatile=True)(
    "Add to an int64, atomically (9.7.12.5)."
)
or_i64 = _ptx("red.global.or.b64 [$0], $1;", void, int64, int64, volatile=True)(
    "Set the bits $1 of the int64 at $0, whatever other threads do to it (9.7.13.7)."
)
and_i64 = _ptx("red.global.and.b64 [$0], $1;", void, int64, int64, volatile=True)(
    "Clear the bits of the int64 at $0 that $1 has not, whatever other threads do to it."
)

# ---- other blocks --------------------------------------------------------------------------------
count_one = _ptx("atom.global.add.u32 $0, [$1], 1;", uint32, int64, volatile=True)(
    "Add 1 to the int32 at $1, whatever other threads do to it; what it was (9.7.13.5)."
)
fence = _ptx("fence.acq_rel.gpu;", void, volatile=True)(
    "Show all threads of the GPU what this one wrote before what it writes next, and see theirs."
)
cluster_arrive = _ptx("barrier.cluster.arrive.release.aligned;", void, volatile=True)(
    "Tell the cluster that this thread is here, and what it wrote before (9.7.13.4). sm_90."
)
cluster_wait = _ptx("barrier.cluster.wait.acquire.aligned;", void, volatile=True)(
    "Wait until all threads of the cluster have told, and see what they wrote. sm_90."
)

# ---- other kernels -------------------------------------------------------------------------------
wait_for_kernel = _ptx("griddepcontrol.wait;", void, volatile=True)(
    "Wait until the kernel before this one has ended and its writes are seen (9.7.12.13). sm_90."
)
let_next_start = _ptx("griddepcontrol.launch_dependents;", void, volatile=True)(
    "Let the next kernel be launched, which then waits for the end of this one. sm_90."
)
