"""Functions of a context's memory: sequences are cut, copied, dropped; and tamis's own for methods.

A sequence is held from position 0 without gaps. Its end can be cut off. Removing positions before
the end leaves a gap, which llama_memory_seq_add closes by moving all later positions down, as
programs do whose context is full; until then the sequence takes no tokens.
"""

from typing import Any, NamedTuple

from tamis.bindings.flat.buffers import as_int, as_text
from tamis.bindings.flat.context import Context, using, using_memory
from tamis.bindings.flat.model import engine_of
from tamis.bindings.flat.params import KV_TYPE_NAMES, llama_context_params
from tamis.bindings.flat.status import LLAMA_OK, LLAMA_UNSUPPORTED, Refusal, invalid, returns
from tamis.engine.memory_plan import MemoryPlan
from tamis.graph.audit import Findings
from tamis.kv.types import KVTypes


class MemoryStats(NamedTuple):
    """The number of tokens that a context holds, and the bytes of its KV cache."""

    n_seq: int  # sequences with tokens
    n_tokens: int
    kv_bytes: int  # of the tokens held and of gaps, in whole pages
    kv_bytes_max: int  # once all sequences are full


@returns()
def llama_memory_clear(mem: int, data: bool) -> int:
    """Drop all tokens of all sequences."""
    with using_memory(mem) as context:
        for seq in context.sessions:
            context.empty(seq)
    return LLAMA_OK


@returns(False)
def llama_memory_seq_rm(mem: int, seq_id: int, p0: int, p1: int) -> bool:
    """Remove positions p0 to p1 - 1; negative: from the first, to the last; seq_id < 0: of all.

    Removing positions before others leaves a gap, which llama_memory_seq_add closes. Returns False,
    with nothing removed, if there would be two gaps.
    """
    with using_memory(mem) as context:
        seq = context.seq_id(seq_id, any_below=-1)
        chosen = list(context.sessions) if seq < 0 else [seq]
        left = {s: _without(context, s, p0, p1) for s in chosen if context.n_past(s)}
        for s, (n_kept, gap) in left.items():
            context.gaps.pop(s, None)
            context.sessions[s].truncate(n_kept)
            if gap:
                context.gaps[s] = gap
        return True


def _without(context: Context, seq: int, p0: Any, p1: Any) -> tuple[int, range]:
    """The number of tokens left after removing p0 to p1 - 1, and the range of a gap among them.

    Raises Refusal for two gaps.
    """
    n = context.n_past(seq)
    first, end = _range(p0, p1, n)
    gap = context.gaps.get(seq, range(first, first))
    if first >= end:
        return n, gap
    if end < gap.start or gap.stop < first:
        if end < n:
            context.check_whole(seq)
        return first, gap
    first, end = min(first, gap.start), max(end, gap.stop)
    return (n, range(first, end)) if end < n else (first, range(0))


def _range(p0: Any, p1: Any, n: int) -> tuple[int, int]:
    first, end = as_int(p0, "p0"), as_int(p1, "p1")
    return max(first, 0), n if end < 0 else min(end, n)


@returns()
def llama_memory_seq_cp(mem: int, seq_id_src: int, seq_id_dst: int, p0: int, p1: int) -> int:
    """Make an empty sequence hold the first p1 tokens of another one (p1 < 0: all).

    Returns LLAMA_UNSUPPORTED if p0 is above 0 or the target holds tokens already, LLAMA_INVALID if
    there is a gap among them.
    """
    with using_memory(mem) as context:
        source, target = context.seq_id(seq_id_src), context.seq_id(seq_id_dst)
        first, end = _range(p0, p1, context.n_past(source))
        if source == target or first >= end:
            return LLAMA_OK
        if first or context.n_past(target):
            message = f"sequence {target} must be empty and p0 0 (it is {first}) to copy into it"
            raise Refusal(LLAMA_UNSUPPORTED, message)
        if source in context.gaps and context.gaps[source].start < end:
            context.check_whole(source)
        copy = context.session(target)
        copy.copy(context.sessions[source])
        copy.truncate(end)
    return LLAMA_OK


@returns()
def llama_memory_seq_keep(mem: int, seq_id: int) -> int:
    """Drop all sequences except one."""
    with using_memory(mem) as context:
        kept = context.seq_id(seq_id)
        for seq in context.sessions:
            if seq != kept:
                context.empty(seq)
    return LLAMA_OK


@returns()
def llama_memory_seq_add(mem: int, seq_id: int, p0: int, p1: int, delta: int) -> int:
    """Close a gap by moving all later tokens down: p0 is the gap's end, delta minus its length.

    p1 is the sequence's end. Any other move is LLAMA_UNSUPPORTED, unless delta is 0 or the range is
    empty.
    """
    with using_memory(mem) as context:
        seq, by = context.seq_id(seq_id), as_int(delta, "delta")
        n, gap = context.n_past(seq), context.gaps.get(seq, range(0))
        first, end = _range(p0, p1, n)
        if by == 0 or first >= end:
            return LLAMA_OK
        if not (gap and gap.start <= first <= gap.stop and end == n and by == -len(gap)):
            asked = f"positions {first} to {end - 1} of sequence {seq} cannot move by {by}: "
            can = f"only {gap.stop} to {n - 1} by {-len(gap)}" if gap else "it has no gap to close"
            raise Refusal(LLAMA_UNSUPPORTED, asked + can)
        context.sessions[seq].remove(gap.start, gap.stop)
        del context.gaps[seq]
    return LLAMA_OK


@returns()
def llama_memory_seq_div(mem: int, seq_id: int, p0: int, p1: int, d: int) -> int:
    """Return LLAMA_UNSUPPORTED unless d is 1 or the range is empty: positions stay distinct."""
    with using_memory(mem) as context:
        seq = context.seq_id(seq_id)
        first, end = _range(p0, p1, context.n_past(seq))
        if as_int(d, "d", 1) != 1 and first < end:
            raise Refusal(LLAMA_UNSUPPORTED, "positions cannot be divided")
    return LLAMA_OK


@returns(-1)
def llama_memory_seq_pos_min(mem: int, seq_id: int) -> int:
    """The first position of a sequence; -1 where it is empty."""
    with using_memory(mem) as context:
        seq = context.seq_id(seq_id)
        gap = context.gaps.get(seq, range(0))
        first = gap.stop if gap.start == 0 else 0
        return first if context.n_past(seq) else -1


@returns(-1)
def llama_memory_seq_pos_max(mem: int, seq_id: int) -> int:
    """The last position of a sequence; -1 where it is empty."""
    with using_memory(mem) as context:
        return context.n_past(context.seq_id(seq_id)) - 1


@returns(False)
def llama_memory_can_shift(mem: int) -> bool:
    """True: llama_memory_seq_add closes the gap that llama_memory_seq_rm has left."""
    with using_memory(mem):
        return True


@returns(None)
def tamis_memory_plan(model: int, params: llama_context_params) -> MemoryPlan | None:
    """Bytes that a context of these parameters would take with all sequences full.

    None for no model.
    """
    engine = engine_of(model)
    if not isinstance(params, llama_context_params):
        invalid(f"params is {params!r}, expected llama_context_default_params()")
    n_seq = as_int(params.n_seq_max, "n_seq_max", 1, 256)
    n_ctx = as_int(params.n_ctx, "n_ctx", 0, 1 << 24) // n_seq
    types = [KV_TYPE_NAMES.get(t) for t in (params.type_k, params.type_v)]
    if None in types:
        invalid(f"type_k is {params.type_k!r}, type_v {params.type_v!r}: of {KV_TYPE_NAMES}")
    n_ubatch = as_int(params.n_ubatch, "n_ubatch", 1, 4096)
    engine = engine if params.offload_kqv else engine.with_kv_on_host()
    plan = engine.memory_plan(n_ctx, n_ubatch, *map(str, types))
    return plan._replace(kv=n_seq * plan.kv, workspace=n_seq * plan.workspace)


@returns(None)
def tamis_memory_stats(ctx: int) -> MemoryStats | None:
    """What a context holds; None for no context."""
    with using(ctx) as context:
        loaded = context.model.engine.loaded
        held = [s for s in context.sessions.values() if s.n_past]
        types = KVTypes(*context.session(0).kv_types)
        return MemoryStats(
            n_seq=len(held),
            n_tokens=sum(s.n_past for s in held) - sum(map(len, context.gaps.values())),
            kv_bytes=sum(loaded.kv_bytes(s.n_past, types) for s in held),
            kv_bytes_max=context.n_seq_max * loaded.kv_bytes(context.n_ctx_seq, types),
        )


@returns()
def tamis_set_attn_policy(ctx: int, attn: Any, prefill: Any) -> int:
    """Continue with other methods, written as `tamis methods` lists them; tokens stay.

    Returns LLAMA_FAILED for a method that is unknown or does not fit; the context is then
    unchanged.
    """
    with using(ctx) as context:
        before = context.attn, context.prefill
        context.attn, context.prefill = as_text(attn, "attn"), as_text(prefill, "prefill")
        try:
            new = {}
            for seq, session in context.sessions.items():
                new[seq] = context.new_session()
                new[seq].copy(session)
        except BaseException:
            context.attn, context.prefill = before
            raise
        context.sessions = new
    return LLAMA_OK


@returns(None)
def tamis_attn_stats(ctx: int, seq_id: int) -> Findings | None:
    """Findings of a sequence's audited steps: tokens read, retained mass, error.

    None if no step was audited: set llama_context_params.audit.
    """
    with using(ctx) as context:
        session = context.sessions.get(context.seq_id(seq_id))
        if session is None or not session.audit.n_step:
            invalid("no step of this sequence was audited: set llama_context_params.audit")
        return session.audit.total()
