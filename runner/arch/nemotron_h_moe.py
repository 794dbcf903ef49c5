"""Nemotron 3 mixtures of experts: as nemotron_h."""

from tamis.arch.nemotron_h import ARCH as ARCH
