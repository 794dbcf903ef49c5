"""How large the parts of a long document should be, by the questions of ask_evidence.

Run it as `python -m tamis.tools.part_sizes -m MODEL`. The five texts stand in one document, between
pages of Python's documentation that answer none of the questions. Each question is asked of it
whole and in parts of several sizes, as `tamis summarize --ask` does. Answers are kept in --cache: a
run that was interrupted goes on. The last lines are JSON, one for each way of reading.
"""

import argparse
import json
import random
import re
import statistics
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from tamis.engine.engine import Engine
from tamis.fetch import registry as models
from tamis.formats.documents import Document
from tamis.jit_kernels.backends import DEVICES, HOST
from tamis.model.hparams import RopeScaling
from tamis.summary.cache import Cache
from tamis.summary.plan import Settings
from tamis.summary.prompts import Task
from tamis.summary.sources import DIFFER
from tamis.summary.summarize import Summarizer, silent
from tamis.tools.ask_evidence import N_WORDS, document
from tamis.tools.evidence_questions import PYTHON, TEXTS

# Pages between the texts; none answers a question.
BETWEEN = (
    "howto/sorting",
    "tutorial/classes",
    "tutorial/venv",
    "tutorial/interpreter",
    "tutorial/appetite",
)
LAST = "howto/curses"  # with it they exceed 32,768 tokens
WAYS = ("8192", "16384", "4096")


@dataclass(slots=True)
class Count:
    """Of one way of reading: answers, and seconds of each question after the first."""

    n_parts: int = 0
    found: int = 0
    wrong: int = 0
    invented: int = 0
    differ: int = 0
    reading: float = 0.0
    seconds: list[float] = field(default_factory=list)


def long_document(*, pages: bool) -> Document:
    """The texts of the questions, with a page after each if asked for."""
    texts = []
    for text, page in zip(TEXTS, BETWEEN, strict=True):
        texts.append(document(text.path).text)
        texts += [document(f"{PYTHON}/{page}.html").text] * pages
    texts += [document(f"{PYTHON}/{LAST}.html").text] * pages
    return Document("long", "\n\n".join(texts))


def settings_of(way: str, question: str) -> Settings:
    """The settings of a way: a context, and the methods of prefill and decode if they are named."""
    n_ctx, _, method = way.partition(":")
    settings = Settings(task=Task(n_words=N_WORDS, question=question), n_ctx=int(n_ctx))
    return replace(settings, prefill=method, attn=method) if method else settings


def main() -> None:
    """Ask all questions in every way; print each answer and the sums."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="CTX[:METHOD]")
    parser.add_argument("--pages", action="store_true", help="with the pages between the texts")
    parser.add_argument("--questions", type=int, default=80)
    parser.add_argument("--yarn", type=float, help="factor by which positions are stretched")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--device", choices=DEVICES, default=HOST)
    arguments = parser.parse_args()
    rope = None if arguments.yarn is None else RopeScaling("yarn", arguments.yarn)
    engine = Engine.load(models.resolve(arguments.model), device=arguments.device, rope=rope)
    cache, about = Cache(arguments.cache, 8 << 30), long_document(pages=arguments.pages)
    asked: list[tuple[str, str | None]] = [pair for text in TEXTS for pair in text.answered]
    asked += [(q, None) for text in TEXTS for q in text.others]
    random.Random(0).shuffle(asked)
    counts = {way: Count() for way in arguments.ways}
    for question, wanted in asked[: arguments.questions]:
        for way, count in counts.items():
            made = Summarizer(engine, settings_of(way, question), cache)
            done = made.summarize(about, silent(about.name))
            right = done.found and re.search(wanted or "$^", done.text, re.I | re.S) is not None
            count.n_parts = done.n_parts
            count.found += right
            count.wrong += done.found and not right and wanted is not None
            count.invented += done.found and wanted is None
            count.differ += done.text.startswith(DIFFER)
            if done.n_read > done.n_tokens:
                count.reading = done.seconds
            else:
                count.seconds.append(done.seconds)
            kind = "right" if right else "given" if done.found else "none"
            print(f"{way}: {question} [{wanted}] {kind}, {done.seconds} s: {done.text!r}")
            sys.stdout.flush()
    for way, count in counts.items():
        _report(way, count)


def _report(way: str, count: Count) -> None:
    seconds = statistics.median(count.seconds) if count.seconds else None
    print(json.dumps({"way": way, **_fields(count), "seconds": seconds}))


def _fields(count: Count) -> dict[str, float]:
    names = ("n_parts", "found", "wrong", "invented", "differ", "reading")
    return {name: getattr(count, name) for name in names}


if __name__ == "__main__":
    main()
