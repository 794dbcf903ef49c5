"""Granite mixture of experts: like granite, but always with rotary positions."""

from dataclasses import replace

from tamis.arch.granite import ARCH as GRANITE
from tamis.arch.granite import SCALES

ARCH = replace(GRANITE, keys=SCALES)
