"""llama.h's functions, records and constants. Handles are integers, 0 is none."""

from tamis.bindings.llama import *  # noqa: F403
from tamis.bindings.llama import llama_max_devices

LLAMA_MAX_DEVICES = llama_max_devices()
llama_model_p = llama_context_p = llama_vocab_p = llama_sampler_p = llama_memory_t = int
