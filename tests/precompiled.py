"""Kernels of many sessions, compiled at once: every start of the compilers takes seconds."""

from tamis.engine import Engine


class _Recorder:
    """A backend that runs nothing and notes which kernels it is asked for."""

    def __init__(self, backend):
        self.n_thread, self.n_part, self.kv_types = (
            backend.n_thread, backend.n_part, backend.kv_types,
        )  # fmt: skip
        self.free_bytes, self.specs = backend.free_bytes, set()

    def load(self, specs, progress=None):
        self.specs |= set(specs)

    def link(self, program):
        self.specs |= program.specs
        return program

    def run(self, linked, first=0, last=None):
        pass

    def send(self, *arrays):
        pass

    def fetch(self, *arrays):
        pass


def compile_for(engine, sessions, n_prompt=70, n_decode=20):
    """Make ready what sessions with these options need for a prompt and decode steps.

    What a method asks for later is compiled when it does.
    """
    recorder = _Recorder(engine.backend)
    stand_in = Engine(engine.file, engine.model, engine.vocab, recorder)
    for options in sessions:
        session = stand_in.session(**options)
        session.prefill([3] * n_prompt)
        for _ in range(n_decode):
            session.decode(3)
    engine.backend.load(recorder.specs)
