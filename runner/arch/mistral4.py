"""Mistral 4: like deepseek2."""

from tamis.arch.deepseek2 import ARCH as ARCH
