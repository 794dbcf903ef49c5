"""Granite mixture of experts: as granite, rotary positions in any case."""

from dataclasses import replace

from tamis.arch.granite import ARCH as GRANITE
from tamis.arch.granite import SCALES

ARCH = replace(GRANITE, keys=SCALES)
