"""How many answers about documents are invented: 80 questions over five texts of a Debian system.

Run it as `python -m tamis.tools.ask_evidence -m MODEL`. A text answers half of its questions. Each
is asked as `tamis summarize --ask` does, greedy, of the text read whole; printed is what the model
says, and whether the text supports it. The texts are licences, a manual page and pages of
Python's documentation (Debian's python3-doc). Answers are kept in the cache of documents: a run
that was interrupted goes on. The last line is JSON.
"""

import argparse
import glob
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tamis.engine.engine import Engine
from tamis.fetch import registry as models
from tamis.formats.documents import Document, read_document
from tamis.jit_kernels.backends import DEVICES, HOST
from tamis.summary.cache import Cache
from tamis.summary.plan import Settings, choose
from tamis.summary.prompts import Task, message
from tamis.summary.reader import Reader
from tamis.summary.sources import Evidence
from tamis.summary.summarize import silent
from tamis.tools.evidence_questions import TEXTS

N_WORDS = 40


def document(path: str) -> Document:
    """The text of a file, or of a manual page (man:NAME). Raises FileNotFoundError."""
    if path.startswith("man:"):
        command = f"man {path.removeprefix('man:')} | col -bx"
        done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
        if not done.stdout:
            raise FileNotFoundError(f"{path}: no such manual page, install man-db")
        return read_document(f"{path}.txt", done.stdout)
    found = sorted(glob.glob(path))
    if not found:
        raise FileNotFoundError(f"{path}: no such file, install python3-doc")
    return read_document(Path(found[0]).name, Path(found[0]).read_bytes())


class Asker:
    """A model that answers questions about documents."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._cache = engine, Cache()

    def ask(self, about: Document, question: str) -> tuple[str, str | None]:
        """The model's answer, and the part of it that the document supports, None: nothing."""
        settings = Settings(task=Task(n_words=N_WORDS, question=question))
        task = settings.task.whole()
        encode = self._engine.encode_chat
        n_frame, n_all = len(encode(message("", task))), len(encode(message(about.text, task)))
        plan = choose(self._engine, settings, n_all - n_frame, n_frame)
        reader = Reader(self._engine, settings, self._cache)
        said = reader.answer(plan, about.text, task, silent(about.name), keep=True).text
        found = Evidence(about, [about.text]).answer(question, [said])
        return said, found.text if found.found else None


def main() -> None:
    """Ask all questions; print each answer and the sums."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--model", default="qwen2.5-coder-0.5b")
    parser.add_argument("--device", choices=DEVICES, default=HOST)
    arguments = parser.parse_args()
    asker = Asker(Engine.load(models.resolve(arguments.model), device=arguments.device))
    count: Counter[str] = Counter()
    for text in TEXTS:
        about = document(text.path)
        for question, wanted in text.answered:
            said, given = asker.ask(about, question)
            right = re.search(wanted, said, re.I | re.S) is not None
            still = given is not None and re.search(wanted, given, re.I | re.S) is not None
            kinds = ["right before"] * right + ["right, given"] * (right and still)
            kinds += ["wrong before"] * (not right)
            kinds += ["wrong, given"] * (given is not None and not still)
            _report(count, about, question, said, given, kinds)
        for question in text.others:
            said, given = asker.ask(about, question)
            refused = re.search(r"not (mention|specif|state|provide)", said) is not None
            kinds = ["invented before"] * (not refused) + ["invented"] * (given is not None)
            _report(count, about, question, said, given, kinds)
    n = sum(len(text.answered) for text in TEXTS)
    print(json.dumps({"model": arguments.model, "answerable": n, "others": n, **count}))


def _report(
    count: Counter[str],
    about: Document,
    question: str,
    said: str,
    given: str | None,
    kinds: list[str],
) -> None:
    count.update(kinds)
    line = f"{about.name}: {question} -> {' '.join(said.split())!r}"
    print(f"{line} [{', '.join(kinds)}]" + ("" if given is None else f" {given!r}"))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
