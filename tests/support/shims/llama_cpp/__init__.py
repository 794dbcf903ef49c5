"""llama_cpp's names over tamis: with shims/ on the path programs for llama_cpp run."""

from tamis.bindings.compat import *  # noqa: F403
from tamis.bindings.llama import *  # noqa: F403
