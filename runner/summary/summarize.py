"""Summaries, and answers to questions, of documents of any length.

A document that fits is read whole. A longer one is read in parts, each token in exactly one; the
answers about the parts are joined, and if these are too long for one prompt, joined in groups,
repeatedly, until they fit. Answers to a question are not joined by the model: what the text of each
part supports is listed, with its source.
"""

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tamis.engine.checks import check_engine, typed
from tamis.formats.documents import Document
from tamis.summary import chunks
from tamis.summary.cache import Cache, key_of, model_digest
from tamis.summary.meter import Work, WorkMeter
from tamis.summary.plan import Plan, Settings, choose
from tamis.summary.prompts import Task, message, notes
from tamis.summary.reader import Answer, Reader, Watch, repeatable
from tamis.summary.sources import Evidence, Source, Sourced
from tamis.summary.words import Span
from tamis.version import __version__

if TYPE_CHECKING:
    from tamis.engine.engine import Engine

STATES_SHARE = 0.5  # of the cache, which the parts of one document may use


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished answer about a document, and how it was made.

    finish: "stop", or "length" if it was cut at its limit; n_cut: the number of answers that were,
    including those about parts. n_tokens: of the document. n_parts: 1 if it was read whole;
    n_levels: how often answers about parts were joined. n_read, n_written: tokens of prompts that
    were computed and of answers that were generated; n_kept: cached tokens of prompts. cached:
    whether all of it was cached. found: False if the document has no answer to the question; then
    sources are the passages nearest to it, otherwise the passages that support the answer, or with
    settings.cite the summary.
    """

    name: str
    text: str
    finish: str
    n_cut: int
    n_tokens: int
    n_parts: int
    n_levels: int
    n_read: int
    n_kept: int
    n_written: int
    n_ctx: int
    method: str
    model: str
    seconds: float
    cached: bool = False
    found: bool = True
    sources: list[Source] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Length:
    n_tokens: int


@typed
def summarize(
    engine: "Engine", text: str, settings: Settings | None = None, cache: Cache | None = None
) -> Summary:
    """A summary of a text, or the result of settings.task, as in `tamis summarize`.

    Raises ContextError, PromptError, MemoryError, MethodError.
    """
    check_engine(engine)
    settings = settings or Settings()
    return Summarizer(engine, settings, cache).summarize(Document("text", text), silent("text"))


def silent(name: str) -> Watch:
    """A Watch without output."""
    return Watch(
        name=name,
        meter=WorkMeter(),
        say=lambda text: None,
        write=lambda text: None,
        progress=lambda stage, done, total: None,
        check=lambda: None,
    )


def finished(
    cache: Cache | None, model: Path, document: Document, settings: Settings
) -> Summary | None:
    """The cached summary of an earlier equal call; None if there is none."""
    key = _request_key(cache, model, document, settings)
    if cache is None or key is None or (found := cache.get(key, Summary)) is None:
        return None
    return replace(found, name=document.name, cached=True)


def _request_key(
    cache: Cache | None, model: Path, document: Document, settings: Settings
) -> str | None:
    """The key of the request, not of the chosen plan, which depends on memory that is free now."""
    if cache is None or not repeatable(settings):
        return None
    asked = repr(replace(settings, n_session=1, kv_ram=None, kv_dir=None, kv_vram=None))
    return key_of("summary", __version__, model_digest(model), asked, document.digest)


class Summarizer:
    """One model and settings for any number of documents, one after the other."""

    def __init__(self, engine: "Engine", settings: Settings, cache: Cache | None) -> None:
        self._engine, self._settings, self._cache = engine, settings, cache
        self._reader = Reader(engine, settings, cache)

    def summarize(self, document: Document, watch: Watch) -> Summary:
        """The summary, or the answer. Raises ContextError, PromptError, MemoryError, MethodError.

        What was finished before an error or an interruption is cached: an equal call resumes there.
        """
        if found := finished(self._cache, self._engine.path, document, self._settings):
            return found
        start = time.monotonic()

        def count(text: str) -> int:
            watch.check()
            return len(self._engine.tokenizer.encode(text, add_special=False))

        plan = self._plan(self._n_tokens(document, count))
        watch.say(f"{document.name}: {plan}")
        run = _Run(self._reader, plan, self._settings.task, watch)
        parts = [document.text]
        if not plan.whole:
            parts = chunks.split(document.text, count, plan.n_room)
        answer, sourced = self._answered(document, parts, run, count)
        watch.meter.finish(document.name)
        summary = self._summary(document, plan, run, answer, time.monotonic() - start)
        summary = replace(summary, text=sourced.text, found=sourced.found, sources=sourced.sources)
        key = _request_key(self._cache, self._engine.path, document, self._settings)
        if self._cache is not None and key is not None:
            self._cache.put(key, summary)
        return summary

    def _answered(
        self, document: Document, parts: list[str], run: "_Run", count: chunks.Count
    ) -> tuple[Answer, Sourced]:
        """The model's answer, and the part of it that is returned: what the text supports."""
        task, keep = self._settings.task, len(parts) == 1 or self._keeps(run.plan)
        if task.question is not None:
            answers = run.each(parts, keep=keep)
            said = Evidence(document, parts).answer(task.question, [each.text for each in answers])
            if self._settings.audit and said.found:
                run.audit(parts, [each.text for each in answers], said.sources)
            cut = "length" if any(each.finish == "length" for each in answers) else "stop"
            return replace(answers[-1], finish=cut), said
        answer = run.whole(document.text) if len(parts) == 1 else run.parts(parts, count, keep=keep)
        if self._settings.cite:
            return answer, Evidence(document, parts).cited(answer.text)
        return answer, Sourced(answer.text, True, [])

    def _n_tokens(self, document: Document, count: chunks.Count) -> int:
        """Tokens of a document; counting those of a long one takes longer than a cache look-up."""
        if self._cache is None:
            return count(document.text)
        key = key_of("tokens", model_digest(self._engine.path), document.digest)
        if (found := self._cache.get(key, _Length)) is None:
            found = _Length(count(document.text))
            self._cache.put(key, found)
        return found.n_tokens

    def _plan(self, n_text: int) -> Plan:
        task = self._settings.task
        frames = [message("", text) for text in (task.whole(), task.part(), task.joined())]
        n_frame = max(len(self._engine.encode_chat(frame)) for frame in frames)
        return choose(self._engine, self._settings, n_text, n_frame)

    def _keeps(self, plan: Plan) -> bool:
        """Whether the cache has room for the KV caches of all parts of a document."""
        if self._cache is None:
            return False
        n_bytes = plan.n_bytes * plan.n_text // plan.n_ctx
        return n_bytes <= STATES_SHARE * self._cache.max_bytes

    def _summary(
        self, document: Document, plan: Plan, run: "_Run", answer: Answer, seconds: float
    ) -> Summary:
        return Summary(
            name=document.name,
            text=answer.text,
            finish=answer.finish,
            n_cut=run.n_cut,
            n_tokens=plan.n_text,
            n_parts=run.n_parts,
            n_levels=run.n_levels,
            n_read=run.n_read,
            n_kept=run.n_kept,
            n_written=run.n_written,
            n_ctx=plan.n_ctx,
            method=f"attn={self._settings.attn} prefill={plan.prefill} "
            f"keys={plan.type_k} values={plan.type_v}",
            model=self._engine.path.name,
            seconds=round(seconds, 3),
        )


class _Run:
    """The calls of the model for one document, and their sums."""

    def __init__(self, reader: Reader, plan: Plan, task: Task, watch: Watch) -> None:
        self._reader, self.plan, self._task, self._watch = reader, plan, task, watch
        self.n_parts, self.n_levels, self.n_cut = 1, 0, 0
        self.n_read = self.n_kept = self.n_written = 0

    def whole(self, text: str) -> Answer:
        self._expect(1, self.plan.n_text)
        return self._ask(text, self._task.whole(), keep=True, last=True)

    def each(self, texts: list[str], *, keep: bool) -> list[Answer]:
        """The answer to the question about each part alone."""
        self.n_parts = len(texts)
        n_text = self.plan.n_text // len(texts)
        works = [Work(n_text, self._task.n_token) for _ in texts]
        self._watch.meter.expect(self._watch.name, works)
        return self._read(texts, self._task.whole(), keep=keep)

    def audit(self, texts: list[str], answers: list[str], sources: list[Source]) -> None:
        """Add to each source the attention to it of the tokens of its part's answer."""
        start = 0
        for part, (text, said) in enumerate(zip(texts, answers, strict=True), 1):
            own = [source for source in sources if source["part"] == part]
            spans = [Span(each["start"] - start, each["end"] - start) for each in own]
            start += len(text)
            if not own:
                continue
            task = self._task.whole()
            found = self._reader.attention(self.plan, text, task, said, spans, self._watch)
            for source, measured in zip(own, found or [], strict=False):
                source["attention"] = measured

    def _read(self, texts: list[str], task: str, *, keep: bool) -> list[Answer]:
        found = []
        for text in texts:
            found.append(self._ask(text, task, keep=keep, last=False))
            if len(texts) > 1:
                self._watch.part(len(found), len(texts))
        return found

    def parts(self, texts: list[str], count: chunks.Count, *, keep: bool) -> Answer:
        self.n_parts = len(texts)
        self._expect(len(texts), self.plan.n_text // len(texts))
        answers = [each.text for each in self._read(texts, self._task.part(), keep=keep)]
        while True:
            self.n_levels += 1
            written = notes(answers)
            groups = chunks.pack([count(note) for note in written], self.plan.n_room)
            if len(groups) == 1:
                return self._ask("".join(written), self._task.joined(), keep=False, last=True)
            answers = [self._join(answers[i:j], written[i:j]) for i, j in groups]

    def _join(self, answers: list[str], written: list[str]) -> str:
        if len(answers) == 1:
            return answers[0]
        return self._ask("".join(written), self._task.joined(), keep=False, last=False).text

    def _ask(self, text: str, task: str, *, keep: bool, last: bool) -> Answer:
        watch = self._watch if last else replace(self._watch, write=lambda text: None)
        answer = self._reader.answer(self.plan, text, task, watch, keep=keep)
        self.n_read += answer.n_read
        self.n_kept += answer.n_kept
        self.n_written += answer.n_written
        self.n_cut += answer.finish == "length"
        return answer

    def _expect(self, n_part: int, n_text: int) -> None:
        """Announce all calls to the meter, including those that join answers of several parts."""
        n_answer, works = self._task.n_token, []
        while True:
            works += [Work(n_text, n_answer) for _ in range(n_part)]
            if n_part == 1:
                break
            n_text = n_part * n_answer
            n_part = -(-n_text // self.plan.n_room)
            n_text //= n_part
        self._watch.meter.expect(self._watch.name, works)
