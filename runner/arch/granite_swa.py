"""Granite with windows: as granite, attention sinks, a window where the file says so."""

from dataclasses import replace

from tamis.arch.granite import ARCH as GRANITE
from tamis.arch.granite import SCALES

KEYS = "attention.sliding_window_pattern", "attention.rope_pattern"
ARCH = replace(GRANITE, keys=(*SCALES, *KEYS))
