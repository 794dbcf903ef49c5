"""`tamis batch`: answers to a file of requests, in OpenAI's batch format.

Requests are read and answered as in `tamis serve`, without a server. With --ray, the engines of a
Ray cluster answer them.
"""

import argparse
import asyncio
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from tamis.cli.commands import serve
from tamis.cli.options import common
from tamis.cli.options.errors import UsageError
from tamis.cli.terminal import note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command."""
    parser.epilog = (
        "Each line of IN has custom_id, method, url (/v1/chat/completions, /v1/completions or "
        "/v1/embeddings) and body. After an interruption the same command resumes: requests that "
        "OUT "
        "answers are skipped"
    )
    parser.add_argument(
        "requests", metavar="IN.jsonl", help="file of requests, one JSON object on each line"
    )
    parser.add_argument(
        "answers",
        metavar="OUT.jsonl",
        help="file of answers; requests that it already answers are skipped",
    )
    common.add_model_arguments(parser)
    parser.add_argument(
        "--parallel",
        type=common.count,
        default=8,
        metavar="N",
        help="number of requests that are answered at the same time (default: %(default)s)",
    )
    parser.add_argument(
        "--ubatch",
        type=common.count,
        default=512,
        metavar="N",
        help="tokens of a prompt that are processed at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=serve.field,
        metavar="NAME=VALUE",
        help="default of a request field, such as temperature=0; may be repeated (default: none)",
    )
    parser.add_argument(
        "--chat-template-file",
        metavar="FILE",
        help="file with a Jinja chat template, used instead of the model file's (default: none)",
    )
    parser.add_argument(
        "--retry-failed",
        action="store_true",
        help="send the requests again that failed according to OUT, and replace those lines",
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="let the engines of a Ray cluster at this address answer; auto: the cluster that this "
        "machine belongs to. Each machine needs tamis and the model file at the same path "
        "(default: this process answers)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    # What `serve` sets by flags that a batch does not have.
    own = {action.dest for action in parser._actions}
    parser.set_defaults(**{k: v for k, v in serve.defaults().items() if k not in own})


def run(arguments: argparse.Namespace) -> int:
    """Answer the requests without an answer; returns 1 if one failed.

    Raises UsageError, BatchError.
    """
    try:
        from tamis.bindings.serve import offline
        from tamis.bindings.serve.http.direct import ask  # noqa: F401
    except ImportError as error:
        raise ImportError(f"batch needs {error.name}: pip install 'tamis[server]'") from error
    into = Path(arguments.answers)
    with open(arguments.requests, "rb") as file:
        if not file.seekable():
            raise UsageError(
                f"{arguments.requests} is a pipe: name a file, which can be read again"
            )
        if into.exists() and into.samefile(arguments.requests):
            raise UsageError("the answers would be written into the requests: name another file")
        with closing(offline.Answers(into, retry_failed=arguments.retry_failed)) as answers:
            todo = [item for item in offline.items(file) if item.key not in answers.finished]
            n_before, begin = len(answers.finished), time.monotonic()
            if todo:
                _answer(arguments, file, todo, answers)
            seconds = time.monotonic() - begin
            result = {
                "requests": n_before + len(todo),
                "answered": len(todo),
                "failed": answers.n_failed,
                "seconds": round(seconds, 2),
            }
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        there = f", {n_before} were there" if n_before else ""
        note(f"{len(todo)} answers in {seconds:.1f} s{there}, {result['failed']} failed")
    return 1 if result["failed"] else 0


def _answer(arguments: argparse.Namespace, file: Any, todo: list[Any], answers: Any) -> None:
    from tamis.bindings.serve import offline

    progress = common.Progress()

    def told(done: int, total: int) -> None:
        progress("answers", done, total)

    async def all_of(ask: offline.Ask, n_at_once: int) -> None:
        await offline.run(file, todo, answers, ask, n_at_once, told)

    n_at_once = 2 * arguments.parallel  # some are prepared while others run
    arguments.queue = n_at_once * 8
    if arguments.ray is None:
        with closing(Answering(arguments)) as local:
            asyncio.run(all_of(local.ask, n_at_once))
    else:
        from tamis.bindings.serve.http.cluster import Pool

        arguments.model = str(common.model_file(arguments.model, progress).absolute())
        with closing(Pool(arguments.ray, arguments.threads, Answering, arguments)) as pool:
            asyncio.run(all_of(pool.ask, n_at_once * pool.n_engine))


class Answering:
    """A model in a process of its own, and the application that answers requests with it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Start the process. Raises UsageError, ModelError, LoadError."""
        from tamis.bindings.serve.http.app import Settings

        settings = Settings(
            n_queue=arguments.queue,
            max_body=1 << 30,
            usual=serve.field_defaults(arguments),
            page=False,
            slots=False,
        )
        if arguments.model is None:
            arguments.model = str(common.model_file(None, common.Progress()))
        source = serve.Source(arguments, settings)
        _, self._served = source.load(source.only)

    async def ask(self, url: str, body: bytes) -> tuple[int, bytes]:
        """The status and the body of an answer."""
        from tamis.bindings.serve.http.direct import ask

        return await ask(self._served.app, url, body)

    def close(self) -> None:
        """End the process."""
        self._served.stop()
        self._served.close()
