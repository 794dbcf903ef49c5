"""How long a model may think: tokens to force once its budget is spent."""

from collections.abc import Sequence


class ThinkingBudget:
    """Watches the tokens of an answer; ``accept`` each one, and force what it returns.

    ``start`` and ``end`` are the tokens of the marks around thoughts, ``is_open`` whether the
    prompt ends within one. After ``n_tokens`` of thought, ``end`` is forced, after ``message``
    (tokens such as those of "I have to answer now."). Forced tokens are accepted like any others.
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
        """Return the tokens to force before the first one: with a budget of 0, in a thought."""
        return self._forced() if self.is_open and self._n_left == 0 else []

    def accept(self, token: int) -> list[int]:
        """Take the next token of the answer; return those to force after it."""
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
        self._n_left = -1  # once: what is forced is not counted
        return [*self._message, *self._end]
