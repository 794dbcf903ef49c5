"""Reads messages from a terminal or a pipe."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tamis.cli.terminal import say

# (prompt, initial text) -> line; raises EOFError, KeyboardInterrupt
Reader = Callable[[str, str], str]


def interactive() -> bool:
    """Whether standard input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask(question: str) -> str:
    """The answer to a question at a terminal, in lower case; "" at the end of input."""
    sys.stderr.flush()
    try:
        return input(question).strip().lower()
    except EOFError:
        return ""


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """A context in which a terminal does not show what is typed; the next prompt has it."""
    if not sys.stdin.isatty():
        yield
        return
    import termios

    before = termios.tcgetattr(sys.stdin)
    quiet = list(before)
    quiet[3] &= ~(termios.ECHO | termios.ECHONL)
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def messages(
    status: Callable[[], str],
    draft: Callable[[], str],
    complete: Callable[[str], Iterable[tuple[str, int]]],
) -> Iterator[str]:
    """Yield messages until the end of input; a final backslash joins lines.

    draft(): the initial text of the next message. complete(text): completions of a line that begins
    with text, as (word, number of characters that it replaces). In a terminal there are a history
    and a status line, and Ctrl-C drops the message being typed; elsewhere it is raised.
    """
    at_terminal = interactive()
    read = _terminal_reader(status, complete) if at_terminal else _read_line
    while True:
        try:
            text = _message(read, draft())
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            say("(Ctrl-D or /exit leaves)")
            continue
        except EOFError:
            return
        yield text


def _message(read: Reader, draft: str) -> str:
    """The next message, of one or several lines."""
    text = read("> ", draft)
    while text.endswith("\\"):
        try:
            more = read(". ", "")
        except EOFError:  # the end of a pipe: the text before it is a message nevertheless
            break
        text = text[:-1] + "\n" + more
    return text


def _read_line(prompt: str, _draft: str) -> str:
    if sys.stdin.isatty():  # standard output is not a terminal: the prompt must not go there
        sys.stderr.write(prompt)
        sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _terminal_reader(
    status: Callable[[], str], complete: Callable[[str], Iterable[tuple[str, int]]]
) -> Reader:
    """A reader with prompt_toolkit, a history file and the status line, if it is installed."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.document import Document
        from prompt_toolkit.enums import DEFAULT_BUFFER
        from prompt_toolkit.filters import has_focus
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError:
        say('history and line editing need the extra: pip install "tamis[chat]"')
        return lambda prompt, _draft: input(prompt)

    class Words(Completer):
        def get_completions(self, document: Document, _event: object) -> Iterator[Completion]:
            for word, n in complete(document.text_before_cursor):
                yield Completion(word, start_position=-n)

    folder = Path.home() / ".local" / "state" / "tamis"
    history: History = InMemoryHistory()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "history").touch(mode=0o600)
        history = FileHistory(str(folder / "history"))
    except OSError as error:
        say(f"the history is not kept: {error}")
    keys = KeyBindings()
    keys.add("enter", filter=has_focus(DEFAULT_BUFFER))(
        lambda event: event.current_buffer.validate_and_handle()
    )
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    prompt: PromptSession[str] = PromptSession(
        history=history,
        key_bindings=keys,
        multiline=True,
        completer=Words(),
        complete_while_typing=False,
        # A line too long for the terminal wraps without a mark, so that it can be copied.
        prompt_continuation=lambda _width, _line, n_wrapped: "" if n_wrapped else ". ",
    )
    return lambda text, draft: prompt.prompt(text, default=draft, bottom_toolbar=status)
