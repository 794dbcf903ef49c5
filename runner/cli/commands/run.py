"""`tamis run`: one prompt, one answer. Only the answer goes to standard output."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tamis.cli.options import common, context, draft, group, prompt, samplers
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    prompt.add_arguments(parser)
    common.add_model_arguments(parser, auto=True)
    common.add_picture_arguments(parser)
    common.add_context_arguments(parser)
    common.add_audit_argument(parser)
    samplers.add_arguments(parser)
    samplers.add_grammar_arguments(parser)
    draft.add_arguments(parser)
    answer = group(parser, "answer")
    answer.add_argument(
        "-n",
        "--max-tokens",
        "--predict",
        "--n-predict",
        type=common.answer_length,
        metavar="N",
        help="most tokens of the answer; -1: as many as the context has room for (default: until "
        f"the model ends its answer; room for {context.ANSWER} tokens is planned)",
    )
    answer.add_argument(
        "--context-shift",
        action="store_true",
        help="when the context is full, remove the oldest tokens of the prompt and the answer and "
        "go on (default: a prompt that is too long is an error)",
    )
    answer.add_argument(
        "-r",
        "--stop",
        "--reverse-prompt",
        type=common.text,
        action="append",
        default=[],
        metavar="TEXT",
        help="end the answer at this text; may be repeated (default: none)",
    )
    answer.add_argument(
        "--json", action="store_true", help="print the answer and timings as one JSON object"
    )
    answer.add_argument(
        "--stats",
        action="store_true",
        help="print speed, times and memory use on standard error at the end",
    )
    common.add_adapter_arguments(parser)


@dataclass(slots=True)
class _TimedAnswer:
    """An answer: its text, and when reading began, the first token came and it ended."""

    n_prompt: int
    temp: float = 0.8
    start: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    end: float = 0.0
    pieces: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def speeds(self) -> dict[str, Any]:
        """Counts, tokens per second and the finish reason, in the form of --json."""
        first = self.first or self.end
        n = len(self.pieces)
        return {
            "prompt_tokens": self.n_prompt,
            "answer_tokens": n,
            "prompt_tokens_per_s": round(self.n_prompt / max(first - self.start, 1e-9), 1),
            "answer_tokens_per_s": round(max(n - 1, 0) / max(self.end - first, 1e-9), 1),
            "finish": self.pieces[-1].finish if self.pieces else "length",
        }


def run(arguments: argparse.Namespace) -> int:
    """Print the answer; returns 1 if it is empty."""
    began = time.perf_counter()
    if arguments.raw and arguments.system is not None:
        raise UsageError("--system needs the chat template: leave --raw or --system away")
    if "" in arguments.stop:
        raise UsageError("--stop is empty: every answer would end at once")
    params = samplers.params(arguments)
    samplers.check(arguments)
    draft.check(arguments)
    text = prompt.read(arguments)
    progress = common.Progress()
    prefill, arguments.prefill = arguments.prefill, context.prefill(arguments.prefill, 0)
    common.check_methods(arguments.attn, arguments.prefill)
    path = common.model_file(arguments.model, progress)
    context.check(*prompt.count(path, text), arguments)
    params = samplers.for_model(params, arguments, path)
    engine = common.load_engine(arguments, progress, path)
    ids = prompt.encode(engine, common.marked(engine, arguments, text), arguments)
    arguments.prefill = context.prefill(prefill, len(ids))
    chosen = context.choose(engine, arguments, len(ids), arguments.max_tokens)
    arguments.ctx, arguments.cache_type_k, arguments.cache_type_v = chosen[:3]
    session = common.open_session(engine, arguments, progress)
    common.note_untrained(engine, session, arguments)
    drafts = draft.open_draft(engine, session, arguments)
    from tamis.cli.terminal.answer import open_answer

    answer = _TimedAnswer(len(ids), params.temp)
    writer = draft.drafting(session, drafts, arguments)
    with open_answer(plain=True) as shown:
        for piece in _pieces(engine, writer, ids, params, arguments):
            answer.first = answer.first or time.perf_counter()
            answer.pieces.append(piece)
            shown.write("" if arguments.json else piece.text)
    answer.end = time.perf_counter()
    _report(arguments, answer, session)
    if arguments.stats:
        _stats(engine, session, answer, answer.start - began)
        draft.report(writer)
    engine.close()
    if not answer.text.strip():
        note("[the model ended its answer at once: there is no text]")
        return 1
    return 0


def _pieces(
    engine: Any, session: Any, ids: list[int], params: Any, arguments: argparse.Namespace
) -> Iterator[Any]:
    """Yield the answer in pieces; with --context-shift a quarter of the context always stays."""
    options = {
        "stop": arguments.stop,
        "max_tokens": None if arguments.max_tokens == -1 else arguments.max_tokens,
        "grammar": samplers.grammar(arguments, engine),
        "progress": common.Progress().reading(len(ids), session.n_past),
    }
    if not arguments.context_shift:
        return session.generate(ids, params, **options)
    from tamis.engine.shifting import Shifting

    return Shifting(session, session.n_ctx // 4).generate(ids, params, **options)


def _report(arguments: argparse.Namespace, answer: _TimedAnswer, session: Any) -> None:
    """Print the JSON answer, or write notes and the audit to standard error."""
    from tamis.cli.terminal import audit
    from tamis.cli.terminal.answer import repetition
    from tamis.select.base import promise_of

    speeds, found = answer.speeds(), session.audit if session.audited else None
    if arguments.json:
        tokens = [{"id": piece.token_id, "logprob": piece.logprob} for piece in answer.pieces]
        checked = {} if found is None else {"audit": audit.report(found)}
        checked |= {} if session.mass is None else {"attention": session.mass.rounded()}
        promise = promise_of(session.selector)
        report = {"text": answer.text, **speeds, "tokens": tokens, "promise": promise, **checked}
        sys.stdout.write(json.dumps(report) + "\n")
        return
    if speeds["finish"] == "length" and speeds["answer_tokens"] != arguments.max_tokens:
        note("[cut short: the context is used up; raise --ctx]")
    cut = speeds["finish"] == "length"
    if cut and (hint := repetition(answer.pieces, answer.temp)):
        note(f"[{hint}: --temp 0.7]")
    if sys.stderr.isatty() and not arguments.stats:
        note(
            f"[{speeds['prompt_tokens']} tokens read at {speeds['prompt_tokens_per_s']} tok/s, "
            f"{speeds['answer_tokens']} written at {speeds['answer_tokens_per_s']} tok/s]"
        )
    if found is not None:
        audit.write(found, every_head=arguments.audit_table)


def _stats(engine: Any, session: Any, answer: _TimedAnswer, opened: float) -> None:
    """Write the use of time and memory to standard error."""
    speeds, types = answer.speeds(), session.kv_types
    plan = engine.memory_plan(
        session.n_ctx,
        n_ubatch=session.n_ubatch,
        type_k=types.k,
        type_v=types.v,
        kv_ram=session.kv_ram,
        kv_vram=session.kv_vram,
    )
    first, end = (t - answer.start for t in (answer.first or answer.end, answer.end))
    rows = {
        "start": f"{opened:.2f} s to read the prompt, open the model and its session",
        "prompt": f"{speeds['prompt_tokens']} tokens, {speeds['prompt_tokens_per_s']} tok/s",
        "first token": f"after {opened + first:.2f} s",
        "answer": f"{speeds['answer_tokens']} tokens, {speeds['answer_tokens_per_s']} tok/s",
        "total": f"{opened + end:.2f} s, {engine.n_threads} threads",
        "context": f"{session.n_past} of {session.n_ctx} tokens",
        "memory": f"weights {plan.weights / common.MIB:.0f} MiB, KV cache up to "
        f"{plan.kv / common.MIB:.0f} MiB ({types.k}/{types.v}), scratch "
        f"{plan.workspace / common.MIB:.0f} MiB",
    }
    if session.mass is not None:
        rows["attention"] = str(session.mass)
    note("\n".join(f"{name:<12} {value}" for name, value in rows.items()))
