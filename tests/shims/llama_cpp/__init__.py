"""llama_cpp's names over tamis: put tests/shims on the path and programs for llama_cpp run."""

from tamis.bindings.compat import *  # noqa: F403
from tamis.bindings.llama import *  # noqa: F403
