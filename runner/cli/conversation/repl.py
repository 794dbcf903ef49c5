"""The conversation of `tamis chat`: its messages, its commands and its files."""

import argparse
import base64
import contextlib
import copy
import dataclasses
import itertools
import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tamis.cli.conversation import lines
from tamis.cli.options import common, context, did_you_mean, draft, samplers
from tamis.cli.options.errors import one_line
from tamis.cli.terminal import audit, say, table
from tamis.cli.terminal.answer import (
    LEAST,
    LONGEST,
    TIMES,
    circle,
    open_answer,
    repetition,
    visible,
)
from tamis.cli.terminal.progress import columns
from tamis.platform.private_files import write_whole
from tamis.vision.held import whole_pictures

COMMANDS = {
    "help": ("", "this list"),
    "system": ("TEXT", "set the system message (none: remove it) and start again"),
    "clear": ("", "clear the conversation, not the system message; also /reset"),
    "retry": ("", "another answer to the last message; also /regen"),
    "edit": ("[TEXT]", "ask the last question anew, changed"),
    "read": ("FILE", "read a text, PDF or HTML file now, to ask about it next"),
    "image": ("FILE", "show a picture, to ask about it next"),
    "tools": ("", "the tools of the servers of --mcp"),
    "think": ("[on|off]", "show the last thoughts, or all from now on"),
    "copy": ("", "copy the last answer to the clipboard"),
    "save": ("FILE", "keep the conversation and its state"),
    "load": ("FILE", "go on with a kept one"),
    "set": ("[NAME VALUE]", "a sampler setting; alone: a table of them"),
    "attn": ("[METHOD]", "what decode steps read: see tamis methods"),
    "model": ("[NAME]", "go on with another model"),
    "stats": ("", "speed and memory"),
    "ctx": ("", "context used"),
    "exit": ("", "leave (also Ctrl-D)"),
}
ALIASES = {"reset": "clear", "regen": "retry"}
KEYS = """\
Ctrl-C stops an answer: what is written of it stays. A line that ends in \\ goes on in the \
next one; Alt-Enter does the same. Tab completes, Ctrl-R searches what was typed."""

Message = dict[str, Any]  # texts, but for the list tool_calls
LOOKED_AT = 16  # tokens after which an answer is looked at for a cycle
REACH = max(LEAST, LONGEST * TIMES)  # tokens that it may span
TAIL = 32  # tokens of a prompt's end, which show whether a thought is open already
MOST_ROUNDS = 16  # answers to one question that end in calls of tools


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """Speeds of the last answer: tokens read, tokens held already, tokens generated."""

    n_read: int = 0
    n_reused: int = 0
    read_s: float = 0.0
    n_written: int = 0
    write_s: float = 0.0  # seconds from the first token on

    @property
    def read(self) -> float:
        """Tokens per second of the prompt."""
        return self.n_read / self.read_s if self.read_s else 0.0

    @property
    def written(self) -> float:
        """Tokens per second of the answer."""
        return (self.n_written - 1) / self.write_s if self.n_written > 1 else 0.0


class Chat:
    """A conversation, and a session whose KV cache holds most of it.

    The messages are authoritative: tokens that the session lacks are read again. `failed` is
    whether any message or command ended in an error.
    """

    def __init__(
        self,
        engine: Any,
        session: Any,
        params: Any,
        arguments: argparse.Namespace,
        drafts: Any = None,
        tools: Any = None,
    ) -> None:
        """Begin a conversation.

        drafts: an engine.drafting.Draft for the first model, or None; tools: a
        conversation.tools.Tools, or None.
        """
        self._tools = tools
        self._engine, self._session, self._params = engine, session, params
        self._first_params = params
        self._arguments, self._drafts = arguments, drafts
        n = arguments.max_tokens
        self._max_tokens, self._plain = None if n == -1 else n, arguments.plain
        self._shifts = arguments.context_shift
        self._messages: list[Message] = []
        if arguments.system:
            self._messages.append({"role": "system", "content": arguments.system})
        self._speed = Speed()
        self._texts: list[str] = []  # texts of files for the next question
        # the number of messages that stay when the next question replaces later ones
        self._replaced: int | None = None
        self._draft = ""  # the initial text of the next prompt
        self._thoughts, self._shows_thoughts = "", False
        self.failed = False
        self._follow(engine)

    def _follow(self, engine: Any) -> None:
        """Take what depends on an engine: the form of answers, and the grammar's vocabulary."""
        self._engine = engine
        self.completes = engine.vocab.chat_template is None
        self._format: Any = None
        if not self.completes:
            from tamis.text.chat_format import ChatFormat

            self._format = ChatFormat.of(engine.chat_template)
        self._grammar = samplers.grammar(self._arguments, engine)

    @property
    def engine(self) -> Any:
        """The current engine."""
        return self._engine

    @property
    def messages(self) -> list[Message]:
        """A copy of the conversation so far."""
        return [dict(message) for message in self._messages]

    def take_draft(self) -> str:
        """The initial text of the next prompt, which is then cleared."""
        draft, self._draft = self._draft, ""
        return draft

    def status(self) -> str:
        """The status line: context used and speed of the last answer."""
        n_past, n_ctx = self._session.n_past, self._session.n_ctx
        used = f"context {n_past}/{n_ctx} ({100 * n_past // n_ctx} %)"
        return f"{used}, {self._speed.written:.1f} tok/s" if self._speed.n_written > 1 else used

    def handle(self, line: str) -> bool:
        """Answer a message or run a command; returns False if the conversation ends.

        An error is reported here and leaves the conversation unchanged. Ctrl-C keeps the question
        and the text generated so far. Without a user at a terminal it is raised, as it ends the
        program.
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
                self._ask(line)
        except KeyboardInterrupt:
            if not lines.interactive():
                raise
            say("[stopped: the conversation is as it was before]")
        except BrokenPipeError:
            raise
        except (ValueError, RuntimeError, MemoryError, OSError, ImportError) as error:
            self.failed = True
            hint = "; /clear empties the conversation" if "n_ctx" in str(error) else ""
            say(f"error: {one_line(error)}{hint}")
        return True

    def _command(self, text: str) -> None:
        name, _, rest = text[1:].partition(" ")
        name = ALIASES.get(name, name)
        if name not in COMMANDS:
            close = did_you_mean(name, COMMANDS).replace("mean ", "mean /")
            raise ValueError(f"/{name} is not a command; /help lists them{close}")
        action: Callable[[str], None] = getattr(self, f"_do_{name}")
        action(rest.strip())

    def _ask(self, line: str) -> None:
        """Answer a question, together with the texts of /read files.

        It replaces a question being edited.
        """
        kept = self._messages if self._replaced is None else self._messages[: self._replaced]
        content = "\n\n".join([*self._texts, line])
        self._reply([*kept, {"role": "user", "content": content}])
        self._texts, self._replaced = [], None

    def _reply(self, messages: list[Message]) -> None:
        """Stream an answer to `messages`, which then are the conversation.

        Tools that it calls are asked, and the model answers again, as the conversation was before
        if anything fails.
        """
        before = self._messages
        try:
            for _ in range(MOST_ROUNDS):
                calls = self._answer(messages)
                if not calls:
                    return
                messages = self._messages = [*self._messages, *self._tools.results(calls)]
        except BaseException:
            self._messages = before
            raise
        say(f"[{MOST_ROUNDS} rounds of calls; /retry goes on]")

    def _answer(self, messages: list[Message]) -> list[dict[str, Any]]:
        """Stream one answer, which joins `messages` as the conversation; returns its calls."""
        ids = self._encode(messages)
        if self._shifts and len(ids) > self._session.n_ctx * 3 // 4:
            messages, ids = self._shortened(messages, ids)
        # Only the part that the session lacks is read; at least one token, for its logits.
        same = whole_pictures(ids, _common_prefix(self._session.tokens, ids[:-1]))
        self._session.truncate(same)
        progress = common.Progress()
        writer = draft.drafting(self._session, self._drafts, self._arguments)
        parser = self._parser(ids)
        pieces = writer.generate(
            ids[same:],
            self._params,
            max_tokens=self._max_tokens,
            grammar=copy.deepcopy(self._grammar),
            progress=progress.reading(len(ids) - same, same),
            shown=self._control_tokens(parser),
        )
        shown = Shown(parser, self._plain, thoughts=self._shows_thoughts)
        start, calls = time.perf_counter(), list[dict[str, Any]]()
        try:
            with contextlib.closing(pieces), lines.without_echo():
                shown.stream(pieces)
            calls = shown.calls
        except KeyboardInterrupt:
            if not shown.text or not lines.interactive():
                self._session.truncate(same)
                raise
            say("[stopped; /retry answers again]")
        except BaseException:
            self._session.truncate(same)
            raise
        finally:
            progress.clear()
        end, first = time.perf_counter(), shown.first
        self._speed = Speed(len(ids) - same, same, first - start, len(shown.said), end - first)
        answer: Message = {"role": "assistant", "content": shown.text}
        self._messages = [*messages, answer | ({"tool_calls": calls} if calls else {})]
        self._thoughts = shown.thoughts
        if shown.said and shown.said[-1].finish == "length":
            say("[cut short: the context or --max-tokens is used up]")
            if hint := repetition(shown.said, self._params.temp):
                say(f"[{hint}: /set temp 0.7]")
        if shown.period:
            say(
                f"[ended: it wrote the same {shown.period} tokens again and again; /retry answers "
                "again]"
            )
        if self._session.audited:
            audit.write(self._session.audit, every_head=self._arguments.audit_table)
            self._session.audit.reset()
        return calls

    def _parser(self, ids: list[int]) -> Any:
        """The parser of thoughts and calls of an answer; None if there are neither."""
        if self._tools is not None:
            return self._tools.parser(self._engine, self._end_of(ids))
        if self._format is None or self._format.think is None:
            return None
        from tamis.text.tool_calls import OutputParser

        return OutputParser(self._format, prompt=self._end_of(ids))

    def _control_tokens(self, parser: Any) -> frozenset[int]:
        """The tokens whose text a parser needs though they are control tokens."""
        encode = self._engine.tokenizer.encode
        marks = () if parser is None else parser.marks
        found = [encode(mark, add_special=False, parse_special=True) for mark in marks]
        return frozenset(ids[0] for ids in found if len(ids) == 1)

    def _end_of(self, ids: list[int]) -> str:
        """The text of a prompt's end, with its control tokens."""
        piece = self._engine.tokenizer.piece
        end = b"".join(piece(i, special=True) for i in ids[-TAIL:])
        return end.decode("utf-8", "replace")

    def _encode(self, messages: list[Message]) -> list[int]:
        """Token ids of the conversation; for a base model those of its concatenated texts."""
        ids: list[int]
        if self.completes:
            ids = self._engine.encode_marked("".join(m["content"] for m in messages))
        elif self._tools is not None or any(m["role"] == "tool" for m in messages):
            from tamis.bindings.drop_in.chat import ChatFormat

            schemas = [] if self._tools is None else self._tools.schemas
            ids = ChatFormat(self._engine, None).prompt(messages, schemas).ids
        else:
            ids = self._engine.encode_chat(messages)
        return ids

    def _shortened(
        self, messages: list[Message], ids: list[int]
    ) -> tuple[list[Message], list[int]]:
        """The conversation without its oldest questions and answers, and its tokens.

        It keeps half the context, or the last message if that is longer. The session drops the same
        tokens.
        """
        first, kept, short = int(messages[0]["role"] == "system"), messages, ids
        while len(short) > self._session.n_ctx // 2:
            after = (i for i, m in enumerate(kept) if i > first and m["role"] == "user")
            if (end := next(after, None)) is None:
                break
            kept = [*kept[:first], *kept[end:]]
            short = self._encode(kept)
        if kept == messages:
            return messages, ids
        same, end = _common_prefix(ids, short), _common_prefix(self._session.tokens, ids)
        n_gone = len(ids) - len(short)
        if ids[same + n_gone :] == short[same:] and end > same + n_gone:
            self._session.truncate(end)
            self._session.remove(same, same + n_gone)
        n = len(messages) - len(kept)
        say(
            f"[context full: the oldest {n} messages are dropped, but for what later ones have "
            "read of them]"
        )
        return kept, short

    def _do_help(self, _rest: str) -> None:
        texts = [f"/{name} {value}".ljust(20) + text for name, (value, text) in COMMANDS.items()]
        width, below = columns() - 1, " " * 20
        rows = [textwrap.fill(text, width, subsequent_indent=below) for text in texts]
        say("\n".join([*rows, textwrap.fill(KEYS, width)]))

    def _do_system(self, rest: str) -> None:
        self._messages = [{"role": "system", "content": rest}] if rest else []
        self._drop()

    def _do_clear(self, _rest: str) -> None:
        self._messages = [m for m in self._messages if m["role"] == "system"]
        self._drop()

    def _drop(self) -> None:
        self._texts, self._replaced, self._thoughts = [], None, ""
        self._session.truncate(0)

    def _do_retry(self, _rest: str) -> None:
        last = self._messages[-1]["role"] if self._messages else ""
        if last not in ("assistant", "tool"):
            raise ValueError("there is no answer to replace")
        self._reply(self._messages if last == "tool" else self._messages[:-1])

    def _do_edit(self, rest: str) -> None:
        asked = [i for i, m in enumerate(self._messages) if m["role"] == "user"]
        if not asked:
            raise ValueError("there is no question to change")
        if not rest and not lines.interactive():
            raise ValueError("write /edit TEXT: the question in other words")
        if rest:
            self._reply([*self._messages[: asked[-1]], {"role": "user", "content": rest}])
        else:
            self._replaced, self._draft = asked[-1], self._messages[asked[-1]]["content"]

    def show(self, name: str) -> None:
        """Make a picture part of the next question. Raises PictureError, ValueError, OSError."""
        common.check_is_file(name)
        self._texts.append(self._engine.picture_mark(Path(os.path.expanduser(name))))

    def _do_image(self, rest: str) -> None:
        """Show a picture's file to the model with the next question."""
        if not rest:
            raise ValueError("/image needs a file name")
        self.show(rest)
        say(f"[{rest} is part of the next question]")

    def _do_read(self, rest: str) -> None:
        """Read a file's text into the session now, so that answers about it begin at once."""
        from tamis.formats.documents import read_document

        if not rest:
            raise ValueError("/read needs a file name")
        common.check_is_file(rest)
        text = read_document(rest, Path(os.path.expanduser(rest)).read_bytes()).text.strip()
        texts = [*self._texts, text]
        # the text's continuation is not known yet: only the common prefix of both is read
        ends = ("a", "b")
        first, second = (
            self._encode([*self._messages, {"role": "user", "content": "\n\n".join([*texts, end])}])
            for end in ends
        )
        ids = first[: _common_prefix(first, second)]
        if len(ids) + 1 >= self._session.n_ctx:
            raise ValueError(
                f"{rest} is {len(ids)} tokens with the conversation, n_ctx is "
                f"{self._session.n_ctx}: `tamis summarize` reads any length"
            )
        same = _common_prefix(self._session.tokens, ids)
        if same < len(ids):
            self._session.truncate(same)
            reading = common.Progress().reading(len(ids) - same, same)
            self._session.prefill(ids[same:], reading)
        self._texts = texts
        say(f"[{rest}: {len(ids) - same} tokens read; ask about it]")

    def _do_tools(self, _rest: str) -> None:
        if self._tools is None:
            raise ValueError("there are no tools: `tamis chat --mcp CONFIG` starts servers")
        say(self._tools.listing())

    def _do_think(self, rest: str) -> None:
        if rest not in ("", "on", "off"):
            raise ValueError(f"/think is on or off, not {rest!r}")
        if rest:
            self._shows_thoughts = rest == "on"
        else:
            say(self._thoughts or "the last answer has no thoughts")

    def _do_copy(self, _rest: str) -> None:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            raise ValueError("there is no answer to copy")
        if not sys.stdout.isatty():
            raise ValueError("there is no terminal whose clipboard could take it")
        text = base64.b64encode(self._messages[-1]["content"].encode()).decode()
        # a terminal's command to set the clipboard, which also works over ssh
        sys.stdout.write(f"\x1b]52;c;{text}\x07")
        sys.stdout.flush()
        say(f"[{len(self._messages[-1]['content'])} characters copied]")

    def _do_attn(self, rest: str) -> None:
        if not rest:
            say(f"--attn {self._arguments.attn}")
            return
        common.check_methods(rest, self._arguments.prefill)
        arguments = argparse.Namespace(**vars(self._arguments) | {"attn": rest})
        session = common.open_session(self._engine, arguments, common.Progress())
        drafts = draft.moved(self._drafts, self._engine, session, arguments)
        session.copy(self._session)
        self._session, self._arguments, self._drafts = session, arguments, drafts

    def _do_model(self, rest: str) -> None:
        if not rest:
            say(self._engine.path.name)
            return
        progress = common.Progress()
        path = common.model_file(rest, progress)
        arguments = argparse.Namespace(**vars(self._arguments) | {"model": rest, "ctx": None})
        engine = common.load_engine(arguments, progress, path)
        try:
            chosen = context.choose(engine, arguments, None)
            arguments.ctx, arguments.cache_type_k, arguments.cache_type_v = chosen[:3]
            session = common.open_session(engine, arguments, progress)
            own = draft.reopened(engine, session, arguments)
        except BaseException:
            engine.close()
            raise
        old, self._session, self._arguments = self._engine, session, arguments
        if self._drafts is not None and own is None:
            say("what drafted was for the other model: nothing does now")
        self._drafts = own
        self._follow(engine)
        old.close()
        self._params = samplers.for_model(self._params, arguments, engine.path)
        kept = f"temperature {self._params.temp:g}; the conversation goes on"
        say(f"{engine.path.name}, context {chosen}, {kept}")

    def _do_save(self, rest: str) -> None:
        if not rest:
            raise ValueError("/save needs a file name")
        told = Path(f"{rest}.json")
        if told.exists():
            self._read_kept(told)  # the error names another kind of file: keep it
        self._session.save(rest)
        kept = {"messages": self._messages, "settings": self._settings()}
        with write_whole(told) as file:
            file.write(json.dumps(kept).encode())
        say(f"kept in {rest} and {rest}.json")

    def _do_load(self, rest: str) -> None:
        if not rest:
            raise ValueError("/load needs a file name")
        messages, params = self._read_kept(Path(f"{rest}.json"))
        self._session.load(rest)
        self._messages, self._params = messages, params
        say(f"{len(messages)} messages, {self._session.n_past} tokens; settings as they were")

    def _read_kept(self, path: Path) -> tuple[list[Message], Any]:
        """The messages and sampler settings of a saved conversation. Raises OSError, ValueError."""
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
        """The sampler settings that are numbers or switches, which /set can change."""
        fields = dataclasses.fields(self._params)
        values = {field.name: getattr(self._params, field.name) for field in fields}
        return {k: v for k, v in values.items() if v is None or isinstance(v, int | float)}

    def _do_set(self, rest: str) -> None:
        known = self._settings()
        name, _, value = rest.partition(" ")
        if not rest:
            say("\n".join(self._table(known)))
            return
        if name not in known:
            close = did_you_mean(name, known)
            raise ValueError(
                f"{name} is no setting; /set lists them, /set NAME VALUE sets one{close}"
            )
        if not value:
            say(f"{name} {_shown(known[name])}: {_TEXTS[name]}")
            return
        new = _parsed(name, value.strip(), known[name])
        self._params = dataclasses.replace(self._params, **{name: new})
        if name == "temp":
            self._arguments.temp = new  # set by the user: another model does not change it
        say(f"{name} {_shown(new)} (was {_shown(known[name])})")

    def _table(self, known: dict[str, Any]) -> list[str]:
        """The settings, now and at the start of the chat, and what they do if that fits a line."""
        first = self._first_params
        rows = [
            {
                "name": name,
                "value": _shown(value),
                "start": _shown(getattr(first, name)),
                "text": _TEXTS[name],
            }
            for name, value in known.items()
        ]
        titles = {"name": "setting", "value": "value", "start": "start", "text": ""}
        found = table.lines(rows, titles)
        if max(map(len, found)) <= columns():
            return found
        del titles["text"]
        return [*table.lines(rows, titles), "/set NAME says what a setting does"]

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
        say(
            f"prompt: {last.n_read} tokens read at {last.read:.1f} tok/s, {last.n_reused} reused\n"
            f"answer: {last.n_written} tokens at {last.written:.1f} tok/s, "
            f"{self._engine.n_threads} threads\n"
            f"{self.status()}\n"
            f"memory: weights {plan.weights / common.MIB:.0f} MiB, "
            f"KV {plan.kv / common.MIB:.0f} MiB, scratch {plan.workspace / common.MIB:.0f} MiB"
            + _tier_line(plan, session.kv_counts)
            + ("" if session.mass is None else f"\nattention: {session.mass}")
        )

    def _do_ctx(self, _rest: str) -> None:
        say(self.status())


class Shown:
    """An answer on the screen: its text, its thoughts, and its pieces.

    Thoughts are counted in a temporary line, or shown on standard error if asked for.
    """

    def __init__(self, parser: Any, plain: bool, *, thoughts: bool) -> None:
        self._parser, self._plain, self._shows_thoughts = parser, plain, thoughts
        self.said: list[Any] = []
        self.period = 0  # of the cycle that ended the answer, in tokens
        self._called: list[Any] = []
        self.text = self.thoughts = ""
        self.first = time.perf_counter()

    def stream(self, pieces: Iterator[Any]) -> None:
        """Show the pieces as they arrive."""
        # The prompt is read before the first piece: until then the screen shows its progress.
        self.said = list(itertools.islice(pieces, 1))
        self.first = time.perf_counter()
        try:
            with open_answer(plain=self._plain) as answer:
                for piece in itertools.chain(list(self.said), self._rest(pieces)):
                    self._take(answer, piece.text)
                if self._parser is not None:
                    cut = bool(self.said) and self.said[-1].finish == "length"
                    self._deltas(answer, self._parser.finish(cut=cut))
        finally:
            self._end_thoughts()

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls of tools, in OpenAI's shape."""
        if not self._called:
            return []
        from tamis.text.tool_calls import message_of

        return list(message_of(self._called)["tool_calls"])

    def _rest(self, pieces: Iterator[Any]) -> Iterator[Any]:
        """Yield the pieces up to the end, or to a cycle, which models seldom leave."""
        for piece in pieces:
            self.said.append(piece)
            yield piece
            if len(self.said) % LOOKED_AT == 0:
                self.period = circle([each.token_id for each in self.said[-REACH:]])
                if self.period:
                    return

    def _take(self, answer: Any, text: str) -> None:
        if self._parser is not None:
            self._deltas(answer, self._parser.push(text))
            return
        self.text += text
        answer.write(text)

    def _deltas(self, answer: Any, deltas: list[Any]) -> None:
        for delta in deltas:
            if delta.index is not None:
                self._called.append(delta)
            if delta.reasoning:
                self.thoughts += delta.reasoning
                self._think(delta.reasoning)
            if delta.content:
                if not self.text:
                    self._end_thoughts()
                self.text += delta.content
                answer.write(delta.content)

    def _think(self, text: str) -> None:
        if self._shows_thoughts:
            sys.stderr.write(visible(text))
        elif sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[Kthinking: {len(self.thoughts.split())} words")
        sys.stderr.flush()

    def _end_thoughts(self) -> None:
        if not self.thoughts or self.text:
            return
        seconds = time.perf_counter() - self.first
        clear = "\r\x1b[K" if sys.stderr.isatty() and not self._shows_thoughts else "\n"
        sys.stderr.write(f"{clear}[thought for {seconds:.1f} s; /think shows it]\n")


def _tier_line(plan: Any, counts: Any) -> str:
    """Hits and misses of the KV cache's tier in a file or in RAM; "" without a tier."""
    if counts is None:
        return ""
    mib = common.MIB
    if plan.host:
        return (
            f"\nRAM: KV of {plan.host / mib:.0f} MiB, {counts.n_read / mib:.0f} MiB fetched to the "
            f"GPU; {100 * counts.hit_rate:.1f} % of {counts.n_hit + counts.n_miss} pages were there"
        )
    return (
        f"\ndisk: file of {plan.disk / mib:.0f} MiB, {counts.n_written / mib:.0f} MiB written, "
        f"{counts.n_read / mib:.0f} MiB read; {100 * counts.hit_rate:.1f} % of "
        f"{counts.n_hit + counts.n_miss} units were in memory, {counts.n_ahead} read ahead; "
        f"units hold {counts.amplification:.2f} times what was chosen"
    )


_TEXTS = {flag.field: flag.text for flag in samplers.FLAGS} | {"ignore_eos": "never end the answer"}
_MAY_BE_NEGATIVE = {"frequency_penalty", "presence_penalty"}


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _parsed(name: str, value: str, old: Any) -> Any:
    """A setting's value in the type of its old value.

    A negative number where it means nothing is an error, though flags take it as zero.
    """
    if isinstance(old, bool):
        words = {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}
        if value.lower() not in words:
            raise ValueError(f"{name} is on or off, not {value!r}")
        return words[value.lower()]
    kind, expected = (float, "a number") if isinstance(old, float) else (int, "a whole number")
    try:
        found = kind(value)
    except ValueError:
        raise ValueError(f"{name} is {expected}, not {value!r}") from None
    least = -1 if "-1" in _TEXTS[name] else 0
    if found < least and name not in _MAY_BE_NEGATIVE:
        raise ValueError(f"{name} is {value}, expected {expected} of at least {least}")
    return found


def _are_messages(data: Any) -> bool:
    """Whether a value from a file is a list of messages, some of them with calls and results."""
    return isinstance(data, list) and all(map(_is_message, data))


def _is_message(data: Any) -> bool:
    if not isinstance(data, dict) or not {"role", "content"} <= data.keys():
        return False
    texts = {key: value for key, value in data.items() if key != "tool_calls"}
    calls = data.get("tool_calls", [])
    return (
        texts.keys() <= {"role", "content", "name", "tool_call_id"}
        and all(isinstance(text, str) and _is_text(text) for text in texts.values())
        and isinstance(calls, list)
        and all(map(_is_call, calls))
    )


def _is_call(data: Any) -> bool:
    function = data.get("function") if isinstance(data, dict) else None
    return isinstance(function, dict) and all(
        isinstance(text, str) and _is_text(text)
        for text in (data.get("id"), function.get("name"), function.get("arguments"))
    )


def _is_text(text: str) -> bool:
    """Whether UTF-8 can encode a text: JSON can contain unpaired surrogates."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def _same_kinds(settings: Any, known: dict[str, Any]) -> bool:
    """Whether a file's settings are known ones, each a number or a switch as expected."""
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
    """The length of the common prefix of two sequences, in tokens."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
