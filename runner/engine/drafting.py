"""Speculative decoding: a cheap drafter proposes tokens, which the session verifies all at once.

Leviathan et al. 2023 (arXiv 2211.17192). A draft is the likeliest token at each position, by a
smaller model, by the file's own layer for further tokens, or by the model with sparse attention. So
rejection sampling (its Alg. 1) becomes: choose a token from the session's own logits as if there
were no draft, and continue while it equals the drafted one. The answer is the one without drafts,
token by token, for the same seed; if two choices are equal except for rounding it may be the other
one, since a chunk's attention adds in another order than a decode step's.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from tamis.engine.engine import Engine
from tamis.engine.generate import Generating, TokenProgress
from tamis.engine.loaded import LoadedModel
from tamis.engine.memory_plan import MemoryPlan
from tamis.engine.session import Session
from tamis.formats.vocab import Vocab
from tamis.graph.next_layer import HIDDEN, next_model
from tamis.graph.topk_logits import Best
from tamis.jit_kernels.contract import ops
from tamis.kv.types import KVOptions, KVTypes
from tamis.model.placement import on_one_device
from tamis.select.auto import Auto
from tamis.select.base import PerRole
from tamis.select.dense import Dense
from tamis.select.metered import Metered
from tamis.text.tokenizer import Tokenizer

DRAFT_MAX = 8  # tokens
LEAST = 0.5  # the least probability, by the drafter, of a drafted token
FIRST = 4  # of the attention drafter's first draft
# the most rows that are multiplied as in a decode step, without further rounding
MOST_ALIKE = ops.FEW_ROWS
MOST_MORE = 128  # the most tokens by which two vocabularies may differ: unused ones, at their ends


class Draft:
    """A drafter: it proposes a session's next tokens, which `Drafting` verifies."""

    watches = False  # whether it is passed the session's hidden rows
    n_max: int | None = None  # the tokens of its longest draft; None: Drafting's own limit
    own_steps = False  # whether the session's decode steps draft, so that every token is verified
    reads_tokens = True  # whether it computes the session's tokens itself, as a draft model does

    @property
    def plans(self) -> Mapping[str, MemoryPlan]:
        """The memory plan of its own session, by device; empty without one."""
        return {}

    def saw(self, pos: int, rows: np.ndarray) -> None:
        """Receive the output head's input for the session's tokens from pos on, f32 [n, n_embd]."""

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Up to n tokens that may follow these."""
        raise NotImplementedError

    def check(self, session: Session) -> None:
        """Raise ValueError if a session would not verify these drafts by dense attention."""
        if session.selector != Dense() or session.audited:
            raise ValueError(
                "drafts are checked as prompts are read: leave out attn, prefill and audit"
            )

    def until(self, session: Session) -> int:
        """The position of a session up to which it drafts.

        Beyond, the session takes its own steps.
        """
        return session.n_ctx

    def moved_to(self, session: Session) -> "Draft":
        """The drafter for another session of the same engine. Raises ValueError."""
        return self


class FirstDraft(Draft):
    """Proposes a first drafter's tokens; if there are none, those of another one."""

    def __init__(self, first: Draft, then: Draft, n_then: int) -> None:
        """Combine two drafters; n_then: the most tokens of a draft of `then`."""
        self._first, self._then, self._n_then = first, then, n_then
        self.watches, self.own_steps = then.watches, then.own_steps
        self.n_max = max(first.n_max or n_then, n_then)

    @property
    def plans(self) -> Mapping[str, MemoryPlan]:
        """The plans of `then`: the first drafter has no session."""
        return self._then.plans

    def saw(self, pos: int, rows: np.ndarray) -> None:
        """Pass the rows to `then`."""
        self._then.saw(pos, rows)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Up to n tokens."""
        draft = self._first.propose(tokens, n)
        return draft or self._then.propose(tokens, min(n, self._n_then))

    def check(self, session: Session) -> None:
        """Raise ValueError if a session would not verify the drafts of `then`."""
        self._then.check(session)

    def moved_to(self, session: Session) -> "FirstDraft":
        """The same drafters for another session. Raises ValueError."""
        first, then = self._first.moved_to(session), self._then.moved_to(session)
        return FirstDraft(first, then, self._n_then)


class ModelDraft(Draft):
    """Proposes the likeliest tokens of a smaller model with the same vocabulary.

    Raises ValueError if the vocabularies differ, MemoryError.
    """

    def __init__(self, engine: Engine, main: Engine, n_ctx: int) -> None:
        check_vocabulary(main.vocab, engine.vocab)
        self._session = engine.session(n_ctx=n_ctx)
        self._eog, self._n_vocab = engine.tokenizer.eog, main.hp.n_vocab

    @property
    def plans(self) -> Mapping[str, MemoryPlan]:
        """The plans of the smaller model's session."""
        return self._session.plans

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Up to n tokens; it stops before an unlikely one, and at the end of the text."""
        session, drafted = self._session, list[int]()
        held = min(_same(session.tokens, tokens), len(tokens) - 1)
        session.truncate(held)
        if n < 1 or len(tokens) > session.n_ctx or min(tokens[held:]) < 0:  # rows of pictures
            return drafted
        left = list(tokens[held:])
        best = session.decode_best(left[0], 1) if len(left) == 1 else session.prefill(left)
        while True:
            token, probability = _likeliest(best)
            if probability < LEAST or token >= self._n_vocab:
                return drafted
            drafted.append(token)
            if len(drafted) == n or token in self._eog or session.n_past == session.n_ctx:
                return drafted
            best = session.decode_best(token, 1)


def check_vocabulary(main: Vocab, draft: Vocab) -> None:
    """Raise ValueError if one vocabulary's tokens cannot draft for the other."""
    n, other = len(main), len(draft)
    least = min(n, other)
    same = main.model == draft.model and abs(n - other) <= MOST_MORE
    if not same or main.tokens[:least] != draft.tokens[:least]:
        raise ValueError(
            f"the draft model has other tokens ({other}, {draft.model}) than the model ({n}, "
            f"{main.model}): take one of the same family"
        )


class NextDraft(Draft):
    """Proposes the likeliest tokens of the file's own layer that predicts the token after next.

    For the session's tokens the layer reads the session's hidden rows, for drafted tokens its own
    output. Raises ValueError if the file has no such layer, MemoryError.
    """

    watches = True

    def __init__(self, engine: Engine, n_ctx: int) -> None:
        loaded = engine.loaded
        if len(loaded.places) > 1 or not loaded.backend.on_host:
            raise ValueError("the layer that predicts further tokens runs on the CPU only")
        model = next_model(loaded.file, loaded.model)
        places = on_one_device(loaded.backend, 1)
        next_loaded = LoadedModel(loaded.file, model, loaded.vocab, loaded.tokenizer, places)
        self._session = Session(
            next_loaded,
            n_ctx=n_ctx,
            n_ubatch=min(n_ctx, 128),
            selector=Dense(),
            kv=KVOptions(KVTypes(), None),
        )
        self._eog = engine.tokenizer.eog
        self._rows = self._session.forward.rows(HIDDEN, model.hp.n_embd)
        # hidden rows of the session's tokens
        self._hidden = np.zeros((n_ctx, model.hp.n_embd), np.float32)
        self._n_sure = 0  # positions that were computed from the session's hidden rows

    @property
    def plans(self) -> Mapping[str, MemoryPlan]:
        """The plans of the layer's session."""
        return self._session.plans

    def saw(self, pos: int, rows: np.ndarray) -> None:
        """Receive the session's hidden rows of its tokens from pos on, f32 [n, n_embd]."""
        self._hidden[pos : pos + len(rows)] = rows
        self._n_sure = min(self._n_sure, pos)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Up to n tokens; it stops before an unlikely one, and at the end of the text."""
        session, drafted, after = self._session, list[int](), list(tokens[1:])
        if n < 1 or not after:
            return drafted
        held = min(_same(session.tokens, after), self._n_sure, len(after) - 1)
        session.truncate(held)
        for first in range(held, len(after), session.n_ubatch):
            part = after[first : first + session.n_ubatch]
            self._rows[: len(part)] = self._hidden[first : first + len(part)]
            best: Best | np.ndarray = session.prefill(part)
        self._n_sure, row = len(after), len(part) - 1
        while True:
            token, probability = _likeliest(best)
            if probability < LEAST:
                return drafted
            drafted.append(token)
            if len(drafted) == n or token in self._eog or session.n_past == session.n_ctx:
                return drafted
            self._rows[0] = session.forward.hidden(row + 1)[row]
            best, row = session.decode_best(token, 1), 0


class AttentionDraft(Draft):
    """Proposes the likeliest tokens of the session's own sparse attention; dense verifies.

    The session's attn is the method and its prefill is dense: decode steps draft, and chunks
    verify. A draft's K and V are dropped together with the method's state of them; verification
    computes them anew. Drafts grow while they are accepted whole, and shrink to the accepted
    length. Raises ValueError for a session that `check` refuses.
    """

    own_steps = True

    def __init__(self, session: Session) -> None:
        self.check(session)
        self._session, self._n = session, FIRST
        self._proposed: list[int] = []
        self._at = 0  # the position of the draft's first token

    def check(self, session: Session) -> None:
        """Raise ValueError unless the session decodes by one method and reads prompts densely."""
        method = session.selector
        if not isinstance(method, PerRole) or method.for_prefill != Dense():
            raise ValueError(
                "drafts by attention are of a sparse method and checked by dense attention: name "
                "one that is not dense, and leave out prefill"
            )
        if isinstance(method.for_decode, Auto | Metered) or session.audited:
            raise ValueError(
                "drafts by attention are checked whatever they hold: leave out auto, min_mass and "
                "audit"
            )
        if not session.model.kv_layers:
            raise ValueError(
                f"no layer of {session.model.hp.arch} attends to keys, expected one at least for "
                "drafts by attention: draft by a smaller model, or leave drafts out"
            )
        if session.evicts:
            raise ValueError(
                f"{method.for_decode} evicts keys and would choose anew for every draft: draft by "
                "a method that chooses at each step, as hip, quest, topk or tactic"
            )

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Up to n tokens; it stops before an unlikely one, and at the end of the text."""
        session, drafted, held = self._session, list[int](), self._session.n_past
        self._adapt(tokens)
        n, left = min(n, self._n, MOST_ALIKE - 1), list(tokens[held:])
        if n < 1 or not left:
            return drafted
        try:
            if len(left) > 1:
                session.prefill(left[:-1])
            token = left[-1]
            while len(drafted) < n and session.n_free and token not in session.tokenizer.eog:
                token, probability = _likeliest(session.decode_best(token, 1))
                if probability < LEAST:
                    break
                drafted.append(token)
        finally:
            session.truncate(held)
        self._proposed, self._at = drafted, len(tokens)
        return drafted

    def _adapt(self, tokens: Sequence[int]) -> None:
        """Choose the next draft's length from the accepted length of the last one."""
        last, self._proposed = self._proposed, []
        if not last or len(tokens) <= self._at:
            return
        n_taken = _same(last, tokens[self._at :])
        self._n = max(self._n, n_taken + 2) if n_taken == len(last) else n_taken + 1

    def moved_to(self, session: Session) -> "AttentionDraft":
        """The drafter that uses another session's method."""
        return AttentionDraft(session)


class Drafting(Generating):
    """A session whose decode steps verify drafts; its calls are the session's.

    Until `generate` ends or `settle` is called, it holds drafted tokens that were not chosen yet.
    """

    def __init__(self, session: Session, draft: Draft, n_max: int = DRAFT_MAX) -> None:
        """Verify drafts in a session; n_max: the most tokens of a draft. Raises ValueError."""
        if not 1 <= n_max <= 64:
            raise ValueError(f"draft_max is {n_max}, expected 1 to 64")
        draft.check(session)
        self._session, self._draft, self._given = session, draft, n_max
        self._n_max = n_max if draft.n_max is None else draft.n_max
        self._until = draft.until(session)
        self.n_most: int | None = None  # the most tokens of a draft, if fewer than n_max are wanted
        # drafted tokens, each with the logits after it
        self._ahead: deque[tuple[int, np.ndarray]] = deque()
        self.n_drafted = self.n_taken = 0

    @property
    def reads_tokens(self) -> bool:
        """Whether its drafter computes the session's tokens itself, as a draft model does."""
        return self._draft.reads_tokens

    def decode_best(self, token_id: int, n: int | None) -> Best | np.ndarray:
        """Do what Session.decode_best does, for a token that may be verified already."""
        row = self.take(token_id)
        if row is not None:
            return row
        session = self._session
        n_max = self._n_max if self.n_most is None else min(self._n_max, self.n_most)
        last = min(session.n_ctx, self._until)
        room = min(n_max, min(last - session.n_past, session.n_ubatch) - 1)
        drafted = self._draft.propose([*session.tokens, token_id], room) if room > 0 else []
        if not drafted:
            if self.own_steps:
                return session.prefill([token_id])
            best = session.decode_best(token_id, n)
            self._show(1)
            return best
        rows = np.concatenate(list(session.logits([token_id, *drafted])))
        self._show(len(rows))
        self.n_drafted += len(drafted)
        self._ahead.extend(zip(drafted, rows[1:], strict=True))
        return rows[0]

    def prefill(self, ids: Sequence[int], progress: TokenProgress | None = None) -> np.ndarray:
        """Do what Session.prefill does, and pass each chunk's rows to the drafter."""
        session = self._session
        self.settle()
        if not self._draft.watches:
            return session.prefill(ids, progress)
        done, pos, steps = 0, session.n_past, session.prefill_steps(ids)
        try:
            while True:
                try:
                    upto = next(steps)
                except StopIteration as end:
                    return end.value
                self._draft.saw(pos + done, session.forward.hidden(upto - done))
                done = upto
                if progress is not None:
                    progress(done, len(ids))
        except BaseException:
            steps.close()
            session.truncate(pos)
            raise

    def _show(self, n: int) -> None:
        """Pass the rows of the last n tokens to the drafter."""
        if self._draft.watches:
            self._draft.saw(self._session.n_past - n, self._session.forward.hidden(n))

    def take(self, token_id: int) -> np.ndarray | None:
        """The logits after a token that equals the next drafted one; any other drops the drafts."""
        if self._ahead and self._ahead[0][0] == token_id:
            self.n_taken += 1
            return self._ahead.popleft()[1]
        self.settle()
        return None

    def moved_to(self, session: Session) -> "Drafting":
        """The same drafter, verified by another session. Raises ValueError."""
        return Drafting(session, self._draft.moved_to(session), self._given)

    @property
    def own_steps(self) -> bool:
        """Whether the session's own decode steps draft, so that no Batch may run them."""
        return self._draft.own_steps

    @property
    def plans(self) -> Mapping[str, MemoryPlan]:
        """The memory plan of the drafter, by device."""
        return self._draft.plans

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._session.tokenizer

    @property
    def tokens(self) -> list[int]:
        """The tokens in the KV cache without drafted ones."""
        return self._session.tokens[: self.n_past]

    @property
    def n_free(self) -> int:
        """The number of tokens that still fit."""
        return self._session.n_ctx - self.n_past

    @property
    def n_past(self) -> int:
        """The number of tokens in the KV cache without drafted ones."""
        return self._session.n_past - len(self._ahead)

    def settle(self) -> None:
        """Drop drafted tokens that were not chosen."""
        if self._ahead:
            self._session.truncate(self._session.n_past - len(self._ahead))
            self._ahead.clear()


def _same(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two texts, in tokens."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.array(a[:n], np.int64) != np.array(b[:n], np.int64))
    return int(differ[0]) if len(differ) else n


def _likeliest(logits: Best | np.ndarray) -> tuple[int, float]:
    """The likeliest token, and its probability."""
    if isinstance(logits, Best):
        return int(logits.ids[0]), float(np.exp(logits.logits[0] - logits.log_sum))
    token = int(np.argmax(logits))
    return token, float(1 / np.exp(logits.astype(np.float64) - logits[token]).sum())
