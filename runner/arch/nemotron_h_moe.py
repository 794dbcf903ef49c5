"""Nemotron 3 mixtures of experts: like nemotron_h."""

from tamis.arch.nemotron_h import ARCH as ARCH
