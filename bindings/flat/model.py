"""Functions of models (loading, shapes, metadata) and of the library as a whole."""

import threading
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

from tamis.bindings.flat.buffers import as_function, as_int, as_text, write_string
from tamis.bindings.flat.handles import TABLE
from tamis.bindings.flat.params import llama_model_params
from tamis.bindings.flat.status import LLAMA_ABORTED, LLAMA_OK, Refusal, invalid, returns
from tamis.engine.engine import Engine
from tamis.formats.gguf import GGUFFile
from tamis.formats.vocab import Vocab as Vocabulary
from tamis.jit_kernels.backends import device_for
from tamis.jit_kernels.compile.library import usual_level
from tamis.platform.processes import usable_cpus
from tamis.text.chat_template import ChatTemplate, default_template
from tamis.text.tokenizer import tokenizer_for


class VocabOnly:
    """A model without its weights: vocabulary, tokenizer, metadata.

    Raises OSError, GGUFError, TokenizerError.
    """

    def __init__(self, path: str) -> None:
        self.file = GGUFFile(path)
        self.metadata = self.file.metadata
        self.vocab = Vocabulary.from_gguf(self.file)
        self.tokenizer = tokenizer_for(self.vocab)
        self.hp = SimpleNamespace(
            arch=str(self.metadata.get("general.architecture", "")),
            n_vocab=len(self.vocab.tokens),
            **{name: self._shape(key) for name, key in _SHAPES.items()},
        )

    def _shape(self, key: str) -> int:
        found = self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}", 0)
        return found if isinstance(found, int) else 0

    @property
    def chat_template(self) -> ChatTemplate:
        """The file's chat template, or the usual one for its tokens. Raises PromptError."""
        source = self.vocab.chat_template or default_template(self.vocab.tokens)
        bos, eos = (
            "" if i is None else self.vocab.tokens[i] for i in (self.vocab.bos, self.vocab.eos)
        )
        return ChatTemplate(source, bos=bos, eos=eos)

    def close(self) -> None:
        """Do nothing: there are no threads."""


_SHAPES = {
    "n_ctx_train": "context_length",
    "n_embd": "embedding_length",
    "n_layer": "block_count",
    "n_head": "attention.head_count",
    "n_head_kv": "attention.head_count_kv",
    "sliding_window": "attention.sliding_window",
}


class Model:
    """An engine with a count of its users: the model and its contexts.

    The last one to be freed ends it.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._lock, self._n_user = threading.Lock(), 1
        self.handle, self.vocab_handle = TABLE.add(self), TABLE.add(Vocab(self))

    def share(self) -> None:
        """Count one more user."""
        with self._lock:
            self._n_user += 1

    def release(self) -> None:
        """Count one user less; the last one closes the engine."""
        with self._lock:
            self._n_user -= 1
            last = self._n_user == 0
        if last:
            self.engine.close()


class Vocab(NamedTuple):
    """A model's vocabulary, as a handle of its own."""

    model: Model


def engine_of(model: Any) -> Any:
    """The engine, or the VocabOnly, of a model's handle. Raises Refusal."""
    return TABLE.get(model, Model).engine


def whole_engine(model: Any) -> Engine:
    """The engine of a model with weights. Raises Refusal."""
    engine = engine_of(model)
    if isinstance(engine, VocabOnly):
        invalid("the model has its vocabulary only: load it without vocab_only")
    return engine


def llama_backend_init() -> None:
    """Do nothing; it is here for programs written for llama.h."""


def llama_backend_free() -> None:
    """Do nothing; it is here for programs written for llama.h."""


@returns(0)
def llama_model_load_from_file(path_model: Any, params: llama_model_params) -> int:
    """A handle of the model in a GGUF file, or of a split one's first part; 0 if it failed."""
    if not isinstance(params, llama_model_params):
        invalid(f"params is {params!r}, expected llama_model_default_params()")
    path, n_threads = as_text(path_model, "path_model"), as_int(params.n_threads, "n_threads", 0)
    n_gpu_layers = as_int(params.n_gpu_layers, "n_gpu_layers")
    callback = as_function(params.progress_callback, "progress_callback")
    if params.vocab_only:
        return Model(VocabOnly(path)).handle

    def report(stage: str, done: int, total: int | None) -> None:
        share = done / total if total else 0.0
        if callback is not None and not callback(share, params.progress_callback_user_data):
            raise Refusal(LLAMA_ABORTED, "the progress callback ended the loading")

    engine = Engine.load(
        path,
        n_threads=n_threads or None,
        device=device_for(n_gpu_layers),
        n_gpu_layers=n_gpu_layers,
        progress=report,
    )
    return Model(engine).handle


@returns()
def llama_model_free(model: int) -> int:
    """Free a model. Contexts made from it stay usable until they are freed."""
    found = TABLE.remove(model, Model)
    TABLE.remove(found.vocab_handle, Vocab)
    found.release()
    return LLAMA_OK


@returns(0)
def llama_model_get_vocab(model: int) -> int:
    """A handle of the model's vocabulary, which is freed with the model."""
    return TABLE.get(model, Model).vocab_handle


@returns(-1)
def llama_model_n_ctx_train(model: int) -> int:
    """The context length that the model was trained with, in tokens."""
    return engine_of(model).hp.n_ctx_train


@returns(-1)
def llama_model_n_embd(model: int) -> int:
    """Width of the model."""
    return engine_of(model).hp.n_embd


@returns(-1)
def llama_model_n_layer(model: int) -> int:
    """Blocks of the model."""
    return engine_of(model).hp.n_layer


@returns(-1)
def llama_model_n_head(model: int) -> int:
    """Query heads of a layer."""
    return engine_of(model).hp.n_head


@returns(-1)
def llama_model_n_head_kv(model: int) -> int:
    """Key and value heads of a layer."""
    return engine_of(model).hp.n_head_kv


@returns(-1)
def llama_model_n_swa(model: int) -> int:
    """The tokens of the sliding window; 0 if there is none."""
    return engine_of(model).hp.sliding_window


@returns(0)
def llama_model_size(model: int) -> int:
    """Bytes of all tensors."""
    return sum(tensor.n_bytes for tensor in engine_of(model).file.tensors.values())


@returns(0)
def llama_model_n_params(model: int) -> int:
    """The number of elements of all tensors."""
    total = 0
    for tensor in engine_of(model).file.tensors.values():
        n = 1
        for extent in tensor.shape:
            n *= int(extent)
        total += n
    return total


@returns(-1)
def llama_model_desc(model: int, buf: Any, buf_size: int) -> int:
    """Write "architecture, parameters, tensor types"; returns its length, as snprintf."""
    engine = engine_of(model)
    types = sorted({tensor.type.name for tensor in engine.file.tensors.values()})
    text = f"{engine.hp.arch} {llama_model_n_params(model) / 1e6:.0f}M {' '.join(types)}"
    return write_string(text, buf, buf_size)


@returns(None)
def llama_model_chat_template(model: int, name: Any) -> bytes | None:
    """The file's chat template, or the usual one for its tokens; None if there is none.

    name must be None: files with several templates are not read.
    """
    engine = engine_of(model)
    if name is not None:
        return None
    return engine.chat_template.source.encode()


@returns(-1)
def llama_model_meta_count(model: int) -> int:
    """The number of pairs of the file's metadata."""
    return len(engine_of(model).metadata)


@returns(-1)
def llama_model_meta_val_str(model: int, key: Any, buf: Any, buf_size: int) -> int:
    """Write a value of the metadata as text.

    Returns its length, as snprintf, or -1 for no such key.
    """
    metadata, name = engine_of(model).metadata, as_text(key, "key")
    if name not in metadata:
        return -1
    return write_string(as_string(metadata[name]), buf, buf_size)


@returns(-1)
def llama_model_meta_key_by_index(model: int, i: int, buf: Any, buf_size: int) -> int:
    """Write the key at index i; returns its length, as snprintf, or -1 for no such index."""
    return write_string(_key_at(model, i), buf, buf_size)


@returns(-1)
def llama_model_meta_val_str_by_index(model: int, i: int, buf: Any, buf_size: int) -> int:
    """Write the value at index i as text.

    Returns its length, as snprintf, or -1 for no such index.
    """
    value = engine_of(model).metadata[_key_at(model, i)]
    return write_string(as_string(value), buf, buf_size)


def _key_at(model: int, i: int) -> str:
    keys = list(engine_of(model).metadata)
    return keys[as_int(i, "i", 0, len(keys) - 1)]


def as_string(value: Any) -> str:
    """A metadata value as text; of a long list only the first 16 elements."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    return "[" + ", ".join(map(str, list(value)[:16])) + (", ...]" if len(value) > 16 else "]")


def llama_time_us() -> int:
    """The time of a monotonic clock in microseconds."""
    return time.perf_counter_ns() // 1000


@returns(b"")
def llama_print_system_info() -> bytes:
    """The number of usable processors, and the highest level of kernels for the CPU."""
    return f"n_cpu = {usable_cpus()} | level = {usual_level().name}".encode()
