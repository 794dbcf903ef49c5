"""PaddleOCR-VL's text model: ERNIE 4.5 with rotary sections, as in qwen2vl."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, keys=("rope.dimension_sections",))
