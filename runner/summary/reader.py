"""Answers about one text, which is read once; its KV cache is kept for further questions."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tamis.engine.drafting import DRAFT_MAX, Drafting
from tamis.engine.ngram_draft import NGrams, with_ngrams
from tamis.engine.reuse.compressing import compress, stand_ins
from tamis.engine.session import ContextError, Session
from tamis.engine.session_file import SessionFileError
from tamis.select.kvzip import KVzip
from tamis.summary.attention import Attention, attention, positions
from tamis.summary.cache import Cache, key_of, model_digest
from tamis.summary.meter import Work, WorkMeter
from tamis.summary.plan import Plan, Settings
from tamis.summary.prompts import message
from tamis.summary.words import Span
from tamis.version import __version__

if TYPE_CHECKING:
    from tamis.engine.engine import Engine
    from tamis.engine.session import Progress

KEEP_EVERY = 120.0  # seconds of reading that may be lost where a process is killed


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer; finish: "stop" or "length".

    n_read: tokens of the prompt that were computed, n_kept: those that were cached; n_written:
    tokens of the answer.
    """

    text: str
    finish: str
    n_read: int
    n_kept: int
    n_written: int


@dataclass(frozen=True, slots=True)
class Watch:
    """Callbacks for the events of the document `name`.

    say: a line for the user. write: an answer's text as it is generated. progress: of compiling.
    check: called often, may raise to stop the work. part(done, total): a part was read.
    """

    name: str
    meter: WorkMeter
    say: Callable[[str], None]
    write: Callable[[str], None]
    progress: "Progress"
    check: Callable[[], None]
    part: Callable[[int, int], None] = lambda done, total: None


class Reader:
    """A session that is opened when it is needed; one thread may use it."""

    def __init__(self, engine: "Engine", settings: Settings, cache: Cache | None) -> None:
        self._engine, self._settings, self._cache = engine, settings, cache
        self._model = "" if cache is None else model_digest(engine.path)
        self._session: Session | None = None
        self._opened: dict[str, Any] = {}

    def answer(self, plan: Plan, text: str, task: str, watch: Watch, *, keep: bool) -> Answer:
        """The model's answer about a text; keep: whether the KV cache is saved for other tasks.

        A cached answer is not generated again. Raises ContextError, PromptError.
        """
        key = self._answer_key(plan, text, task)
        if self._cache is not None and key is not None and (found := self._cache.get(key, Answer)):
            watch.meter.begin(watch.name, Work(0, 0))
            watch.meter.done(watch.name)
            return replace(found, n_read=0, n_kept=found.n_read + found.n_kept, n_written=0)
        answer = self._make(plan, text, task, watch, keep=keep and self._cache is not None)
        if self._cache is not None and key is not None:
            self._cache.put(key, answer)
        return answer

    def _make(self, plan: Plan, text: str, task: str, watch: Watch, *, keep: bool) -> Answer:
        ids = self._engine.encode_chat(message(text, task))
        n_answer = self._settings.task.n_token
        if len(ids) + n_answer > plan.n_ctx:
            raise ContextError(
                f"the prompt is {len(ids)} tokens and the answer up to {n_answer}, n_ctx is "
                f"{plan.n_ctx}: raise n_ctx"
            )
        session = self._open(plan, watch)
        zip = self._settings.zip if keep else None
        n_text = shared(ids, self._engine.encode_chat(message(text, ""))) if keep else 0
        n_kept = 0 if zip is None else self._recall_zipped(session, plan, text, ids[:n_text], zip)
        if zipped := n_kept > 0:
            zip = None  # it is done
        else:
            n_kept = self._recall(session, plan, text, ids)
        watch.meter.begin(watch.name, Work(len(ids), n_answer, at=n_kept))
        n_text = max(n_kept, n_text)
        if keep and not zipped:
            if 0 < n_kept < n_text:
                watch.say(f"{watch.name}: {n_kept} of {n_text} tokens were read before")
            while session.n_past < n_text:
                self._read(session, plan, text, ids[session.n_past : n_text], watch)
        if zip is not None:
            self._compress(session, plan, text, zip, watch)
        pieces = []
        draft = with_ngrams(None, session, NGrams(), DRAFT_MAX)
        writer = session if draft is None else Drafting(session, draft)
        for piece in writer.generate(
            ids[n_text:],
            self._settings.params,
            max_tokens=n_answer,
            progress=self._told(watch, n_text),
        ):
            pieces.append(piece.text)
            watch.meter.wrote(watch.name)
            watch.write(piece.text)
            watch.check()
        watch.meter.done(watch.name)
        return Answer(
            text="".join(pieces).strip(),
            finish=piece.finish or "length",
            n_read=len(ids) - n_kept,
            n_kept=n_kept,
            n_written=len(pieces),
        )

    def _read(
        self, session: Session, plan: Plan, text: str, ids: Sequence[int], watch: Watch
    ) -> None:
        """Append tokens of a text for KEEP_EVERY seconds, and save the KV cache.

        It is saved, too, with the tokens done, where reading is interrupted.
        """
        told, n_past = self._told(watch, session.n_past), session.n_past
        due = time.monotonic() + KEEP_EVERY
        try:
            with contextlib.closing(session.prefill_steps(ids)) as steps:
                for done in steps:
                    told(done, len(ids))
                    if time.monotonic() >= due:
                        break
        finally:
            if session.n_past > n_past:
                self._keep(session, plan, text)

    def attention(
        self, plan: Plan, text: str, task: str, said: str, spans: Sequence[Span], watch: Watch
    ) -> list[Attention] | None:
        """The attention of the tokens of an answer `said` to passages of the text.

        None, with a line for the user, where it cannot be measured. The text is read again unless
        the present session or the cache holds it.
        """
        ids = self._engine.encode_chat(message(text, task))
        tokens = self._engine.tokenizer.encode(said, add_special=False)
        found = positions(self._engine.tokenizer, ids, text, spans)
        model, backend = self._engine.model, self._engine.backend
        in_memory = plan.type_k == "f16" and plan.kv_ram is None and plan.kv_vram is None
        if found is None or not in_memory or not backend.on_host or model.has_score_mod:
            watch.say(
                f"{watch.name}: attention is not measured: that takes a CPU, f16 keys in memory, "
                "and a model that neither caps nor biases scores"
            )
            return None
        session = self._holding(plan, text, ids, watch)
        return attention(self._engine, session, [ids[-1], *tokens[:-1]], found)

    def _holding(self, plan: Plan, text: str, ids: list[int], watch: Watch) -> Session:
        """A session that holds a prompt but its last token."""
        session = self._session_of(plan, watch)
        same = shared(session.tokens, ids[:-1])
        if 2 * same < len(ids):
            session.truncate(0)
            same = self._recall(session, plan, text, ids)
        session.truncate(same)
        if same < len(ids) - 1:
            session.prefill(ids[same:-1], lambda done, total: watch.check())
        return session

    def _open(self, plan: Plan, watch: Watch) -> Session:
        """An empty session with the plan's settings: the present one, or a new one."""
        session = self._session_of(plan, watch)
        session.truncate(0)
        return session

    def _session_of(self, plan: Plan, watch: Watch) -> Session:
        """A session with the plan's settings: the present one with its tokens, or a new one."""
        options: dict[str, Any] = {
            "n_ctx": plan.n_ctx,
            "attn": self._settings.attn,
            "min_mass": self._settings.min_mass,
            "prefill": plan.prefill,
            "type_k": plan.type_k,
            "type_v": plan.type_v,
            "kv_ram": plan.kv_ram,
            "kv_dir": None if plan.kv_ram is None else self._settings.kv_dir,
            "kv_vram": self._settings.kv_vram if plan.kv_vram is None else plan.kv_vram,
        }
        if self._session is None or self._opened != options:
            self._session = None  # its memory is freed before the next one's is allocated
            self._session = self._engine.session(progress=watch.progress, **options)
            self._opened = options
        return self._session

    def _recall(self, session: Session, plan: Plan, text: str, ids: Sequence[int]) -> int:
        """Load the cached prefix of the prompt.

        Returns its number of tokens, fewer than the prompt's.
        """
        if self._cache is None:
            return 0
        key = self._state_key(plan, text)
        if (path := self._cache.state(key)) is None:
            return 0
        try:
            session.load(path)
        # just removed, or damaged: read the text again
        except (FileNotFoundError, SessionFileError):
            self._cache.drop_state(key)
            return 0
        session.truncate(min(shared(ids, session.tokens), len(ids) - 1))
        return session.n_past

    def _recall_zipped(
        self, session: Session, plan: Plan, text: str, ids: Sequence[int], zip: KVzip
    ) -> int:
        """Load the compressed KV cache of a text's tokens `ids`; returns their number, or 0."""
        assert self._cache is not None
        key = self._state_key(plan, text, zip)
        if (path := self._cache.state(key)) is None:
            return 0
        try:
            session.load(path)
        except (FileNotFoundError, SessionFileError):
            self._cache.drop_state(key)
            return 0
        if session.tokens == stand_ins(ids, zip):
            return len(ids)
        session.truncate(0)  # the text's last tokens depend on what follows them
        return 0

    def _compress(self, session: Session, plan: Plan, text: str, zip: KVzip, watch: Watch) -> None:
        """Compress what was read of a text, and keep that in place of it."""
        assert self._cache is not None
        n = session.n_past
        n_kept = compress(self._engine, session, zip, lambda done, total: watch.check())
        watch.say(f"{watch.name}: {n_kept} of {n} positions are kept of its KV cache")
        n_bytes = plan.n_bytes * n_kept // plan.n_ctx
        self._cache.keep_state(self._state_key(plan, text, zip), n_bytes, session.save)
        self._cache.drop_state(self._state_key(plan, text))

    def _keep(self, session: Session, plan: Plan, text: str) -> None:
        assert self._cache is not None
        n_bytes = plan.n_bytes * session.n_past // plan.n_ctx
        self._cache.keep_state(self._state_key(plan, text), n_bytes, session.save)

    def _state_key(self, plan: Plan, text: str, zip: KVzip | None = None) -> str:
        """The key of everything a KV cache depends on, except tokens, which are compared."""
        how = [plan.prefill, plan.type_k, plan.type_v, repr(self._engine.hp.rope_scaling)]
        how += [] if zip is None else [repr(zip)]
        return key_of("state", self._model, how, text)

    def _answer_key(self, plan: Plan, text: str, task: str) -> str | None:
        """The key of everything that an answer depends on; None if sampling is random."""
        params = self._settings.params
        if not repeatable(self._settings):
            return None
        own = self._settings
        made_by = [__version__, self._model, own.attn, own.min_mass, plan.prefill]
        kv = [plan.type_k, plan.type_v, repr(self._engine.hp.rope_scaling)]
        kv += [] if own.zip is None else [repr(own.zip)]
        return key_of("answer", made_by, kv, repr(params), own.task.n_token, task, text)

    def _told(self, watch: Watch, n_past: int) -> Callable[[int, int], None]:
        def told(done: int, _total: int) -> None:
            watch.meter.read(watch.name, n_past + done)
            watch.check()

        return told


def repeatable(settings: Settings) -> bool:
    """Whether the same prompt always gets the same answer."""
    return settings.params.greedy or settings.params.seed not in (None, -1)


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two sequences, in tokens."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
