"""The process that prepares strangers' requests: one fork each, under limits of its own.

`helpers` starts python -m tamis.bindings.serve.http.helper SOCKET CONFIG. The process holds the
model's vocabulary and template, and forks for each socket that it receives. The fork parses the
body, renders, tokenizes and compiles grammars, and lives as long as its answer needs masks. It is
killed when the server closes its socket; its last frame there says how it ended.
"""

import contextlib
import copy
import gc
import json
import os
import select
import signal
import socket
import sys

from tamis.bindings.drop_in.grammar import LlamaGrammar
from tamis.bindings.serve.api.readers import read
from tamis.bindings.serve.errors import ApiError, invalid
from tamis.bindings.serve.media import Media, Rules
from tamis.bindings.serve.requests import Limits, Reader
from tamis.bindings.serve.tasks import Inputs, Task, inputs_to_json, to_json
from tamis.bindings.serve.text import TextModel
from tamis.bindings.serve.wire import (
    CHOICE,
    GRAMMAR_SECONDS,
    TOKEN,
    Config,
    Frames,
    Kind,
    frame,
    identity,
)
from tamis.platform.limits import allow_cpu, limit, lower_cpu, most_open_files
from tamis.platform.memory import held_bytes
from tamis.platform.processes import drop_privileges, start_fork
from tamis.sampling.base import SamplerError
from tamis.sampling.grammar import Grammar
from tamis.sampling.vocabulary import GrammarTokenizer

STACK = 4 << 20
KEPT_BYTES = 256 << 20  # of its own memory that a process may hold while its answer is generated
STEP_SECONDS = 5  # of processor time for the mask of one token
MOST_SECONDS = 3600


def main() -> int:
    """Fork for each socket received, until the server closes its own."""
    for number in (signal.SIGINT, signal.SIGTERM):  # from a terminal: the server ends this process
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    config = Config(**json.loads(sys.argv[2]))
    if identity(config.path) != config.identity:
        sys.stderr.write("tamis: the model file has changed since the server has loaded it\n")
        return 1
    text = TextModel.load(config.path, config.n_ctx, config.template)
    limits = Limits(config.n_ctx, config.n_choices)
    reader = Reader(text, config.model, limits, config.usual, _media(Rules(*config.media)))
    _quiet()
    gc.collect()
    gc.freeze()  # forks share objects that the collector never touches
    _Nursery(control, config, text, reader).run()
    return 0


def _media(rules: Rules) -> Media:
    """What decodes pictures, with all modules that it needs: forks share them."""
    if not rules.mmproj:
        return Media()
    from tamis.vision.decoding import warm
    from tamis.vision.families.load import Cutter

    warm()
    return Media(rules._replace(hosts=tuple(rules.hosts)), Cutter(rules.mmproj))


def _quiet() -> None:
    """Discard output from here on: a crash could print parts of a request."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)


class _Nursery:
    """The child processes: starts them, kills those nobody waits for, and reports their ends."""

    def __init__(
        self, control: socket.socket, config: Config, text: TextModel, reader: Reader
    ) -> None:
        self._control, self._config, self._text, self._reader = control, config, text, reader
        self._grammars: GrammarTokenizer | None = None
        self._children: dict[int, tuple[int, socket.socket]] = {}  # by descriptor
        self._ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._wake = wake
        self._poll = select.poll()
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._ended, select.POLLIN)

    def run(self) -> None:
        """Serve until the server closes the control socket."""
        while True:
            for number, _ in self._poll.poll():
                if number == self._control.fileno():
                    if not self._start():
                        self._kill_all()
                        return
                elif number == self._ended:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._ended, 4096)
                    self._reap()
                elif number in self._children:  # the server has closed its end
                    self._poll.unregister(number)
                    os.kill(self._children[number][0], signal.SIGKILL)

    def _start(self) -> bool:
        data, numbers, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            return False
        if not numbers:  # no descriptor was free for it: its client finds it closed
            return True
        channel = socket.socket(fileno=numbers[0])
        if data == b"g" and self._grammars is None:
            with contextlib.suppress(ImportError, SamplerError):  # each request tells
                self._grammars = GrammarTokenizer(self._text.unbounded, len(self._text.vocab))
            gc.freeze()
        try:
            pid = start_fork(lambda: self._become(channel))
        except OSError:  # too many processes: likewise
            channel.close()
            return True
        self._children[channel.fileno()] = pid, channel
        self._poll.register(channel, 0)  # poll reports POLLHUP without being asked for it
        return True

    def _become(self, channel: socket.socket) -> None:
        """Become the fork's process: close what it does not own, set limits, and answer."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        drop_privileges()
        channel = socket.socket(fileno=os.dup2(channel.detach(), 3))
        os.closerange(4, most_open_files())
        _limit(self._config)
        _Child(channel, self._text, self._reader, self._grammars).run()

    def _reap(self) -> None:
        ended = {}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = found[1]
        for number, (pid, channel) in list(self._children.items()):
            if pid in ended:
                del self._children[number]
                with contextlib.suppress(KeyError):
                    self._poll.unregister(number)
                channel.setblocking(False)
                killed = os.WTERMSIG(ended[pid]) if os.WIFSIGNALED(ended[pid]) else 0
                with contextlib.suppress(OSError):
                    channel.send(frame(Kind.ENDED, bytes([killed])))
                channel.close()

    def _kill_all(self) -> None:
        for pid, _ in self._children.values():
            os.kill(pid, signal.SIGKILL)


def _limit(config: Config) -> None:
    """Set limits of this process: time, memory, half a stack; no files, processes, core dumps."""
    held, _ = held_bytes()
    limit("core", 0)
    limit("file", 0)
    limit("files", 16)
    limit("stack", STACK)
    limit("memory", held + config.n_byte)
    limit("cpu", MOST_SECONDS)
    allow_cpu(config.seconds)


class _Child:
    """One request: it is read and prepared, then its masks are computed on demand."""

    def __init__(
        self,
        channel: socket.socket,
        text: TextModel,
        reader: Reader,
        grammars: GrammarTokenizer | None,
    ) -> None:
        self._channel, self._text, self._reader, self._grammars = channel, text, reader, grammars
        self._grammar: Grammar | None = None
        self._n_choice = 0

    def run(self) -> None:
        _, data = _receive(self._channel, Frames())
        name, _, body = data.partition(b"\n")
        try:
            result = self._result(name.decode(), body)
        except Exception as error:
            self._channel.sendall(frame(Kind.ERROR, _told(error)))
            return
        self._channel.sendall(frame(Kind.RESULT, result))
        while self._grammar is not None:
            data, numbers, _, _ = socket.recv_fds(self._channel, 1, 1)
            if not data:
                return
            # If the model's process is replaced, the new one begins with the first masks.
            with socket.socket(fileno=numbers[0]) as reader, contextlib.suppress(OSError):
                _follow(reader, self._copies(self._grammar))

    def _result(self, name: str, body: bytes) -> bytes:
        found = read(name, self._reader, body)
        if isinstance(found, Inputs):
            return inputs_to_json(found)
        if not isinstance(found, Task):
            return json.dumps(found).encode()
        if found.grammar is not None:
            left_out = self._compile(found.grammar, len(found.requests))
            names = (*found.ignored, *(f"schema{place}" for place in left_out))
            found = found._replace(ignored=names)
        return to_json(found)

    def _compile(self, grammar: LlamaGrammar, n_choice: int) -> tuple[str, ...]:
        """Begin to follow a grammar; returns the parts of a schema that it does not enforce."""
        if self._grammars is None:
            self._grammars = GrammarTokenizer(self._text.unbounded, len(self._text.vocab))
        lower_cpu(GRAMMAR_SECONDS)
        self._channel.sendall(frame(Kind.COMPILING, b""))
        (_, before), self._n_choice = held_bytes(), n_choice
        compiled = grammar.compiled_here(self._grammars)
        self._grammar = Grammar(compiled.text, self._grammars)
        self._grammar.mask()
        copies = self._copies(self._grammar)
        if held_bytes()[1] - before > KEPT_BYTES:
            raise invalid(f"the grammar takes more than {KEPT_BYTES >> 20} MiB: make it smaller")
        del copies
        return compiled.left_out

    def _copies(self, grammar: Grammar) -> list[Grammar]:
        return [copy.deepcopy(grammar) for _ in range(self._n_choice)]


def _follow(reader: socket.socket, steps: list[Grammar]) -> None:
    """Send the masks of all choices, and one more after each token, until the reader closes."""
    frames = Frames()
    for i, step in enumerate(steps):
        allow_cpu(STEP_SECONDS)
        reader.sendall(_mask(i, step))
    while True:
        kind, data = _receive(reader, frames)
        assert kind is Kind.TOKENS
        i, token = TOKEN.unpack(data)
        allow_cpu(STEP_SECONDS)
        try:
            steps[i].accept(token)
        except SamplerError as error:
            reader.sendall(_refused(i, error))
        else:
            reader.sendall(_mask(i, steps[i]))


def _mask(i: int, step: Grammar) -> bytes:
    try:
        return frame(Kind.MASK, CHOICE.pack(i) + step.mask())
    except SamplerError as error:
        return _refused(i, error)


def _refused(i: int, error: SamplerError) -> bytes:
    return frame(Kind.REFUSED, CHOICE.pack(i) + str(error)[:1000].encode())


def _receive(channel: socket.socket, frames: Frames) -> tuple[Kind, bytes]:
    """The next frame. Raises ConnectionError at the end of the stream."""
    while (found := frames.next()) is None:
        data = channel.recv(1 << 20)
        if not data:
            raise ConnectionError
        frames.feed(data)
    return found


def _told(error: Exception) -> bytes:
    """An error for the client, as JSON."""
    if isinstance(error, SamplerError):
        error = invalid(str(error)[:2000])
    if isinstance(error, ImportError):
        error = ApiError(501, str(error), code="unsupported")
    if isinstance(error, MemoryError | RecursionError):
        what = "memory" if isinstance(error, MemoryError) else "levels of nesting"
        error = ApiError(400, f"preparing the request takes too much {what}", code="too_costly")
    if not isinstance(error, ApiError):
        error = ApiError(500, f"a bug of tamis: {type(error).__name__}", code="internal")
    return error.packed()


if __name__ == "__main__":
    sys.exit(main())
