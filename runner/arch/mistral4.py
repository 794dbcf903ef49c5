"""Mistral 4: as deepseek2."""

from tamis.arch.deepseek2 import ARCH as ARCH
