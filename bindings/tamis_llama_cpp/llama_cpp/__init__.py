"""llama_cpp's names, implemented by tamis."""

from llama_cpp.llama import *  # noqa: F403
from llama_cpp.llama_cpp import *  # noqa: F403
from llama_cpp.llama_types import *  # noqa: F403

__version__ = "0.3.36"  # the version of llama-cpp-python that programs check
