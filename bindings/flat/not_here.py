"""Functions of llama.h that are not supported: each says why, and what to do instead.

Nothing is sampled on a device, so results of such sampling are always empty.
"""

import shutil
from pathlib import Path
from typing import Any

from tamis.bindings.flat.buffers import as_text
from tamis.bindings.flat.model import whole_engine
from tamis.bindings.flat.params import LLAMA_TOKEN_NULL
from tamis.bindings.flat.status import LLAMA_OK, LLAMA_UNSUPPORTED, Refusal, returns

_FILE = "C's FILE pointers cannot be read here: give the path"
_LAZY = "grammars that begin at a trigger are not supported: use llama_sampler_init_grammar"
_TRAIN = "models are not trained here"
_WHY: dict[str, tuple[Any, str]] = {
    "llama_adapter_lora_init_from_file_ptr": (0, _FILE),
    "llama_model_load_from_file_ptr": (0, _FILE),
    "llama_model_init_from_user": (0, "a model comes from a file: llama_model_load_from_file"),
    "llama_model_quantize": (
        -LLAMA_UNSUPPORTED,
        "models are not quantized here: use llama.cpp's llama-quantize, or fetch a quantized file",
    ),
    "llama_model_quantize_default_params": (None, "models are not quantized here"),
    "llama_opt_init": (LLAMA_UNSUPPORTED, _TRAIN),
    "llama_opt_epoch": (LLAMA_UNSUPPORTED, _TRAIN),
    "llama_opt_param_filter_all": (False, _TRAIN),
    "llama_sampler_init_adaptive_p": (0, "the sampler adaptive-p is not supported"),
    "llama_sampler_init_grammar_lazy": (0, _LAZY),
    "llama_sampler_init_grammar_lazy_patterns": (0, _LAZY),
}


def _refusing(name: str, failed: Any, why: str) -> Any:
    def call(*_given: Any) -> Any:
        raise Refusal(LLAMA_UNSUPPORTED, why)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Not here: {why}. Returns {failed!r}."
    return returns(failed)(call)


REFUSED = {name: _refusing(name, failed, why) for name, (failed, why) in _WHY.items()}


def llama_set_sampler(ctx: int, seq_id: int, smpl: int) -> bool:
    """Always False: samplers run on the logits, in llama_sampler_sample, not on the device."""
    return False


def llama_get_sampled_token_ith(ctx: int, i: int) -> int:
    """Always LLAMA_TOKEN_NULL: nothing was sampled on a device."""
    return LLAMA_TOKEN_NULL


def _nothing(ctx: int, i: int) -> None:
    """Always None: nothing was sampled on a device."""


def _none_of_them(ctx: int, i: int) -> int:
    """Always 0: nothing was sampled on a device."""
    return 0


llama_get_sampled_probs_ith = llama_get_sampled_logits_ith = _nothing
llama_get_sampled_candidates_ith = _nothing
llama_get_sampled_probs_count_ith = llama_get_sampled_logits_count_ith = _none_of_them
llama_get_sampled_candidates_count_ith = _none_of_them


@returns()
def llama_model_save_to_file(model: int, path_model: Any) -> int:
    """Copy the model's file, unless it is split. The target is written whole or not at all."""
    source, target = Path(whole_engine(model).path), Path(as_text(path_model, "path_model"))
    if "-00001-of-" in source.name:
        raise Refusal(LLAMA_UNSUPPORTED, f"{source.name} is split: copy its parts")
    partial = target.with_name(f".{target.name}.partial")
    try:
        shutil.copyfile(source, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return LLAMA_OK
