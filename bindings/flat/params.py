"""llama.h's records and constants: the fields that have an effect here, under their names.

llama.h's other fields can be set; a value that is not the default is logged. A field that llama.h
does not have is an AttributeError. Fields that only tamis has come last.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from tamis.bindings.flat.status import GGML_LOG_LEVEL_WARN, say

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


# Other values that are equivalent to what is done here.
_SAME: dict[str, tuple[Any, ...]] = {
    "load_mode": (0, 1),
    "flash_attn_type": (0, 1),
    "split_mode": (0,),
    "lazy_mode": (0,),
    "rope_freq_scale": (1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_beta_fast": (32.0,),
    "yarn_beta_slow": (1.0,),
    "attention_type": (0,),
    "no_perf": (False,),
    "op_offload": (False,),
    "swa_full": (False,),
    "kv_unified": (True,),
    "use_extra_bufts": (False,),
    "no_host": (True,),
}


class _Params:
    """A record whose fields without effect have llama.h's defaults."""

    __slots__ = ()
    without_effect: ClassVar[dict[str, Any]] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.without_effect:
            object.__setattr__(self, name, value)
        elif value != self.without_effect[name] and value not in _SAME.get(name, ()):
            kind = type(self).__name__
            say(GGML_LOG_LEVEL_WARN, f"{kind}.{name} = {value!r} has no effect in tamis")

    def __getattr__(self, name: str) -> Any:
        if name in self.without_effect:
            return self.without_effect[name]
        raise AttributeError(f"{type(self).__name__} has no field {name}")


@dataclass(slots=True)
class llama_model_params(_Params):
    """How a model is loaded; see `llama_model_load_from_file`."""

    without_effect: ClassVar[dict[str, Any]] = {
        "devices": None,
        "tensor_buft_overrides": None,
        "split_mode": 1,
        "load_mode": -1,
        "lazy_mode": 1,
        "main_gpu": 0,
        "tensor_split": None,
        "kv_overrides": None,
        "use_mmap": True,
        "use_direct_io": False,
        "use_mlock": False,
        "check_tensors": False,
        "use_extra_bufts": True,
        "no_host": False,
        "no_alloc": False,
        "load_mtp": False,
    }
    # the number of last layers on the GPU; above n_layer, or -1: all and the output head
    n_gpu_layers: int = 0
    # called with the progress; False ends the loading
    progress_callback: Callable[[float, Any], bool] | None = None
    progress_callback_user_data: Any = None
    vocab_only: bool = False  # tokens and metadata alone: no context can be made
    n_threads: int = 0  # 0: one for each core that this process may use


@dataclass(slots=True)
class llama_context_params(_Params):
    """How a context is made; see `llama_init_from_model`."""

    without_effect: ClassVar[dict[str, Any]] = {
        "n_rs_seq": 0,
        "n_outputs_max": 0,
        "n_outputs_max_per_seq": 0,
        "ctx_type": 0,
        "rope_scaling_type": -1,
        "attention_type": -1,
        "flash_attn_type": -1,
        "rope_freq_base": 0.0,
        "rope_freq_scale": 0.0,
        "yarn_ext_factor": -1.0,
        "yarn_attn_factor": -1.0,
        "yarn_beta_fast": -1.0,
        "yarn_beta_slow": -1.0,
        "yarn_orig_ctx": 0,
        "defrag_thold": -1.0,
        "cb_eval": None,
        "cb_eval_user_data": None,
        "logits_all": False,
        "no_perf": True,
        "op_offload": True,
        "swa_full": True,
        "kv_unified": False,
        "samplers": None,
        "n_samplers": 0,
        "ctx_other": None,
    }
    # the tokens of all sequences together; 0: the model's n_ctx_train for each sequence
    n_ctx: int = 512
    n_batch: int = 2048  # the most tokens of one llama_decode
    n_ubatch: int = 512  # the tokens that are computed at once
    n_seq_max: int = 1  # sequences, each with n_ctx / n_seq_max tokens
    n_threads: int = 0  # 0: the model's
    n_threads_batch: int = 0  # 0, or the same as n_threads
    pooling_type: int = LLAMA_POOLING_TYPE_UNSPECIFIED
    embeddings: bool = False  # llama_decode outputs embeddings instead of logits
    offload_kqv: bool = True  # False: keys, values and attention on the CPU, wherever layers are
    type_k: int = GGML_TYPE_F16
    type_v: int = GGML_TYPE_F16
    abort_callback: Callable[[Any], bool] | None = None
    abort_callback_data: Any = None
    attn: str = "dense"  # the method of decode steps, as `tamis methods` writes them
    prefill: str = "dense"  # the method of prompts
    audit: int = 0  # each audit-th decode step is compared with dense attention; 0: none


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
    """Tokens to decode. Arrays that are None: next positions, sequence 0, logits of the last.

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
