"""A server of an engine in this process: the model's process is a thread, all else as it is.

And replies to answers that were written down, in the forms of APIs.
"""

import contextlib
import json
import socket
import threading

from tamis.bindings.drop_in.completion import Counts, Piece
from tamis.bindings.serve import process
from tamis.bindings.serve.api.readers import READERS
from tamis.bindings.serve.body import Body
from tamis.bindings.serve.http.app import Settings
from tamis.bindings.serve.http.application import application
from tamis.bindings.serve.jobs import Progress
from tamis.bindings.serve.models import Model
from tamis.bindings.serve.replies import About
from tamis.bindings.serve.requests import Limits, Reader
from tamis.bindings.serve.supervisor import Supervisor
from tamis.bindings.serve.text import TextModel


class ThreadProcess:
    """Stands in for supervisor.ModelProcess."""

    def __init__(self, engine, sessions, prepare=lambda runner: None, cache=None):
        self.cache = cache
        self.channel, self.far = socket.socketpair()
        self._thread = threading.Thread(
            target=self._run, args=(self.far, engine, sessions, prepare)
        )
        self._thread.start()

    def _run(self, channel, engine, sessions, prepare):
        with channel:
            self.runner = process.loaded(channel, engine, sessions, cache=self.cache)
            prepare(self.runner._worker)
            self.runner.run()
            self.runner._worker.join()
            for slot in self.runner._worker._slots:  # the sessions may be another's next
                slot.release()

    def crash(self):
        """End as a process does that crashes."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)

    def end(self):
        self.crash()
        self._thread.join()
        self.channel.close()
        return "was ended by signal 11 (SIGSEGV)"


def local_model(
    engine, sessions, n_queue=64, n_owner=1, prepare=lambda worker: None, cache=None, **how
):
    """The model of an engine."""

    def start():
        return ThreadProcess(engine, sessions, prepare, cache)

    worker = Supervisor(start, n_queue, n_owner, **how)
    loaded = worker.wait()
    text = TextModel(engine.vocab, engine.tokenizer, loaded.n_ctx)
    return Model("tiny", str(engine.path.absolute()), text, loaded, worker)


def local_server(engine, sessions, settings=None, log=lambda line: None, **how):
    """A server of an engine."""
    settings = settings or Settings()
    n_owner = max(len(settings.access.keys), 1)
    model = local_model(engine, sessions, settings.n_queue, n_owner, **how)
    return application(model, settings, log)


# A template that knows tools, Hermes' way, and thoughts.
THINKING = """\
{%- if tools %}
{{- '<|im_start|>system\\n<tools>' + tools | tojson + '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content or '' }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}"""
N_CTX = 1024


def reader(path, **usual):
    """What reads requests to a tiny model that has learnt to think and to call."""
    return Reader(TextModel.load(str(path), N_CTX, THINKING), "tiny", Limits(N_CTX, 8), usual)


def said(reader, name, form, body, text, finish="stop", n=3):
    """The reply in an API's form to a request that was answered with a text: (events, whole).

    The text comes in pieces of n characters.
    """
    task = READERS[name](reader, Body(body))
    about = About("tiny", "b0", N_CTX, lambda: reader.format)
    parts = [text[i : i + n] for i in range(0, len(text), n)]
    pieces = [
        Piece(part, [], None, (5,), None, Counts(4, 6, i, 0.5, 0.25))
        for i, part in enumerate(parts, 1)
    ]
    last = Counts(4, 6, len(parts), 0.5, 0.25)
    pieces.append(Piece("", [], finish, (), None, last))
    return forms(form, task, about, pieces, Progress(4, 10, 4))


def forms(form, task, about, pieces, progress):
    """The reply of pieces in an API's form, as JSON: (events of a stream, whole)."""
    stream = form(task._replace(stream=True), about)
    events = [*stream.begin(), *stream.progress(0, progress)]
    for piece in pieces:
        stream.counts[0] = piece.counts
        events += stream.piece(0, piece)
    events += stream.end()
    whole = form(task._replace(stream=False), about)
    whole.counts[0] = pieces[-1].counts
    return json.loads(json.dumps(events)), json.loads(json.dumps(whole.whole([pieces])))
