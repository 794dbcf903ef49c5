"""llama.cpp through its C interface, of whichever package carries its shared library.

Either the wheel xllamacpp or llama-cpp-python, neither of which is imported: their records of
parameters differ, so only the fields that both begin with are written, and the flags after them
are found by their defaults.
"""

import ctypes as c
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np

N_CTX = 256
Array = np.ndarray[Any, Any]


class Opaque(c.Structure):
    """A record of parameters that is larger than any version's."""

    _fields_ = (("bytes", c.c_uint8 * 512),)


class Batch(c.Structure):
    """Tokens, their positions and sequences, and which logits are asked for."""

    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.POINTER(c.c_float)),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )


# Name: what it returns, what it takes.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "llama_backend_init": (None,),
    "llama_log_set": (None, c.c_void_p, c.c_void_p),
    "llama_model_default_params": (Opaque,),
    "llama_model_load_from_file": (c.c_void_p, c.c_char_p, Opaque),
    "llama_model_free": (None, c.c_void_p),
    "llama_context_default_params": (Opaque,),
    "llama_init_from_model": (c.c_void_p, c.c_void_p, Opaque),
    "llama_free": (None, c.c_void_p),
    "llama_batch_init": (Batch, c.c_int32, c.c_int32, c.c_int32),
    "llama_batch_free": (None, Batch),
    "llama_decode": (c.c_int32, c.c_void_p, Batch),
    "llama_get_logits": (c.POINTER(c.c_float), c.c_void_p),
    "llama_get_embeddings": (c.POINTER(c.c_float), c.c_void_p),
    "llama_model_get_vocab": (c.c_void_p, c.c_void_p),
    "llama_vocab_n_tokens": (c.c_int32, c.c_void_p),
    "llama_model_n_embd": (c.c_int32, c.c_void_p),
}
AT = {"n_ctx": 0, "n_batch": 4, "n_ubatch": 8, "n_seq_max": 12, "n_threads": 28}
AT |= {"n_threads_batch": 32, "pooling": 44, "flash": 52, "type_k": 104, "type_v": 108}
LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)


def shared_library() -> Path:
    """The library that has llama.cpp; raises RuntimeError where neither package is installed."""
    for package, pattern in (("xllamacpp", "xllamacpp*.so"), ("llama_cpp", "lib/libllama.so")):
        spec = importlib.util.find_spec(package)
        for folder in spec.submodule_search_locations or () if spec else ():
            for path in Path(folder).glob(pattern):
                return path
    raise RuntimeError("no llama.cpp to compare with: pip install xllamacpp")


class Oracle:
    """llama.cpp, and what it says while it loads a file."""

    def __init__(self) -> None:
        os.environ["GGML_NO_BACKTRACE"] = "1"  # a debugger at each refusal takes seconds
        self._c = c.CDLL(str(shared_library()))
        for name, (result, *arguments) in FUNCTIONS.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments
        self.said = ""
        self._log = LOG(self._heard)
        self._c.llama_log_set(self._log, None)
        self._c.llama_backend_init()

    def _heard(self, _level: int, text: bytes, _data: Any) -> None:
        self.said += text.decode(errors="replace")

    def loads(self, path: Path) -> bool:
        """Whether it loads the file; said has why not."""
        if model := self._load(path):
            self._c.llama_model_free(model)
        return bool(model)

    def _load(self, path: Path) -> Any:
        self.said = ""
        parameters = self._c.llama_model_default_params()
        return self._c.llama_model_load_from_file(str(path).encode(), parameters)

    def logits(self, path: Path, ids: list[int], *, encoder: bool, flash: bool) -> Array:
        """With a KV cache of float32, then of float16: [2, n_tok, n_vocab], or an encoder's rows.

        Raises RuntimeError where it loads or computes nothing.
        """
        kinds = (0, 1)
        return np.array(
            [self._logits(path, ids, kind, encoder=encoder, flash=flash) for kind in kinds]
        )

    def _context(self, model: Any, type_kv: int, *, encoder: bool, flash: bool) -> Any:
        parameters = self._c.llama_context_default_params()
        defaults = bytes(parameters.bytes)
        flags = defaults.find(bytes((0, 1, 1, 1, 1)), 112)  # embeddings, then what is on
        known = np.frombuffer(defaults[:8], np.int32).tolist() == [512, 2048]
        if not known or flags < 0:
            raise RuntimeError("llama.cpp's parameters are of another layout than is known here")
        values = {"n_ctx": N_CTX, "n_batch": 512, "n_ubatch": 512, "n_seq_max": 1}
        values |= {"n_threads": 1, "n_threads_batch": 1, "flash": int(flash)}
        values |= {"type_k": type_kv, "type_v": type_kv, "pooling": 0 if encoder else -1}
        for name, value in values.items():
            c.c_int32.from_buffer(parameters, AT[name]).value = value
        parameters.bytes[flags] = encoder
        return self._c.llama_init_from_model(model, parameters)

    def _logits(
        self, path: Path, ids: list[int], type_kv: int, *, encoder: bool, flash: bool
    ) -> Array:
        api, n = self._c, len(ids)
        if not (model := self._load(path)):
            raise RuntimeError("llama.cpp does not load it")
        context = self._context(model, type_kv, encoder=encoder, flash=flash)
        batch = api.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if not context or api.llama_decode(context, batch):
            raise RuntimeError("llama.cpp does not compute it")
        width = (
            api.llama_model_n_embd(model)
            if encoder
            else api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        )
        rows = (api.llama_get_embeddings if encoder else api.llama_get_logits)(context)
        found = np.ctypeslib.as_array(rows, shape=(n, width)).copy()
        api.llama_batch_free(batch)
        api.llama_free(context)
        api.llama_model_free(model)
        return found
