"""Kernels of many sessions, compiled at once: every start of the compilers takes seconds."""

from tamis.engine.engine import Engine
from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.backends.cpu import CpuBackend
from tamis.jit_kernels.contract.program import Program
from tamis.model.placement import one_place
from tamis.model.repack import Filling


class Recorder(Backend):
    """A backend that runs nothing and notes which kernels it is asked for."""

    name, on_host, strips = CpuBackend.name, True, False
    kv_types = CpuBackend.kv_types

    def __init__(self, n_thread=1, n_part=1):
        self.n_thread, self.n_part, self.specs = n_thread, n_part, set()

    def load(self, rows, own=(), progress=None):
        self.specs |= {*rows, *own}

    def link(self, program):
        self.specs |= program.specs
        return program

    def run(self, linked, first=0, last=None):
        pass

    def send(self, *arrays):
        pass

    def fetch(self, *arrays):
        pass

    def free_bytes(self, n_weight=0):
        return 1 << 40


def compile_for(engine, sessions, n_prompt=70, n_decode=20):
    """Make ready what sessions with these options need for a prompt and decode steps.

    What a method asks for later is compiled when it does.
    """
    recorder = Recorder(engine.backend.n_thread, engine.backend.n_part)
    filled = Filling(recorder, Program(), lambda: None)
    places = one_place(recorder, engine.hp.n_layer)
    stand_in = Engine(engine.file, engine.model, engine.vocab, places, filled)
    for options in sessions:
        session = stand_in.session(**options)
        session.prefill([3] * n_prompt)
        for _ in range(n_decode):
            session.decode(3)
    engine.backend.load(recorder.specs)
