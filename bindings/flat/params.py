"""llama.h's records and constants: the fields that mean something here, under its names.

Setting a field that is not here is an AttributeError, so nothing is ignored in silence. Fields of
tamis alone come last.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

llama_token = ctypes.c_int32
llama_pos = ctypes.c_int32
llama_seq_id = ctypes.c_int32

LLAMA_DEFAULT_SEED = 0xFFFFFFFF
LLAMA_TOKEN_NULL = -1

LLAMA_VOCAB_TYPE_SPM = 1
LLAMA_VOCAB_TYPE_BPE = 2

LLAMA_TOKEN_ATTR_UNDEFINED = 0
LLAMA_TOKEN_ATTR_UNKNOWN = 1 << 0
LLAMA_TOKEN_ATTR_UNUSED = 1 << 1
LLAMA_TOKEN_ATTR_NORMAL = 1 << 2
LLAMA_TOKEN_ATTR_CONTROL = 1 << 3
LLAMA_TOKEN_ATTR_USER_DEFINED = 1 << 4
LLAMA_TOKEN_ATTR_BYTE = 1 << 5

LLAMA_POOLING_TYPE_UNSPECIFIED = -1
LLAMA_POOLING_TYPE_NONE = 0
LLAMA_POOLING_TYPE_MEAN = 1
LLAMA_POOLING_TYPE_CLS = 2
LLAMA_POOLING_TYPE_LAST = 3
LLAMA_POOLING_TYPE_RANK = 4

GGML_TYPE_F16 = 1
GGML_TYPE_Q8_0 = 8
KV_TYPE_NAMES = {GGML_TYPE_F16: "f16", GGML_TYPE_Q8_0: "q8_0"}


@dataclass(slots=True)
class llama_model_params:
    """How a model is loaded; see `llama_model_load_from_file`."""

    n_gpu_layers: int = 0  # the last ones, on the GPU; more than all, -1: all, and the output
    progress_callback: Callable[[float, Any], bool] | None = None  # False ends the loading
    progress_callback_user_data: Any = None
    n_threads: int = 0  # 0: one a core this process may use


@dataclass(slots=True)
class llama_context_params:
    """How a context is made; see `llama_init_from_model`."""

    n_ctx: int = 512  # tokens of all sequences together; 0: the model's, of each sequence
    n_batch: int = 2048  # most tokens of a llama_decode
    n_ubatch: int = 512  # tokens computed at once
    n_seq_max: int = 1  # sequences, each with n_ctx / n_seq_max tokens
    n_threads: int = 0  # 0: the model's
    n_threads_batch: int = 0  # 0, or the same as n_threads
    pooling_type: int = LLAMA_POOLING_TYPE_UNSPECIFIED
    embeddings: bool = False  # llama_decode gives embeddings and no logits
    offload_kqv: bool = True  # False: keys, values and attention on the CPU, wherever layers are
    type_k: int = GGML_TYPE_F16
    type_v: int = GGML_TYPE_F16
    abort_callback: Callable[[Any], bool] | None = None
    abort_callback_data: Any = None
    attn: str = "dense"  # the method of decode steps, as `tamis methods` writes them
    prefill: str = "dense"  # the method of prompts
    audit: int = 0  # every how manyth decode step is checked against dense attention; 0: none


@dataclass(slots=True)
class llama_sampler_chain_params:
    """How a chain of samplers is made."""

    no_perf: bool = False


@dataclass(slots=True)
class llama_chat_message:
    """One message of a conversation."""

    role: bytes | str
    content: bytes | str


@dataclass(slots=True)
class llama_logit_bias:
    """What is added to the logit of a token."""

    token: int
    bias: float


@dataclass(slots=True)
class llama_batch:
    """Tokens to decode. Arrays that are None: positions go on, sequence 0, logits of the last.

    token int32 [n] · pos int32 [n] · n_seq_id int32 [n] · seq_id int32 [n, n_seq_max] · logits
    int8 [n]. embd must be None: input embeddings are not supported.
    """

    n_tokens: int = 0
    token: Any = None
    embd: Any = None
    pos: Any = None
    n_seq_id: Any = None
    seq_id: Any = None
    logits: Any = None


TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


@dataclass(slots=True)
class llama_token_data_array:
    """Candidates for the next token; `llama_sampler_apply` replaces data, size and selected."""

    data: Any  # TOKEN_DATA [size]
    size: int
    selected: int = -1  # index in data of the chosen one
    sorted: bool = False


def llama_model_default_params() -> llama_model_params:
    """The defaults of a model's parameters."""
    return llama_model_params()


def llama_context_default_params() -> llama_context_params:
    """The defaults of a context's parameters."""
    return llama_context_params()


def llama_sampler_chain_default_params() -> llama_sampler_chain_params:
    """The defaults of a sampler chain's parameters."""
    return llama_sampler_chain_params()
