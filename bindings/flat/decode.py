"""Functions of contexts: creation, batches, decoding, and its outputs."""

from typing import Any, NamedTuple

import numpy as np

from tamis.bindings.flat.buffers import as_function, as_int
from tamis.bindings.flat.context import MAX_SEQ, Context, Memory, using
from tamis.bindings.flat.handles import TABLE
from tamis.bindings.flat.model import Model, whole_engine
from tamis.bindings.flat.params import llama_batch, llama_context_params
from tamis.bindings.flat.status import (
    GGML_LOG_LEVEL_INFO,
    LLAMA_OK,
    LLAMA_UNSUPPORTED,
    Refusal,
    invalid,
    returns,
    say,
)
from tamis.model.heads import POOLINGS


class llama_perf_context_data(NamedTuple):
    """Milliseconds and tokens since the context was made or reset."""

    t_start_ms: float
    t_load_ms: float
    t_p_eval_ms: float
    t_eval_ms: float
    n_p_eval: int
    n_eval: int
    n_reused: int


@returns(0)
def llama_init_from_model(model: int, params: llama_context_params) -> int:
    """A handle of a new context, with kernels compiled and sequence 0 allocated; 0 if it failed."""
    if not isinstance(params, llama_context_params):
        invalid(f"params is {params!r}, expected llama_context_default_params()")
    whole_engine(model)
    return TABLE.add(Context(TABLE.get(model, Model), params))


@returns()
def llama_free(ctx: int) -> int:
    """Free a context, once a call that another thread may be in has ended."""
    with using(ctx) as context:
        TABLE.remove(ctx, Context)
        TABLE.remove(context.memory_handle, Memory)
        context.sessions.clear()
        context.drop_outputs()
    context.model.release()
    return LLAMA_OK


@returns(0)
def llama_get_model(ctx: int) -> int:
    """The handle of the context's model, which may have been freed."""
    with using(ctx) as context:
        return context.model.handle


@returns(0)
def llama_get_memory(ctx: int) -> int:
    """A handle of the context's KV cache, freed with the context."""
    with using(ctx) as context:
        return context.memory_handle


@returns(0)
def llama_n_ctx(ctx: int) -> int:
    """The number of tokens that all sequences together may hold."""
    with using(ctx) as context:
        return context.n_ctx


@returns(0)
def llama_n_ctx_seq(ctx: int) -> int:
    """The number of tokens that one sequence may hold."""
    with using(ctx) as context:
        return context.n_ctx_seq


@returns(0)
def llama_n_batch(ctx: int) -> int:
    """The most tokens of one llama_decode."""
    with using(ctx) as context:
        return context.n_batch


@returns(0)
def llama_n_ubatch(ctx: int) -> int:
    """The number of tokens that are computed at once."""
    with using(ctx) as context:
        return context.n_ubatch


@returns(0)
def llama_n_seq_max(ctx: int) -> int:
    """The number of sequences of the context."""
    with using(ctx) as context:
        return context.n_seq_max


@returns(-1)
def llama_pooling_type(ctx: int) -> int:
    """The pooling that makes one embedding of a sequence's rows."""
    with using(ctx) as context:
        return POOLINGS.index(context.pooling)


@returns()
def llama_set_n_threads(ctx: int, n_threads: int, n_threads_batch: int) -> int:
    """Accept the model's number of threads, or 0, with LLAMA_OK; any other is LLAMA_UNSUPPORTED."""
    with using(ctx) as context:
        context.check_threads(n_threads, "n_threads")
        context.check_threads(n_threads_batch, "n_threads_batch")
    return LLAMA_OK


@returns(0)
def llama_n_threads(ctx: int) -> int:
    """Threads of a step of one token."""
    with using(ctx) as context:
        return context.model.engine.n_threads


@returns(0)
def llama_n_threads_batch(ctx: int) -> int:
    """Threads of a prompt."""
    return llama_n_threads(ctx)


@returns()
def llama_set_abort_callback(ctx: int, abort_callback: Any, abort_callback_data: Any) -> int:
    """Make llama_decode call abort_callback(data) between n_ubatch tokens; True ends the batch.

    It is also called before the first and after the last of them.
    """
    with using(ctx) as context:
        context.abort = as_function(abort_callback, "abort_callback"), abort_callback_data
    return LLAMA_OK


@returns()
def tamis_set_progress_callback(ctx: int, callback: Any, user_data: Any) -> int:
    """Call callback(done, total, user_data) as tokens of a prompt are done."""
    with using(ctx) as context:
        context.progress = as_function(callback, "callback"), user_data
    return LLAMA_OK


@returns()
def llama_set_embeddings(ctx: int, embeddings: bool) -> int:
    """Set whether llama_decode outputs embeddings instead of logits."""
    with using(ctx) as context:
        context.embeddings = bool(embeddings)
    return LLAMA_OK


@returns()
def llama_set_causal_attn(ctx: int, causal_attn: bool) -> int:
    """LLAMA_OK for True, LLAMA_UNSUPPORTED for False."""
    with using(ctx):
        if not causal_attn:
            raise Refusal(LLAMA_UNSUPPORTED, "attention that is not causal is not supported")
    return LLAMA_OK


@returns()
def llama_set_warmup(ctx: int, warmup: bool) -> int:
    """Do nothing: kernels are ready when a context is made."""
    with using(ctx):
        return LLAMA_OK


@returns()
def llama_attach_threadpool(ctx: int, threadpool: Any, threadpool_batch: Any) -> int:
    """Return LLAMA_UNSUPPORTED: a model has its own threads, see llama_model_params.n_threads."""
    with using(ctx):
        raise Refusal(LLAMA_UNSUPPORTED, "a model has threads of its own")


@returns()
def llama_detach_threadpool(ctx: int) -> int:
    """Do nothing: no thread pool can be attached."""
    with using(ctx):
        return LLAMA_OK


@returns()
def llama_synchronize(ctx: int) -> int:
    """Wait for the call that another thread is in."""
    with using(ctx):
        return LLAMA_OK


@returns(None)
def llama_batch_init(n_tokens: int, embd: int, n_seq_max: int) -> llama_batch | None:
    """An empty batch with arrays for n_tokens tokens of up to n_seq_max sequences each."""
    n = as_int(n_tokens, "n_tokens", 1, 1 << 20)
    if as_int(embd, "embd"):
        raise Refusal(LLAMA_UNSUPPORTED, f"embd is {embd}: input embeddings are not supported")
    n_seq = as_int(n_seq_max, "n_seq_max", 1, MAX_SEQ)
    return llama_batch(
        token=np.zeros(n, np.int32),
        pos=np.zeros(n, np.int32),
        n_seq_id=np.ones(n, np.int32),
        seq_id=np.zeros((n, n_seq), np.int32),
        logits=np.zeros(n, np.int8),
    )


@returns(None)
def llama_batch_get_one(tokens: Any, n_tokens: int) -> llama_batch | None:
    """A batch of sequence 0 that continues at its next position, with logits of the last token."""
    return llama_batch(n_tokens=as_int(n_tokens, "n_tokens", 0), token=tokens)


@returns()
def llama_batch_free(batch: llama_batch) -> int:
    """Free a batch's arrays. LLAMA_INVALID if it was freed before."""
    if not isinstance(batch, llama_batch) or batch.token is None:
        invalid(f"batch is {batch!r}: no batch, or it was freed")
    batch.n_tokens, batch.token = 0, None
    batch.pos = batch.n_seq_id = batch.seq_id = batch.logits = None
    return LLAMA_OK


@returns()
def llama_encode(ctx: int, batch: llama_batch) -> int:
    """LLAMA_UNSUPPORTED: no architecture here has an encoder."""
    with using(ctx):
        raise Refusal(LLAMA_UNSUPPORTED, "no architecture here has an encoder")


@returns()
def llama_decode(ctx: int, batch: llama_batch) -> int:
    """Run the batch's tokens: sequences with one token each together, others one after another.

    Returns LLAMA_OK, LLAMA_NO_KV_SLOT, LLAMA_ABORTED, LLAMA_INVALID (the batch) or LLAMA_FAILED.
    Unless it is LLAMA_OK, no sequence holds a token of the batch and there is no output; llama.h
    keeps the tokens that were done before an abort or a failure. Positions must follow each
    sequence's last one.
    """
    with using(ctx) as context:
        context.decode(batch)
    return LLAMA_OK


@returns(None)
def llama_get_logits(ctx: int) -> np.ndarray | None:
    """Logits f32 [n_output, n_vocab] of the last batch, in its order; None if there are none."""
    with using(ctx) as context:
        rows = [context.logits[i] for i in sorted(context.logits)]
        return np.stack(rows) if rows else None


@returns(None)
def llama_get_logits_ith(ctx: int, i: int) -> np.ndarray | None:
    """Logits f32 [n_vocab] of token i of the batch, or of output i from the end where i < 0."""
    with using(ctx) as context:
        return _ith(context.logits, i, "logits")


@returns(None)
def llama_get_embeddings(ctx: int) -> np.ndarray | None:
    """Embeddings f32 [n_token, n_embd] of the last batch; None where there are none."""
    with using(ctx) as context:
        rows = [context.hidden[i] for i in sorted(context.hidden)]
        return np.stack(rows) if rows else None


@returns(None)
def llama_get_embeddings_ith(ctx: int, i: int) -> np.ndarray | None:
    """The embedding f32 [n_embd] of token i of the batch, or of output i from the end."""
    with using(ctx) as context:
        return _ith(context.hidden, i, "embeddings")


@returns(None)
def llama_get_embeddings_seq(ctx: int, seq_id: int) -> np.ndarray | None:
    """The pooled embedding of a sequence: f32 [n_embd], or [n_label] for "rank".

    None without pooling.
    """
    with using(ctx) as context:
        seq = context.seq_id(seq_id)
        return context.pooled.get(seq) if context.pooling != "none" else None


def _ith(outputs: dict[int, np.ndarray], i: Any, what: str) -> np.ndarray:
    rows = sorted(outputs)
    row = as_int(i, "i")
    if row < 0:
        row = rows[row] if -row <= len(rows) else row
    if row not in outputs:
        invalid(f"the last batch has no {what} of token {i}, only of {rows}")
    return outputs[row]


@returns(None)
def llama_perf_context(ctx: int) -> llama_perf_context_data | None:
    """Times and counts of the context; None for no context."""
    with using(ctx) as context:
        t = context.timings
        return llama_perf_context_data(
            t.t_start_ms, 0.0, t.t_p_eval_ms, t.t_eval_ms, t.n_p_eval, t.n_eval, n_reused=0
        )


@returns()
def llama_perf_context_print(ctx: int) -> int:
    """Write times and counts to the log."""
    with using(ctx) as context:
        t = context.timings
        say(
            GGML_LOG_LEVEL_INFO,
            f"prompt {t.n_p_eval} tokens in {t.t_p_eval_ms:.1f} ms, "
            f"steps {t.n_eval} tokens in {t.t_eval_ms:.1f} ms",
        )
    return LLAMA_OK


@returns()
def llama_perf_context_reset(ctx: int) -> int:
    """Count from zero."""
    with using(ctx) as context:
        context.timings.reset()
    return LLAMA_OK
