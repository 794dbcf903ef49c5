"""Drafts from the text itself: the tokens that followed an earlier occurrence of the last n-gram.

This is prompt lookup, llama.cpp's "ngram-simple": a text that rewrites or quotes what it has read
repeats it. It needs no model. If drafts are rejected they become shorter and rarer, so that a text
without repetitions is generated as fast as without drafts.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tamis.engine.drafting import MOST_ALIKE, Draft, FirstDraft
from tamis.engine.session import Session
from tamis.select.auto import Auto
from tamis.select.base import PerRole
from tamis.select.beyond import Beyond
from tamis.select.dense import Dense

SIZE_N, SIZE_M = 6, MOST_ALIKE - 1  # tokens of the n-gram, and of the longest draft
FIRST = 4  # tokens of the first draft
LONGEST_PAUSE = 64  # tokens that are generated without a draft after rejected ones
ANY = 1 << 62  # positions


class NGrams(NamedTuple):
    """Sizes of an NGramDraft. asked: whether the user asked for it, at any cost."""

    size_n: int = SIZE_N
    size_m: int = SIZE_M
    asked: bool = False


def dense_until(session: Session) -> int:
    """Positions up to which a session's prompts and decode steps are dense; 0: none."""
    method = session.selector
    for_prompt, for_step = (
        (method.for_prefill, method.for_decode) if isinstance(method, PerRole) else (method, method)
    )
    bounds = [ANY]
    for each in (for_prompt, for_step):
        if isinstance(each, Auto | Beyond):
            bounds.append(ANY if session.n_ctx <= each.least else each.least)
        elif each != Dense():
            return 0
    return min(bounds)


def suits(session: Session) -> bool:
    """Whether such drafts cost a session little: it is on the CPU, without recurrent states."""
    dense = dense_until(session) > 0 and not session.audited
    return dense and session.backend.on_host and not session.has_states


class NGramDraft(Draft):
    """Proposes the tokens that followed the last occurrence of the last `size_n` tokens.

    Raises ValueError for sizes out of range.
    """

    reads_tokens = False

    def __init__(self, size_n: int = SIZE_N, size_m: int = SIZE_M) -> None:
        """Make a drafter; size_m: tokens of the longest draft, 1 to 15."""
        if not 1 <= size_n <= 64 or not 1 <= size_m <= SIZE_M:
            raise ValueError(
                f"n-grams of {size_n} tokens and drafts of {size_m}, expected 1 to 64 and "
                f"1 to {SIZE_M}"
            )
        self._size_n, self._size_m = size_n, size_m
        self.n_max = size_m
        self._tokens: list[int] = []
        # the end positions of these tokens' n-grams, except the last one
        self._ends: dict[tuple[int, ...], int] = {}
        self._n, self._pause = min(FIRST, size_m), 0
        self._rest = 0  # tokens until the next draft
        self._proposed: list[int] = []
        self._at = 0  # the position of the draft's first token

    def check(self, session: Session) -> None:
        """Raise ValueError if a session would not verify these drafts by dense attention."""
        if dense_until(session) == 0 or session.audited:
            raise ValueError(
                "drafts by n-grams are checked by dense attention: leave out attn, prefill, "
                "min_mass and audit"
            )

    def until(self, session: Session) -> int:
        """The position up to which verification and decode steps attend to the same keys."""
        return dense_until(session)

    def propose(self, tokens: Sequence[int], n: int) -> list[int]:
        """Up to n tokens; none if the n-gram is new, or drafts pause."""
        self._adapt(tokens)
        self._follow(tokens)
        n = min(n, self._n)
        end = self._ends.get(tuple(tokens[-self._size_n :]))
        if n < 1 or end is None or self._rest > 0:
            return []
        drafted = self._tokens[end : end + n]
        while len(drafted) < n:  # the text repeats within the draft
            drafted.append(drafted[len(drafted) - (len(tokens) - end)])
        self._proposed, self._at = drafted, len(tokens)
        return drafted

    def _adapt(self, tokens: Sequence[int]) -> None:
        """Choose the next draft's length, and the pause before it, from the accepted length."""
        last, self._proposed = self._proposed, []
        if not last or len(tokens) <= self._at:
            self._rest = max(0, self._rest - 1)
            return
        after = tokens[self._at : self._at + len(last)]
        n_taken = next((i for i, (a, b) in enumerate(zip(last, after, strict=False)) if a != b), -1)
        n_taken = len(after) if n_taken < 0 else n_taken
        if n_taken == len(last):
            self._n, self._pause = min(self._size_m, 2 * self._n), 0
        else:
            self._n = max(2, min(self._n, n_taken + 1))
            if n_taken == 0:
                self._pause = min(LONGEST_PAUSE, 2 * self._pause + 2)
        self._rest = 0 if n_taken else self._pause

    def _follow(self, tokens: Sequence[int]) -> None:
        """Add these tokens' n-grams, except the last one."""
        size, held = self._size_n, len(self._tokens)
        if self._tokens != tokens[:held]:
            self._tokens, self._ends, held = [], {}, 0
        self._tokens += tokens[held:]
        for end in range(max(size, held), len(tokens)):
            self._ends[tuple(tokens[end - size : end])] = end


def with_ngrams(
    other: Draft | None, session: Session, ngrams: NGrams | None, n_max: int
) -> Draft | None:
    """The drafter of a session: n-grams, then `other`, whose drafts have up to n_max tokens.

    N-grams that the user did not ask for are left out if there is another drafter, or if they may
    cost more than they gain. Raises ValueError for sizes out of range.
    """
    if ngrams is None or not (ngrams.asked or (other is None and suits(session))):
        return other
    first = NGramDraft(ngrams.size_n, ngrams.size_m)
    return first if other is None else FirstDraft(first, other, n_max)
