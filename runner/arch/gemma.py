"""Gemma: scaled embeddings, a GELU gate, tied output."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, activation="gelu", scale_embedding=True)
