"""Prompts: the text comes first, and the task last.

So prompts about one text have a common prefix, whose KV cache they share.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_FRAME = "Here is a text:\n\n<text>\n{text}\n</text>\n\n{task}"


@dataclass(frozen=True, slots=True)
class Task:
    """The task: to answer `question`, or follow `instruction`, or else to summarize.

    n_words: its approximate length.
    """

    n_words: int = 150
    instruction: str | None = None
    question: str | None = None

    @property
    def n_token(self) -> int:
        """The most tokens of an answer: two for each word, as in many languages, and some more."""
        return 16 + self.n_words * 5 // 2

    def whole(self) -> str:
        """The task for the whole text at once."""
        return self._of("the text above", "the text")

    def part(self) -> str:
        """The task for one part of a longer text.

        It does not number the part, so that equal parts are equal.

        A question is asked as if of a whole text: small models that may answer that a text says
        nothing about it do so for nearly every text.
        """
        if self.instruction is None:
            return self._of("the text above, which is part of a longer one", "this part")
        return (
            "The text above is part of a longer one, about which this is asked:\n\n"
            f"{self.instruction}\n\nWrite down what this part says that helps to answer, in at "
            f"most {self.n_words} words. If there is nothing, write: nothing."
        )

    def joined(self) -> str:
        """The task for notes on the parts, in place of the text."""
        if self.instruction is None:
            return self._of("the longer text whose parts are summarized above", "the whole")
        return (
            "Above are notes on the parts of a longer text, in their order. With them, do this "
            f"for the whole text, in at most {self.n_words} words:\n\n{self.instruction}"
        )

    def _of(self, text: str, all_of_it: str) -> str:
        if self.question is not None:
            return (
                f"Answer this question with what the text above says, in at most {self.n_words} "
                f"words:\n\n{self.question}"
            )
        if self.instruction is not None:
            return f"{self.instruction}\n\nWrite at most {self.n_words} words."
        return (
            f"Write a summary of {text} in about {self.n_words} words: what {all_of_it} is about, "
            "and its most important points. Write only the summary."
        )


def message(text: str, task: str) -> list[dict[str, str]]:
    """The conversation: one message of the user, in which the text cannot act as instructions."""
    return [{"role": "user", "content": _FRAME.format(text=text, task=task)}]


def notes(answers: Sequence[str]) -> list[str]:
    """Answers about consecutive parts as one text that joins them."""
    return [f"Part {i}:\n{answer.strip()}\n\n" for i, answer in enumerate(answers, 1)]
