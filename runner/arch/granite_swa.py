"""Granite with windows: like granite, with attention sinks, and a window if the file has one."""

from dataclasses import replace

from tamis.arch.granite import ARCH as GRANITE
from tamis.arch.granite import SCALES

KEYS = "attention.sliding_window_pattern", "attention.rope_pattern"
ARCH = replace(GRANITE, keys=(*SCALES, *KEYS))
