"""`tamis run`: one prompt, one answer. The answer alone goes to standard output."""

import argparse
import json
import sys
import time
from typing import Any

from tamis.cli import UsageError, common
from tamis.cli.answer import open_answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    parser.epilog = common.AUTO_HELP
    common.add_model_arguments(parser)
    common.add_context_arguments(parser)
    common.add_audit_argument(parser)
    common.add_sampling_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", type=common.text, help="the prompt, - for standard input")
    source.add_argument("-f", "--file", help="a file with the prompt, - for standard input")
    parser.add_argument("--system", type=common.text, help="a system message")
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text")
    parser.add_argument("-n", "--max-tokens", type=common.count, help="longest answer in tokens")
    parser.add_argument(
        "--stop", type=common.text, action="append", default=[], help="text that ends the answer"
    )
    parser.add_argument("--json", action="store_true", help="answer and timings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the answer."""
    if arguments.raw and arguments.system is not None:
        raise UsageError("--system needs the chat template: leave --raw or --system away")
    if "" in arguments.stop:
        raise UsageError("--stop is empty: every answer would end at once")
    params = common.sampler_params(arguments)
    text = _prompt(arguments)
    progress = common.Progress()
    how = common.auto_method(arguments.attn)
    arguments.attn = arguments.attn if how is None else "dense"
    engine = common.load_engine(arguments, progress)
    ids = _ids(engine, text, arguments)
    session = common.open_session(engine, arguments, progress)
    common.note_untrained(engine, session, arguments)
    start, first, pieces = time.perf_counter(), 0.0, []
    left = ids
    if how is not None and len(ids) > 1:
        session, left = _chosen(engine, session, arguments, how, ids), ids[-1:]
    with open_answer(plain=True) as answer:
        for piece in session.generate(
            left,
            params,
            stop=arguments.stop,
            max_tokens=arguments.max_tokens,
            progress=progress.tokens,
        ):
            first = first or time.perf_counter()
            pieces.append(piece)
            answer.write("" if arguments.json else piece.text)
    found = session.audit
    _report(arguments, ids, pieces, start, first, found)
    if found is not None and not arguments.json:
        from tamis.cli import audit

        audit.write(found)
    engine.close()
    return 0


def _chosen(
    engine: Any, session: Any, arguments: argparse.Namespace, how: Any, ids: list[int]
) -> Any:
    """A session that holds the prompt but its last token, with the method that suits it."""
    from tamis.auto.auto import choose

    progress = common.Progress()
    session.prefill(ids[:-1], progress.tokens)
    choice = choose(engine, session, how)
    common.note(f"--attn auto: {choice}")
    if choice.attn == "dense":
        return session
    arguments.attn = choice.attn
    own = common.open_session(engine, arguments, progress)
    own.copy(session)
    return own


def _prompt(arguments: argparse.Namespace) -> str:
    """The text of -p, -f or standard input. Raises UsageError where there is none."""
    if arguments.prompt not in (None, "-"):
        text = arguments.prompt
    elif arguments.prompt is None and arguments.file is None and sys.stdin.isatty():
        raise UsageError("no prompt: give -p TEXT, -f FILE, or pipe text in")
    else:
        text = common.read_text(arguments.file or "-")
    if not text:
        raise UsageError("the prompt is empty: give -p TEXT, -f FILE, or pipe text in")
    return text


def _ids(engine: Any, text: str, arguments: argparse.Namespace) -> list[int]:
    if arguments.raw:
        return engine.tokenizer.encode(text)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return engine.encode_chat([*system, {"role": "user", "content": text}])


def _report(
    arguments: argparse.Namespace,
    ids: list[int],
    pieces: list[Any],
    start: float,
    first: float,
    found: Any,
) -> None:
    """The JSON answer on standard output, or the speeds for the person at the terminal."""
    end = time.perf_counter()
    first = first or end
    speeds = {
        "prompt_tokens": len(ids),
        "answer_tokens": len(pieces),
        "prompt_tokens_per_s": round(len(ids) / max(first - start, 1e-9), 1),
        "answer_tokens_per_s": round(max(len(pieces) - 1, 0) / max(end - first, 1e-9), 1),
        "finish": pieces[-1].finish if pieces else "length",
    }
    if arguments.json:
        answer = "".join(piece.text for piece in pieces)
        tokens = [{"id": piece.token_id, "logprob": piece.logprob} for piece in pieces]
        checked = {}
        if found is not None:
            from tamis.cli import audit

            checked = {"audit": audit.report(found)}
        sys.stdout.write(json.dumps({"text": answer, **speeds, "tokens": tokens, **checked}) + "\n")
        return
    if speeds["finish"] == "length" and len(pieces) != arguments.max_tokens:
        common.note("[cut short: the context is used up; raise --ctx]")
    if sys.stderr.isatty():
        common.note(
            f"[{speeds['prompt_tokens']} tokens read at {speeds['prompt_tokens_per_s']} tok/s, "
            f"{speeds['answer_tokens']} written at {speeds['answer_tokens_per_s']} tok/s]"
        )
