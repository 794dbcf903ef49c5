"""Reading what a person types or a pipe brings, message by message."""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tamis.cli.terminal import note

# prompt, what the line begins with -> line; raises EOFError, KeyboardInterrupt
Reader = Callable[[str, str], str]


def interactive() -> bool:
    """Whether a person types here and sees what is written."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def messages(
    status: Callable[[], str],
    draft: Callable[[], str],
    complete: Callable[[str], Iterable[tuple[str, int]]],
) -> Iterator[str]:
    """Messages until the end of input; a final backslash joins lines.

    draft(): what the next one begins with. complete(text): (word, how many characters it stands
    for) of what a line that begins so may go on with. In a terminal with a history and the status
    line, and Ctrl-C drops the message being typed; elsewhere it is raised.
    """
    at_terminal = interactive()
    read = _terminal_reader(status, complete) if at_terminal else _read_line
    while True:
        try:
            text = _message(read, draft())
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            note("(Ctrl-D or /exit leaves)")
            continue
        except EOFError:
            return
        yield text


def _message(read: Reader, draft: str) -> str:
    """The next message, of one line or several."""
    text = read("> ", draft)
    while text.endswith("\\"):
        try:
            more = read(". ", "")
        except EOFError:  # the end of a pipe: what came before it is a message all the same
            break
        text = text[:-1] + "\n" + more
    return text


def _read_line(prompt: str, _draft: str) -> str:
    if sys.stdin.isatty():  # and standard output is not: the prompt must not go there
        sys.stderr.write(prompt)
        sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def _terminal_reader(
    status: Callable[[], str], complete: Callable[[str], Iterable[tuple[str, int]]]
) -> Reader:
    """prompt_toolkit with a history file and the status line, where it is installed."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.document import Document
        from prompt_toolkit.enums import DEFAULT_BUFFER
        from prompt_toolkit.filters import has_focus
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError:
        note('history and line editing need the extra: pip install "tamis[chat]"')
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
        note(f"the history is not kept: {error}")
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
        # A line too long for the terminal goes on without a mark, so that it can be copied.
        prompt_continuation=lambda _width, _line, n_wrapped: "" if n_wrapped else ". ",
    )
    return lambda text, draft: prompt.prompt(text, default=draft, bottom_toolbar=status)
