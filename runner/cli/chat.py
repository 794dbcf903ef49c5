"""`tamis chat`: talk in the terminal. Ctrl-C stops the answer, Ctrl-D ends the program."""

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

HELP = "talk with a model in the terminal"
COMMANDS = """\
/help            this list
/system TEXT     set the system message and start again
/reset           forget the conversation
/regen           another answer to the last message
/save FILE       keep the conversation and its state
/load FILE       go on with a kept one
/set NAME VALUE  a sampler setting: temp, top_k, top_p, min_p, seed, ...
/stats           speed and memory
/ctx             context used
/exit            leave (also Ctrl-D); a line that ends in \\ goes on in the next"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this command."""
    common.add_model_arguments(parser)
    common.add_sampling_arguments(parser)
    parser.add_argument("--system", help="a system message")
    parser.add_argument("-n", "--max-tokens", type=int, help="longest answer in tokens")


def run(arguments: argparse.Namespace) -> int:
    """Read messages and commands until the end of input."""
    progress = common.Progress()
    params = common.sampler_params(arguments)
    engine = common.load_engine(arguments, progress)
    session = common.open_session(engine, arguments, progress)
    chat = Chat(engine, session, params, arguments)
    common.note(f"{engine.path.name}, context {session.n_ctx} tokens. /help lists the commands.")
    for line in _lines(chat.status):
        if not chat.handle(line):
            break
    engine.close()
    return 0


class Chat:
    """A conversation: its messages, and a session that holds the tokens of all but the last."""

    def __init__(self, engine: Any, session: Any, params: Any, arguments: Any) -> None:
        self._engine, self._session, self._params = engine, session, params
        self._max_tokens = arguments.max_tokens
        self._messages: list[dict[str, str]] = []
        if arguments.system:
            self._messages.append({"role": "system", "content": arguments.system})
        self._speed = 0.0

    def status(self) -> str:
        """The status line: speed of the last answer and context used."""
        used = f"{self._session.n_past}/{self._session.n_ctx} tokens"
        return f"{used}, {self._speed:.1f} tok/s" if self._speed else used

    def handle(self, line: str) -> bool:
        """Answer a message or do what a command says; False where the conversation ends."""
        text = line.strip()
        if text in ("/exit", "/quit"):
            return False
        if not text:
            return True
        try:
            if text.startswith("/"):
                self._command(text)
            else:
                self._ask(line)
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            common.note(f"error: {error}")
        return True

    def _command(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        action: Callable[[str], None] | None = getattr(self, f"_do_{name}", None)
        if action is None:
            raise ValueError(f"/{name} is not a command; /help lists them")
        action(rest.strip())

    def _ask(self, text: str) -> None:
        """Append a message and stream the answer; on an error nothing is kept."""
        self._messages.append({"role": "user", "content": text})
        try:
            answer = self._answer()
        except BaseException:
            self._messages.pop()
            raise
        self._messages.append({"role": "assistant", "content": answer})

    def _answer(self) -> str:
        ids = self._engine.encode_chat(self._messages)
        held = self._session.tokens
        # What the session holds already of the conversation is not read again; at least one token
        # is, because its logits are needed.
        same = _common_prefix(held, ids[:-1])
        self._session.truncate(same)
        parts: list[str] = []
        progress, start = common.Progress(), 0.0
        pieces = self._session.generate(
            ids[same:], self._params, max_tokens=self._max_tokens, progress=progress.tokens
        )
        with contextlib.suppress(KeyboardInterrupt), contextlib.closing(pieces):
            for piece in pieces:
                start = start or time.perf_counter()
                parts.append(piece.text)
                sys.stdout.write(piece.text)
                sys.stdout.flush()
                if piece.finish == "length":
                    common.note("\n[the answer stops here: context or --max-tokens is used up]")
        sys.stdout.write("\n")
        sys.stdout.flush()
        spent = time.perf_counter() - start
        self._speed = (len(parts) - 1) / spent if len(parts) > 1 else 0.0
        return "".join(parts)

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
        old = self._messages.pop()
        try:
            answer = self._answer()
        except BaseException:
            self._messages.append(old)
            raise
        self._messages.append({"role": "assistant", "content": answer})

    def _do_save(self, rest: str) -> None:
        if not rest:
            raise ValueError("/save needs a file name")
        self._session.save(rest)
        Path(f"{rest}.json").write_text(json.dumps(self._messages), encoding="utf-8")
        common.note(f"kept in {rest} and {rest}.json")

    def _do_load(self, rest: str) -> None:
        if not rest:
            raise ValueError("/load needs a file name")
        messages = json.loads(Path(f"{rest}.json").read_text(encoding="utf-8"))
        self._session.load(rest)
        self._messages = messages
        common.note(f"{len(messages)} messages, {self._session.n_past} tokens")

    def _do_set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        known = {f.name: getattr(self._params, f.name) for f in dataclasses.fields(self._params)}
        if name not in known or not value:
            raise ValueError(f"/set NAME VALUE with one of: {', '.join(known)}")
        kind = float if isinstance(known[name], float) else int
        self._params = dataclasses.replace(self._params, **{name: kind(value)})

    def _do_stats(self, _rest: str) -> None:
        plan = self._engine.memory_plan(self._session.n_ctx)
        common.note(
            f"{self.status()}; attention {self._session.attn}; {self._engine.n_threads} threads; "
            f"weights {plan.weights / common.MIB:.0f} MiB, KV {plan.kv / common.MIB:.0f} MiB"
        )

    def _do_ctx(self, _rest: str) -> None:
        common.note(self.status())


def _common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _lines(status: Callable[[], str]) -> Iterator[str]:
    """Messages from the terminal, with history, or from a pipe; a final backslash joins lines."""
    read = _terminal_reader(status) if sys.stdin.isatty() else _pipe_reader
    while True:
        try:
            line = read("> ")
            while line.endswith("\\"):
                line = line[:-1] + "\n" + read(". ")
        except KeyboardInterrupt:
            common.note("(Ctrl-D or /exit leaves)")
            continue
        except EOFError:
            return
        yield line


def _pipe_reader(_prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")


def _terminal_reader(status: Callable[[], str]) -> Callable[[str], str]:
    """prompt_toolkit with a history file and the status line, where it is installed."""
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory
    except ImportError:
        common.note('history and line editing need the extra: pip install "tamis[chat]"')
        return input
    folder = Path.home() / ".local" / "state" / "tamis"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    prompt: PromptSession[str] = PromptSession(history=FileHistory(str(folder / "history")))
    return lambda text: prompt.prompt(text, bottom_toolbar=status)
