"""The conversation of `tamis chat`: its commands, its messages, and reading from the terminal."""

import argparse
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tamis.cli import common
from tamis.cli.answer import open_answer

COMMANDS = """\
/help            this list
/system TEXT     set the system message (none: remove it) and start again
/reset           forget the conversation
/regen           another answer to the last message
/save FILE       keep the conversation and its state
/load FILE       go on with a kept one
/set NAME VALUE  a sampler setting: temp, top_k, top_p, ...; /set alone shows them
/stats           speed and memory
/ctx             context used
/exit            leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one; Alt-Enter does the same."""

Message = dict[str, str]


class Chat:
    """A conversation: its messages, and a session that holds the tokens of all but the last."""

    def __init__(
        self, engine: Any, session: Any, params: Any, arguments: argparse.Namespace
    ) -> None:
        self._engine, self._session, self._params = engine, session, params
        self._max_tokens, self._plain = arguments.max_tokens, arguments.plain
        self._messages: list[Message] = []
        if arguments.system:
            self._messages.append({"role": "system", "content": arguments.system})
        self._speed = 0.0

    @property
    def messages(self) -> list[Message]:
        """A copy of the conversation so far."""
        return [dict(message) for message in self._messages]

    def status(self) -> str:
        """The status line: context used and speed of the last answer."""
        used = f"{self._session.n_past}/{self._session.n_ctx} tokens"
        return f"{used}, {self._speed:.1f} tok/s" if self._speed else used

    def handle(self, line: str) -> bool:
        """Answer a message or do what a command says; False where the conversation ends."""
        text = line.strip()
        if text in ("/exit", "/quit"):
            return False
        try:
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._ask(line)
        except KeyboardInterrupt:
            common.note("\n[stopped]")
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            common.note(f"error: {error.filename or ''}: {error.strerror or error}")
        except (ValueError, RuntimeError, MemoryError) as error:
            common.note(f"error: {error}")
        return True

    def _command(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        action: Callable[[str], None] | None = getattr(self, f"_do_{name}", None)
        if action is None:
            raise ValueError(f"/{name} is not a command; /help lists them")
        action(rest.strip())

    def _ask(self, text: str) -> None:
        """Append a message and its answer; where there is no answer, neither is kept."""
        self._reply([*self._messages, {"role": "user", "content": text}])

    def _reply(self, messages: list[Message]) -> None:
        """Stream an answer to `messages`; it counts as said even where Ctrl-C cut it short.

        On an error, or Ctrl-C before the first token, the conversation is as it was before.
        """
        ids = self._engine.encode_chat(messages)
        # What the session holds already of the conversation is not read again; at least one token
        # is, because its logits are needed.
        same = _common_prefix(self._session.tokens, ids[:-1])
        self._session.truncate(same)
        progress = common.Progress()
        pieces = self._session.generate(
            ids[same:], self._params, max_tokens=self._max_tokens, progress=progress.tokens
        )
        said: list[Any] = []
        try:
            self._stream(pieces, said)
        except KeyboardInterrupt:
            if not said:
                raise
            common.note("[stopped]")
        finally:
            progress.clear()
        answer = "".join(piece.text for piece in said)
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        if said and said[-1].finish == "length":
            common.note("[cut short: the context or --max-tokens is used up]")

    def _stream(self, pieces: Any, said: list[Any]) -> None:
        """Show the pieces as they come and append them to `said`."""
        start = 0.0
        try:
            with contextlib.closing(pieces), open_answer(plain=self._plain) as answer:
                for piece in pieces:
                    start = start or time.perf_counter()
                    said.append(piece)
                    answer.write(piece.text)
        finally:
            spent = time.perf_counter() - start
            self._speed = (len(said) - 1) / spent if len(said) > 1 else 0.0

    def _do_help(self, _rest: str) -> None:
        common.note(COMMANDS)

    def _do_system(self, rest: str) -> None:
        self._messages = [{"role": "system", "content": rest}] if rest else []
        self._session.truncate(0)

    def _do_reset(self, _rest: str) -> None:
        self._messages = [m for m in self._messages if m["role"] == "system"]
        self._session.truncate(0)

    def _do_regen(self, _rest: str) -> None:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            raise ValueError("there is no answer to replace")
        self._reply(self._messages[:-1])

    def _do_save(self, rest: str) -> None:
        if not rest:
            raise ValueError("/save needs a file name")
        self._session.save(rest)
        Path(f"{rest}.json").write_text(json.dumps(self._messages), encoding="utf-8")
        common.note(f"kept in {rest} and {rest}.json")

    def _do_load(self, rest: str) -> None:
        if not rest:
            raise ValueError("/load needs a file name")
        messages = _read_messages(Path(f"{rest}.json"))
        self._session.load(rest)
        self._messages = messages
        common.note(f"{len(messages)} messages, {self._session.n_past} tokens")

    def _do_set(self, rest: str) -> None:
        fields = {f.name: getattr(self._params, f.name) for f in dataclasses.fields(self._params)}
        known = {k: v for k, v in fields.items() if v is None or isinstance(v, int | float)}
        name, _, value = rest.partition(" ")
        if not rest:
            common.note(", ".join(f"{k} {v}" for k, v in known.items()))
            return
        if name not in known or not value:
            raise ValueError(f"/set NAME VALUE with one of: {', '.join(known)}")
        new = _parsed(name, value.strip(), known[name])
        self._params = dataclasses.replace(self._params, **{name: new})

    def _do_stats(self, _rest: str) -> None:
        plan = self._engine.memory_plan(self._session.n_ctx)
        common.note(
            f"{self.status()}; {self._engine.n_threads} threads; "
            f"weights {plan.weights / common.MIB:.0f} MiB, KV {plan.kv / common.MIB:.0f} MiB, "
            f"scratch {plan.workspace / common.MIB:.0f} MiB"
        )

    def _do_ctx(self, _rest: str) -> None:
        common.note(self.status())


def _parsed(name: str, value: str, old: Any) -> Any:
    """The value of a setting in the type that it has."""
    if isinstance(old, bool):
        words = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
        if value.lower() not in words:
            raise ValueError(f"{name} is on or off, not {value!r}")
        return words[value.lower()]
    kind, expected = (float, "a number") if isinstance(old, float) else (int, "a whole number")
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name} is {expected}, not {value!r}") from None


def _read_messages(path: Path) -> list[Message]:
    """The messages of a kept conversation. Raises OSError, ValueError."""
    wrong = ValueError(f"{path} is not a kept conversation, or it is damaged")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise wrong from None
    fields = {"role", "content"}
    for message in data if isinstance(data, list) else [None]:
        if not isinstance(message, dict) or message.keys() != fields:
            raise wrong
        if not all(isinstance(value, str) for value in message.values()):
            raise wrong
    return data


def _common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def messages(status: Callable[[], str]) -> Iterator[str]:
    """Messages from the terminal, with history, or from a pipe; a final backslash joins lines."""
    read = _terminal_reader(status) if sys.stdin.isatty() else _pipe_reader
    while True:
        try:
            text = read("> ")
            while text.endswith("\\"):
                text = text[:-1] + "\n" + read(". ")
        except KeyboardInterrupt:
            common.note("(Ctrl-D or /exit leaves)")
            continue
        except EOFError:
            return
        yield text


def _pipe_reader(_prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _terminal_reader(status: Callable[[], str]) -> Callable[[str], str]:
    """prompt_toolkit with a history file and the status line, where it is installed."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings
    except ImportError:
        common.note('history and line editing need the extra: pip install "tamis[chat]"')
        return input
    folder = Path.home() / ".local" / "state" / "tamis"
    history: History = InMemoryHistory()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "history").touch(mode=0o600)
        history = FileHistory(str(folder / "history"))
    except OSError as error:
        common.note(f"the history is not kept: {error}")
    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    prompt: PromptSession[str] = PromptSession(history=history, key_bindings=keys)
    return lambda text: prompt.prompt(text, bottom_toolbar=status)
