"""ChatGLM 3, GLM-4 9B (2024): like llama; gate and up are one matrix, partial rotary positions."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False)
