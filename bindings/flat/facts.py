"""Functions that report facts of a model, or of the library."""

import re
from typing import Any

from tamis.bindings.flat import constants
from tamis.bindings.flat.buffers import as_int, as_text, write_string
from tamis.bindings.flat.context import MAX_SEQ, using
from tamis.bindings.flat.model import engine_of, llama_model_load_from_file, whole_engine
from tamis.bindings.flat.named_formats import NAMED
from tamis.bindings.flat.params import llama_model_params
from tamis.bindings.flat.status import invalid, returns
from tamis.version import __version__


@returns(False)
def llama_model_has_encoder(model: int) -> bool:
    """Always False: no architecture here has an encoder beside a decoder."""
    engine_of(model)
    return False


@returns(False)
def llama_model_has_decoder(model: int) -> bool:
    """Whether llama_decode runs the model: True for every architecture here."""
    engine_of(model)
    return True


@returns(False)
def llama_model_is_recurrent(model: int) -> bool:
    """Whether layers keep a state and none has a KV cache."""
    return _has_states(model) and not _has_heads(model)


@returns(False)
def llama_model_is_hybrid(model: int) -> bool:
    """Whether layers keep a state and some have a KV cache."""
    return _has_states(model) and _has_heads(model)


@returns(False)
def llama_model_is_diffusion(model: int) -> bool:
    """Always False: no architecture here is a diffusion model."""
    engine_of(model)
    return False


def _has_states(model: int) -> bool:
    return bool(getattr(engine_of(model).hp, "recurrent", ()))


def _has_heads(model: int) -> bool:
    engine = engine_of(model)
    heads = engine.metadata.get(f"{engine.hp.arch}.attention.head_count", 0)
    return heads > 0 if isinstance(heads, int) else any(n > 0 for n in heads)


@returns(-1)
def llama_model_n_embd_inp(model: int) -> int:
    """The width of the first layer's input."""
    return engine_of(model).hp.n_embd


@returns(-1)
def llama_model_n_embd_out(model: int) -> int:
    """The width of embeddings."""
    return engine_of(model).hp.n_embd


@returns(-1)
def llama_model_n_layer_nextn(model: int) -> int:
    """The number of layers that predict tokens after the next one; they are not run here."""
    metadata = engine_of(model).metadata
    found = metadata.get(f"{engine_of(model).hp.arch}.nextn_predict_layers", 0)
    return found if isinstance(found, int) else 0


@returns(0)
def llama_model_n_cls_out(model: int) -> int:
    """The number of a classifier's labels; 1 if the file names none, as in llama.h."""
    return len(_labels(model)) or 1


@returns(None)
def llama_model_cls_label(model: int, i: int) -> bytes | None:
    """The name of label i of a classifier; None if the file names none."""
    labels = _labels(model)
    return labels[i].encode() if 0 <= as_int(i, "i") < len(labels) else None


def _labels(model: int) -> list[str]:
    engine = engine_of(model)
    found = engine.metadata.get(f"{engine.hp.arch}.classifier.output_labels", ())
    return [str(label) for label in found]


@returns(constants.LLAMA_ROPE_TYPE_NONE)
def llama_model_rope_type(model: int) -> int:
    """LLAMA_ROPE_TYPE_NEOX or _NORM: which elements of a head are rotated together."""
    engine = whole_engine(model)
    if not engine.model.ropes:
        return constants.LLAMA_ROPE_TYPE_NONE
    neox = engine.model.arch.neox
    return constants.LLAMA_ROPE_TYPE_NEOX if neox else constants.LLAMA_ROPE_TYPE_NORM


@returns(0.0)
def llama_model_rope_freq_scale_train(model: int) -> float:
    """The factor by which the file says that positions are multiplied."""
    engine = engine_of(model)
    factor = engine.metadata.get(f"{engine.hp.arch}.rope.scaling.factor", 1.0)
    return 1.0 / factor if isinstance(factor, float | int) and factor else 1.0


@returns(-1)
def llama_model_decoder_start_token(model: int) -> int:
    """Always -1: no architecture here has an encoder beside a decoder."""
    engine_of(model)
    return -1


@returns(constants.LLAMA_FTYPE_GUESSED)
def llama_model_ftype(model: int) -> int:
    """The file's LLAMA_FTYPE_*, or LLAMA_FTYPE_GUESSED if the file has none."""
    found = engine_of(model).metadata.get("general.file_type")
    return found if isinstance(found, int) else constants.LLAMA_FTYPE_GUESSED


_FTYPES = {
    value: name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
    for name, value in vars(constants).items()
    if name.startswith("LLAMA_FTYPE_")
}


@returns(None)
def llama_ftype_name(ftype: int) -> bytes | None:
    """The name of one of LLAMA_FTYPE_*; None for any other number."""
    found = _FTYPES.get(as_int(ftype, "ftype"))
    return None if found is None else found.encode()


_META_KEYS = {
    value: "general.sampling." + name.removeprefix("LLAMA_MODEL_META_KEY_SAMPLING_").lower()
    for name, value in vars(constants).items()
    if name.startswith("LLAMA_MODEL_META_KEY_SAMPLING_")
}


@returns(None)
def llama_model_meta_key_str(key: int) -> bytes | None:
    """The metadata key that one of LLAMA_MODEL_META_KEY_* stands for; None for any other number."""
    found = _META_KEYS.get(as_int(key, "key"))
    return None if found is None else found.encode()


_LOAD_MODES = {-1: "auto", 0: "none", 1: "mmap", 2: "mlock", 3: "mmap+mlock", 4: "dio"}


@returns(None)
def llama_load_mode_name(load_mode: int) -> bytes | None:
    """The name of one of LLAMA_LOAD_MODE_*; None for any other number."""
    found = _LOAD_MODES.get(as_int(load_mode, "load_mode"))
    return None if found is None else found.encode()


@returns(constants.LLAMA_LOAD_MODE_AUTO)
def llama_load_mode_from_str(text: Any) -> int:
    """The LLAMA_LOAD_MODE_* of a name; LLAMA_LOAD_MODE_AUTO for any other name."""
    found = {name: mode for mode, name in _LOAD_MODES.items()}
    return found.get(as_text(text, "str"), constants.LLAMA_LOAD_MODE_AUTO)


@returns(None)
def llama_flash_attn_type_name(flash_attn_type: int) -> bytes | None:
    """The name of one of LLAMA_FLASH_ATTN_TYPE_*; None for any other number."""
    return {-1: b"auto", 0: b"disabled", 1: b"enabled"}.get(as_int(flash_attn_type, "type"))


@returns(0)
def llama_model_load_from_splits(paths: Any, n_paths: int, params: llama_model_params) -> int:
    """A handle of the model in a split file, whose parts must be in one folder; 0 if it failed."""
    n = as_int(n_paths, "n_paths", 1)
    if not isinstance(paths, list | tuple) or len(paths) < n:
        invalid(f"paths is no list of {n} texts")
    return llama_model_load_from_file(paths[0], params)


@returns(-1)
def llama_split_path(
    split_path: Any, maxlen: int, path_prefix: Any, split_no: int, split_count: int
) -> int:
    """Write the name of part split_no (from 0) of a split file; returns its length."""
    no, count = as_int(split_no, "split_no", 0), as_int(split_count, "split_count", 1)
    text = f"{as_text(path_prefix, 'path_prefix')}-{no + 1:05d}-of-{count:05d}.gguf"
    return write_string(text, split_path, maxlen)


@returns(0)
def llama_split_prefix(
    split_prefix: Any, maxlen: int, split_path: Any, split_no: int, split_count: int
) -> int:
    """Write the prefix of that part's name, before its number.

    Its length, or 0 for another part.
    """
    no, count = as_int(split_no, "split_no", 0), as_int(split_count, "split_count", 1)
    name = as_text(split_path, "split_path")
    found = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", name, re.DOTALL)
    if found is None or (int(found[2]), int(found[3])) != (no + 1, count):
        return 0
    return write_string(found[1], split_prefix, maxlen)


def llama_max_devices() -> int:
    """The number of devices that one model can be spread over."""
    return 1


def llama_max_parallel_sequences() -> int:
    """The number of sequences that a context can have."""
    return MAX_SEQ


def llama_max_tensor_buft_overrides() -> int:
    """Always 0: tensors cannot be placed one by one."""
    return 0


def llama_supports_mmap() -> bool:
    """Always True: weights are always mapped."""
    return True


def llama_supports_mlock() -> bool:
    """Always False: weights are never locked in memory."""
    return False


def llama_supports_gpu_offload() -> bool:
    """Always True: a device is looked for when a model is loaded."""
    return True


def llama_supports_rpc() -> bool:
    """Always False: models are not run on other machines."""
    return False


def llama_numa_init(numa: int) -> None:
    """Do nothing; it is here for programs written for llama.h."""


@returns(0)
def llama_n_rs_seq(ctx: int) -> int:
    """Always 0: snapshots of recurrent states are internal."""
    with using(ctx):
        return 0


@returns(False)
def llama_get_causal_attn(ctx: int) -> bool:
    """Whether a token attends only to those before it."""
    with using(ctx) as context:
        return not context.model.engine.model.arch.is_encoder


@returns(-1)
def llama_chat_builtin_templates(output: Any, size: int) -> int:
    """The number of named chat formats; writes as many names to the list as size says."""
    names, n = [name.encode() for name in NAMED], as_int(size, "len", 0)
    if isinstance(output, list):
        output[:] = names[:n]
    return len(names)


def llama_version() -> bytes:
    """The version of tamis."""
    return __version__.encode()
