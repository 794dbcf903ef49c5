"""mtmd, llama.cpp's encoder of pictures, through the C interface in the wheel xllamacpp."""

import ctypes as c
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.support.llama_oracle import Opaque, Oracle

Array = np.ndarray[Any, Any]
P, SIZE = c.c_void_p, c.c_size_t


class _Text(c.Structure):
    _fields_ = (("text", c.c_char_p), ("n", SIZE), ("special", c.c_bool), ("parse", c.c_bool))


class _Position(c.Structure):
    _fields_ = tuple((name, c.c_uint32) for name in "txyz")


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "mtmd_log_set": (None, P, P),
    "mtmd_helper_log_set": (None, P, P),
    "mtmd_context_params_default": (Opaque,),
    "mtmd_init_from_file": (P, c.c_char_p, P, Opaque),
    "mtmd_free": (None, P),
    "mtmd_bitmap_init": (P, c.c_uint32, c.c_uint32, c.c_char_p),
    "mtmd_bitmap_free": (None, P),
    "mtmd_input_chunks_init": (P,),
    "mtmd_input_chunks_size": (SIZE, P),
    "mtmd_input_chunks_get": (P, P, SIZE),
    "mtmd_input_chunks_free": (None, P),
    "mtmd_input_chunk_get_type": (c.c_int, P),
    "mtmd_input_chunk_get_n_tokens": (SIZE, P),
    "mtmd_input_chunk_get_n_pos": (c.c_int32, P),
    "mtmd_input_chunk_get_tokens_text": (c.POINTER(c.c_int32), P, c.POINTER(SIZE)),
    "mtmd_input_chunk_get_tokens_image": (P, P),
    "mtmd_image_tokens_get_decoder_pos": (_Position, P, c.c_int32, SIZE),
    "mtmd_tokenize": (c.c_int32, P, P, c.POINTER(_Text), c.POINTER(P), SIZE),
    "mtmd_encode_chunk": (c.c_int32, P, P),
    "mtmd_get_output_embd": (c.POINTER(c.c_float), P),
    "mtmd_helper_eval_chunks": (
        *(c.c_int32, P, P, P, c.c_int32, c.c_int32, c.c_int32, c.c_bool, c.POINTER(c.c_int32)),
    ),
    "llama_model_n_embd_inp": (c.c_int32, P),
}
MARKER = "<__media__>"


class Seen(NamedTuple):
    """What mtmd makes of a prompt."""

    chunks: list[list[int] | Array]  # token ids, or rows f32 [n, n_embd]
    logits: Array  # of the last position, f32 [n_vocab]; empty if the vocabulary lacks a mark
    n_past: int


class MtmdOracle(Oracle):
    """llama.cpp with pictures."""

    def __init__(self) -> None:
        super().__init__()
        for name, (result, *arguments) in FUNCTIONS.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments
        self._c.mtmd_log_set(self._log, None)
        self._c.mtmd_helper_log_set(self._log, None)

    def see(self, model: Path, mmproj: Path, text: str, pictures: list[Array]) -> Seen:
        """Chunks of a prompt with MARKER for each picture uint8 [h, w, 3], and the last logits."""
        api = self._c
        llm = self._load(model)
        if not llm:
            raise RuntimeError(self.said)
        parameters = api.mtmd_context_params_default()
        parameters.bytes[0] = 0  # use_gpu
        seer = api.mtmd_init_from_file(str(mmproj).encode(), llm, parameters)
        if not seer:
            raise RuntimeError(self.said)
        bitmaps = [
            api.mtmd_bitmap_init(x.shape[1], x.shape[0], np.ascontiguousarray(x).tobytes())
            for x in pictures
        ]
        chunks = api.mtmd_input_chunks_init()
        raw = text.encode()
        own = (P * len(bitmaps))(*bitmaps)
        status = api.mtmd_tokenize(
            seer, chunks, c.byref(_Text(raw, len(raw), True, True)), own, len(bitmaps)
        )
        if status:
            raise RuntimeError(self.said)
        width, found = api.llama_model_n_embd_inp(llm), []
        for i in range(api.mtmd_input_chunks_size(chunks)):
            chunk = api.mtmd_input_chunks_get(chunks, i)
            n = api.mtmd_input_chunk_get_n_tokens(chunk)
            if api.mtmd_input_chunk_get_type(chunk) == 0:
                count = SIZE()
                ids = api.mtmd_input_chunk_get_tokens_text(chunk, c.byref(count))
                found.append([ids[j] for j in range(count.value)])
                continue
            if api.mtmd_encode_chunk(seer, chunk):
                raise RuntimeError(self.said)
            rows = np.ctypeslib.as_array(api.mtmd_get_output_embd(seer), shape=(n, width))
            found.append(rows.copy())
        known = all(min(part, default=0) >= 0 for part in found if isinstance(part, list))
        logits, n_past = self._logits_after(llm, seer, chunks) if known else (np.zeros(0), 0)
        api.mtmd_input_chunks_free(chunks)
        for bitmap in bitmaps:
            api.mtmd_bitmap_free(bitmap)
        api.mtmd_free(seer)
        api.llama_model_free(llm)
        return Seen(found, logits, n_past)

    def _logits_after(self, llm: Any, seer: Any, chunks: Any) -> tuple[Array, int]:
        """The logits of the last position, and the number of positions."""
        api = self._c
        context = self._context(llm, 1, encoder=False, flash=False)
        past = c.c_int32()
        if api.mtmd_helper_eval_chunks(seer, context, chunks, 0, 0, 512, True, c.byref(past)):
            raise RuntimeError(self.said)
        n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(llm))
        logits = np.ctypeslib.as_array(api.llama_get_logits(context), shape=(n_vocab,)).copy()
        api.llama_free(context)
        return logits, past.value
