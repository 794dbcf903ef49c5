"""The conversation of `tamis chat`: its messages, its commands, what it keeps in files."""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tamis.cli import audit, common, lines, one_line
from tamis.cli.answer import open_answer
from tamis.private_files import write_whole

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
Ctrl-C stops an answer and forgets it and its question. A line that ends in \\ goes on
in the next one; Alt-Enter does the same."""

Message = dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """What the last answer took: tokens read, those that were held already, tokens written."""

    n_read: int = 0
    n_reused: int = 0
    read_s: float = 0.0
    n_written: int = 0
    write_s: float = 0.0  # from the first token on

    @property
    def read(self) -> float:
        """Tokens a second of the prompt."""
        return self.n_read / self.read_s if self.read_s else 0.0

    @property
    def written(self) -> float:
        """Tokens a second of the answer."""
        return (self.n_written - 1) / self.write_s if self.n_written > 1 else 0.0


class Chat:
    """A conversation, and a session that holds the tokens of most of it.

    The messages are what counts: tokens that the session lacks are read again.
    `failed` is whether any message or command ended in an error.
    """

    def __init__(
        self, engine: Any, session: Any, params: Any, arguments: argparse.Namespace
    ) -> None:
        self._engine, self._session, self._params = engine, session, params
        self._max_tokens, self._plain = arguments.max_tokens, arguments.plain
        self._shifts = arguments.context_shift
        self._messages: list[Message] = []
        if arguments.system:
            self._messages.append({"role": "system", "content": arguments.system})
        self._speed = Speed()
        self.failed = False

    @property
    def messages(self) -> list[Message]:
        """A copy of the conversation so far."""
        return [dict(message) for message in self._messages]

    def status(self) -> str:
        """The status line: context used and speed of the last answer."""
        n_past, n_ctx = self._session.n_past, self._session.n_ctx
        used = f"context {n_past}/{n_ctx} ({100 * n_past // n_ctx} %)"
        return f"{used}, {self._speed.written:.1f} tok/s" if self._speed.n_written > 1 else used

    def handle(self, line: str) -> bool:
        """Answer a message or do what a command says; False where the conversation ends.

        On an error or Ctrl-C, which are reported here, the conversation is as it was before. Where
        nobody types, Ctrl-C is raised: it is for the program and not for one answer.
        """
        text = line.strip()
        if text in ("/exit", "/quit"):
            return False
        try:
            if wrong := common.not_utf8(line):
                raise ValueError(f"the message is {wrong}")
            if text.startswith("/"):
                self._command(text)
            elif text:
                self._reply([*self._messages, {"role": "user", "content": line}])
        except KeyboardInterrupt:
            if not lines.interactive():
                raise
            common.note("[stopped: the conversation is as it was before]")
        except BrokenPipeError:
            raise
        except (ValueError, RuntimeError, MemoryError, OSError) as error:
            self.failed = True
            hint = "; /reset forgets the conversation" if "n_ctx" in str(error) else ""
            common.note(f"error: {one_line(error)}{hint}")
        return True

    def _command(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        action: Callable[[str], None] | None = getattr(self, f"_do_{name}", None)
        if action is None:
            raise ValueError(f"/{name} is not a command; /help lists them")
        action(rest.strip())

    def _reply(self, messages: list[Message]) -> None:
        """Stream an answer to `messages`, which then are the conversation."""
        ids = self._engine.encode_chat(messages)
        if self._shifts and len(ids) > self._session.n_ctx * 3 // 4:
            messages, ids = self._shortened(messages, ids)
        # What the session holds already of the conversation is not read again; at least one token
        # is, because its logits are needed.
        same = _common_prefix(self._session.tokens, ids[:-1])
        self._session.truncate(same)
        progress = common.Progress()
        pieces = self._session.generate(
            ids[same:], self._params, max_tokens=self._max_tokens, progress=progress.tokens
        )
        start = time.perf_counter()
        try:
            with contextlib.closing(pieces):
                said, first = self._stream(pieces)
        except BaseException:
            self._session.truncate(same)
            raise
        finally:
            progress.clear()
        end = time.perf_counter()
        self._speed = Speed(len(ids) - same, same, first - start, len(said), end - first)
        answer = "".join(piece.text for piece in said)
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        if said and said[-1].finish == "length":
            common.note("[cut short: the context or --max-tokens is used up]")
        if self._session.audit is not None:
            audit.write(self._session.audit)
            self._session.audit.reset()

    def _shortened(
        self, messages: list[Message], ids: list[int]
    ) -> tuple[list[Message], list[int]]:
        """The conversation without its oldest questions and answers, and its tokens.

        Half the context, or the last message where that is more. The session forgets theirs.
        """
        first, kept, short = int(messages[0]["role"] == "system"), messages, ids
        while len(short) > self._session.n_ctx // 2 and len(kept) - first > 2:
            kept = [*kept[:first], *kept[first + 2 :]]
            short = self._engine.encode_chat(kept)
        if kept == messages:
            return messages, ids
        same, end = _common_prefix(ids, short), _common_prefix(self._session.tokens, ids)
        n_gone = len(ids) - len(short)
        if ids[same + n_gone :] == short[same:] and end > same + n_gone:
            self._session.truncate(end)
            self._session.remove(same, same + n_gone)
        n = len(messages) - len(kept)
        common.note(
            f"[context full: the oldest {n} messages are forgotten, but for what later ones have "
            "read of them]"
        )
        return kept, short

    def _stream(self, pieces: Iterator[Any]) -> tuple[list[Any], float]:
        """Show the pieces as they come: all of them, and when the first one came."""
        # The prompt is read before the first piece: its progress line needs the screen.
        said = list(itertools.islice(pieces, 1))
        first = time.perf_counter()
        with open_answer(plain=self._plain) as answer:
            for piece in said:
                answer.write(piece.text)
            for piece in pieces:
                said.append(piece)
                answer.write(piece.text)
        return said, first

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
        kept = {"messages": self._messages, "settings": self._settings()}
        with write_whole(Path(f"{rest}.json")) as file:
            file.write(json.dumps(kept).encode())
        common.note(f"kept in {rest} and {rest}.json")

    def _do_load(self, rest: str) -> None:
        if not rest:
            raise ValueError("/load needs a file name")
        messages, params = self._read_kept(Path(f"{rest}.json"))
        self._session.load(rest)
        self._messages, self._params = messages, params
        common.note(
            f"{len(messages)} messages, {self._session.n_past} tokens; settings as they were"
        )

    def _read_kept(self, path: Path) -> tuple[list[Message], Any]:
        """Messages and sampler settings of a kept conversation. Raises OSError, ValueError."""
        wrong = ValueError(f"{path} is not a kept conversation, or it is damaged")
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            messages, settings = kept["messages"], kept["settings"]
            if not _are_messages(messages) or not _same_kinds(settings, self._settings()):
                raise wrong
            return messages, dataclasses.replace(self._params, **settings)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise wrong from None

    def _settings(self) -> dict[str, Any]:
        """The sampler settings that are numbers or switches: those that /set knows."""
        fields = dataclasses.fields(self._params)
        values = {field.name: getattr(self._params, field.name) for field in fields}
        return {k: v for k, v in values.items() if v is None or isinstance(v, int | float)}

    def _do_set(self, rest: str) -> None:
        known = self._settings()
        name, _, value = rest.partition(" ")
        if not rest:
            common.note(", ".join(f"{k} {v}" for k, v in known.items()))
            return
        if name not in known or not value:
            raise ValueError(f"/set NAME VALUE with one of: {', '.join(known)}")
        new = _parsed(name, value.strip(), known[name])
        self._params = dataclasses.replace(self._params, **{name: new})

    def _do_stats(self, _rest: str) -> None:
        session, last = self._session, self._speed
        plan = self._engine.memory_plan(
            session.n_ctx,
            n_ubatch=session.n_ubatch,
            type_k=session.kv_types.k,
            type_v=session.kv_types.v,
            kv_ram=session.kv_ram,
            kv_vram=session.kv_vram,
        )
        common.note(
            f"prompt: {last.n_read} tokens read at {last.read:.1f} tok/s, {last.n_reused} reused\n"
            f"answer: {last.n_written} tokens at {last.written:.1f} tok/s, "
            f"{self._engine.n_threads} threads\n"
            f"{self.status()}\n"
            f"memory: weights {plan.weights / common.MIB:.0f} MiB, "
            f"KV {plan.kv / common.MIB:.0f} MiB, scratch {plan.workspace / common.MIB:.0f} MiB"
            + _tier_line(plan, session.kv_counts)
        )

    def _do_ctx(self, _rest: str) -> None:
        common.note(self.status())


def _tier_line(plan: Any, counts: Any) -> str:
    """What the file of keys and values, or RAM, was asked for; nothing where there is neither."""
    if counts is None:
        return ""
    mib = common.MIB
    if plan.host:
        return (
            f"\nRAM: KV of {plan.host / mib:.0f} MiB, {counts.n_read / mib:.0f} MiB brought to the "
            f"GPU; {100 * counts.hit_rate:.1f} % of {counts.n_hit + counts.n_miss} pages were there"
        )
    return (
        f"\ndisk: file of {plan.disk / mib:.0f} MiB, {counts.n_written / mib:.0f} MiB written, "
        f"{counts.n_read / mib:.0f} MiB read; {100 * counts.hit_rate:.1f} % of "
        f"{counts.n_hit + counts.n_miss} units were in memory, {counts.n_ahead} read ahead; "
        f"units hold {counts.amplification:.2f} times what was chosen"
    )


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


def _are_messages(data: Any) -> bool:
    """Whether the value of a file is a list of messages."""
    return isinstance(data, list) and all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(text, str) and _is_text(text) for text in message.values())
        for message in data
    )


def _is_text(text: str) -> bool:
    """Whether UTF-8 can write it: JSON can name half a character."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _same_kinds(settings: Any, known: dict[str, Any]) -> bool:
    """Whether settings of a file are those that are known, each a number or a switch as it is."""
    return (
        isinstance(settings, dict)
        and settings.keys() == known.keys()
        and all(_same_kind(settings[name], old) for name, old in known.items())
    )


def _same_kind(value: Any, old: Any) -> bool:
    if isinstance(value, float | int) and not isinstance(value, bool):
        finite = math.isfinite(value) or isinstance(old, float)
        return finite and not isinstance(old, bool)
    return value is None or (isinstance(value, bool) and isinstance(old, bool))


def _common_prefix(a: list[int], b: list[int]) -> int:
    """How many leading tokens two sequences share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
