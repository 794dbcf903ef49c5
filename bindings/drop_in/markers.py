"""Marks that agents put at the head of every prompt anew, and that are left out of it.

A prompt whose head changes begins like none before, so all that was read after the head would be
read again with every turn. What is listed here is of use to the agent or its vendor's server, and
changes with every request. docs/guides/server.md has the same list.
"""

from collections.abc import Callable, Sequence
from typing import Any

MOST_DIGITS = 20
BEGIN, END = "<total_tokens>", " tokens left</total_tokens>"


def without_total_tokens(text: str) -> str:
    """A system prompt without Claude Code's count of tokens left: its end, or whole lines."""
    if BEGIN not in text:
        return text
    lines = [line for line in text.splitlines(keepends=True) if not _is_total(line.strip())]
    found = "".join(lines)
    ended = found.rstrip()
    at = ended.rfind(BEGIN)
    if at >= 0 and _is_total(ended[at:]):
        return ended[:at].rstrip()
    return text if found == text else found.rstrip()


def _is_total(mark: str) -> bool:
    """Whether a text is the mark, with a number in it."""
    if not (mark.startswith(BEGIN) and mark.endswith(END)):
        return False
    number = mark[len(BEGIN) : -len(END)]
    digits = number.replace(",", "").replace("_", "")
    return len(number) <= MOST_DIGITS and digits.isascii() and digits.isdigit()


MARKERS: tuple[Callable[[str], str], ...] = (without_total_tokens,)


def steady(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose first ones, those of the system, are without marks; others stay."""
    found, head = [], True
    for message in messages:
        head = head and message.get("role") == "system"
        content = message.get("content")
        steadied = _steady(content) if head else content
        if steadied or not content or len(messages) == 1:  # a message that was a mark is gone
            found.append(message if steadied == content else message | {"content": steadied})
    return found


def _steady(content: Any) -> Any:
    """The text of a message, or its parts, each without marks."""
    if isinstance(content, str):
        for without in MARKERS:
            content = without(content)
    elif isinstance(content, list) and content:
        content = [_steady_part(part) for part in content]
    return content


def _steady_part(part: Any) -> Any:
    text = part.get("text") if isinstance(part, dict) else None
    return part | {"text": _steady(text)} if isinstance(text, str) else part
