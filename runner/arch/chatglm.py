"""ChatGLM 3, GLM-4 9B (2024): as llama, gate and up in one matrix, partial rotary positions."""

from tamis.model.arch import Arch

ARCH = Arch(neox=False)
