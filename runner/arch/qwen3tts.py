"""Qwen3-TTS, its talker: as qwen3, rotary sections of text are one."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, interleaved_sections=True, keys=("rope.dimension_sections",))
