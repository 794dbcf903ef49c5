"""Kernels of many sessions, compiled at once: every start of the compilers takes seconds."""

from tamis.tools.kernel_set import Recorder, recorded, recorded_by

__all__ = ["Recorder", "compile_for", "recorded"]


def compile_for(engine, sessions, n_prompt=70, n_decode=20):
    """Make ready what sessions with these options need for a prompt and decode steps.

    What a method asks for later is compiled when it does.
    """
    engine.backend.load(recorded_by(engine, sessions, n_prompt, n_decode))
