"""PaddleOCR-VL, its text: ERNIE 4.5 with rotary sections as qwen2vl has them."""

from tamis.model.arch import Arch

ARCH = Arch(neox=True, keys=("rope.dimension_sections",))
