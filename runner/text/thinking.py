"""A limit on a model's thoughts: tokens to force once their budget is spent."""

from collections.abc import Sequence


class ThinkingBudget:
    """Watches the tokens of an answer; ``accept`` each one, and force the tokens it returns.

    ``start`` and ``end`` are the tokens of the marks around thoughts, ``is_open`` says whether the
    prompt ends within a thought. After ``n_tokens`` of thought, ``message`` is forced (tokens such
    as those of "I have to answer now.") and then ``end``. Forced tokens are accepted like any
    others.
    """

    def __init__(
        self,
        n_tokens: int,
        *,
        start: Sequence[int],
        end: Sequence[int],
        is_open: bool = False,
        message: Sequence[int] = (),
    ):
        if n_tokens < 0:
            raise ValueError(f"a budget of {n_tokens} tokens: give 0 or more, or no budget at all")
        if not end:
            raise ValueError("the mark that ends thoughts has no tokens: nothing could be forced")
        self._n_tokens, self._n_left = n_tokens, n_tokens
        self._start, self._end, self._message = tuple(start), tuple(end), tuple(message)
        self._recent: tuple[int, ...] = ()
        self.is_open = is_open

    def begin(self) -> list[int]:
        """Return the tokens to force before the first one.

        With a budget of 0 they end a thought.
        """
        return self._forced() if self.is_open and self._n_left == 0 else []

    def accept(self, token: int) -> list[int]:
        """Process the next token of the answer; return those to force after it."""
        longest = max(len(self._start), len(self._end))
        self._recent = (*self._recent, token)[-longest:]
        if not self.is_open:
            if self._start and self._recent[-len(self._start) :] == self._start:
                self.is_open, self._n_left, self._recent = True, self._n_tokens, ()
                return self.begin()
            return []
        self._n_left -= 1
        if self._recent[-len(self._end) :] == self._end:
            self.is_open, self._recent = False, ()
            return []
        return self._forced() if self._n_left == 0 else []

    def _forced(self) -> list[int]:
        self._n_left = -1  # only once: forced tokens do not count
        return [*self._message, *self._end]
