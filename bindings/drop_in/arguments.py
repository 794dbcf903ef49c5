"""The arguments of llama_cpp.Llama: which have no effect here, and the meaning of the others."""

import fnmatch
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.flat.params import KV_TYPE_NAMES
from tamis.engine.adapters import Adapters, Lora
from tamis.engine.checks import nearest
from tamis.engine.engine import Engine
from tamis.fetch import registry as models
from tamis.jit_kernels.backends import device_for
from tamis.jit_kernels.cuda.runtime.driver import CudaError

CALLER = 4  # stack levels from here: the method, the check of its arguments, their caller

# Arguments of the constructor without effect, and the values that need no warning.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "split_mode": (1,),
    "main_gpu": (0,),
    "tensor_split": (None,),
    "use_mmap": (True,),
    "use_mlock": (False,),
    "kv_overrides": (None,),
    "rope_scaling_type": (-1, None),
    "attention_type": (-1,),
    "rope_freq_base": (0.0,),
    "rope_freq_scale": (0.0, 1.0),
    "yarn_ext_factor": (-1.0,),
    "yarn_attn_factor": (1.0,),
    "yarn_beta_fast": (32.0,),
    "yarn_beta_slow": (1.0,),
    "yarn_orig_ctx": (0,),
    "flash_attn": (False, True),
    "op_offload": (None,),
    "swa_full": (None,),
    "no_perf": (False, True),
    "lora_base": (None,),
    "numa": (False, 0),
}


def warn_without_effect(given: Mapping[str, Any], unknown: Iterable[str]) -> None:
    """Warn about arguments of the constructor that have no effect here."""
    names = [name for name, usual in _WITHOUT_EFFECT.items() if given[name] not in usual]
    if given["n_threads_batch"] not in (None, given["n_threads"]):
        names.append("n_threads_batch")
    names += [f"{name}{nearest(name, given)}" for name in unknown]
    for name in names:
        warnings.warn(f"{name} has no effect in tamis.Llama", stacklevel=CALLER)


def load_engine(
    path: str,
    n_threads: int | None,
    n_gpu_layers: int,
    *,
    offload_kqv: bool,
    precision: str,
    mmproj: str | None = None,
) -> Engine:
    """Load the engine; its last n_gpu_layers layers are on the CUDA device if there is one.

    mmproj: the file of an encoder of pictures.
    """
    if n_gpu_layers:
        try:
            return Engine.load(
                path,
                n_threads=n_threads or None,
                device=device_for(n_gpu_layers),
                n_gpu_layers=n_gpu_layers,
                offload_kqv=offload_kqv,
                precision=precision,
                mmproj=mmproj,
            )
        except (CudaError, ImportError) as e:
            warnings.warn(f"n_gpu_layers has no effect, the CPU is used: {e}", stacklevel=3)
    return Engine.load(path, n_threads=n_threads or None, precision=precision, mmproj=mmproj)


def lora_of(path: str | None, scale: float) -> Adapters | None:
    """The adapter of a file. Raises OSError, GGUFError, AdapterError."""
    return None if path is None else Adapters(((Lora.load(path), float(scale)),))


class NoSession:
    """Stands for the session of a Llama that has loaded only its vocabulary."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("this Llama has its vocabulary only: leave out vocab_only")


def kv_type(value: int | None, name: str) -> str:
    """The name of ggml's type; None is f16. Raises ValueError."""
    if value is not None and value not in KV_TYPE_NAMES:
        known = ", ".join(f"{i} ({text})" for i, text in KV_TYPE_NAMES.items())
        raise ValueError(f"{name} is {value!r}, expected None or one of {known}")
    return "f16" if value is None else KV_TYPE_NAMES[value]


def sampling_of(given: Mapping[str, Any]) -> Sampling:
    """The sampling arguments among those of a method."""
    if given["tfs_z"] != 1.0:
        warnings.warn("tfs_z has no effect in tamis.Llama, as in llama.cpp", stacklevel=CALLER)
    values = {name: given[name] for name in Sampling.__dataclass_fields__ if name in given}
    if "temperature" in given:
        values["temp"] = given["temperature"]
    return Sampling(**values)


def file_of(repo_id: str, pattern: str) -> str:
    """The name of the file of a hub's repository that a pattern matches. Raises ModelError."""
    if not any(c in pattern for c in "*?["):
        return pattern
    names = list(models.hub.list_files(repo_id).files)
    found = [first for first in models.hub.groups(names) if fnmatch.fnmatch(first, pattern)]
    if len(found) != 1:
        listed = ", ".join(found or names)
        raise models.ModelError(f"{pattern!r} matches {len(found)} models of {repo_id}: {listed}")
    return found[0]


def as_text(value: Any) -> str:
    """A value of the metadata as llama.cpp prints it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else str(list(value[:16]))
