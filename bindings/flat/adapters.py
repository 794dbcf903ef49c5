"""Functions of LoRA adapters and control vectors: all sequences of a context share them.

Weights are not changed, so contexts of one model may have different adapters. The KV cache was
computed with the context's adapters: they change only while it holds no tokens.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from tamis.bindings.flat.buffers import as_array, as_float, as_int, as_text, write_string
from tamis.bindings.flat.context import Context, using
from tamis.bindings.flat.handles import TABLE
from tamis.bindings.flat.model import Model, as_string, whole_engine
from tamis.bindings.flat.status import LLAMA_OK, LLAMA_UNSUPPORTED, Refusal, invalid, returns
from tamis.engine.adapters import Adapters, ControlVector, Lora, adapted


class Adapter:
    """A LoRA adapter of a file, for one model."""

    def __init__(self, model: Model, lora: Lora) -> None:
        self.model, self.lora = model, lora


@returns(0)
def llama_adapter_lora_init(model: int, path_lora: Any) -> int:
    """A handle of the adapter in a GGUF file; 0 where it cannot be read or is of another model."""
    engine, lora = whole_engine(model), Lora.load(as_text(path_lora, "path_lora"))
    adapted(engine.model, Adapters(((lora, 1.0),)))
    return TABLE.add(Adapter(TABLE.get(model, Model), lora))


@returns()
def llama_adapter_lora_free(adapter: int) -> int:
    """Free an adapter; contexts that have it keep it."""
    TABLE.remove(adapter, Adapter)
    return LLAMA_OK


def _texts(adapter: Any) -> list[tuple[str, str]]:
    metadata = TABLE.get(adapter, Adapter).lora.metadata
    return [(key, as_string(value)) for key, value in metadata.items()]


@returns(-1)
def llama_adapter_meta_count(adapter: int) -> int:
    """How many metadata keys an adapter's file has."""
    return len(_texts(adapter))


@returns(-1)
def llama_adapter_meta_val_str(adapter: int, key: Any, buf: Any, buf_size: int) -> int:
    """A metadata value as text, as snprintf writes it; its length, -1: there is none."""
    found = dict(_texts(adapter)).get(as_text(key, "key"))
    return -1 if found is None else write_string(found, buf, buf_size)


@returns(-1)
def llama_adapter_meta_key_by_index(adapter: int, i: int, buf: Any, buf_size: int) -> int:
    """The name of the metadata key i, as snprintf writes it."""
    found = _texts(adapter)
    return write_string(found[as_int(i, "i", 0, len(found) - 1)][0], buf, buf_size)


@returns(-1)
def llama_adapter_meta_val_str_by_index(adapter: int, i: int, buf: Any, buf_size: int) -> int:
    """The value of the metadata key i, as snprintf writes it."""
    found = _texts(adapter)
    return write_string(found[as_int(i, "i", 0, len(found) - 1)][1], buf, buf_size)


def _invocation(adapter: Any) -> list[int]:
    found = TABLE.get(adapter, Adapter).lora.metadata.get("adapter.alora.invocation_tokens", ())
    return [int(token) for token in found]


@returns(0)
def llama_adapter_get_alora_n_invocation_tokens(adapter: int) -> int:
    """The number of tokens that switch an activated adapter on; 0 for any other adapter."""
    return len(_invocation(adapter))


@returns(None)
def llama_adapter_get_alora_invocation_tokens(adapter: int) -> np.ndarray | None:
    """The invocation tokens, int32 [n]; None if there are none.

    The caller decides when to use it.
    """
    found = _invocation(adapter)
    return np.array(found, np.int32) if found else None


@returns()
def llama_set_adapters_lora(ctx: int, adapters: Any, n_adapters: int, scales: Any) -> int:
    """Make a context use these adapters and no others, each multiplied by its scale."""
    n = as_int(n_adapters, "n_adapters", 0)
    if n and (len(adapters) < n or len(scales) < n):
        invalid(f"adapters or scales has fewer than {n} entries")
    with using(ctx) as context:
        found = []
        for i in range(n):
            one = TABLE.get(adapters[i], Adapter)
            if one.model is not context.model:
                invalid(f"adapter {i} is of another model than the context")
            found.append((one.lora, as_float(scales[i], "scales")))
        _change(context, replace(context.adapters, loras=tuple(found)))
    return LLAMA_OK


@returns()
def llama_set_adapter_cvec(
    ctx: int, data: Any, len: int, n_embd: int, il_start: int, il_end: int
) -> int:
    """Add vectors to the layers il_start to il_end of a context; data None removes them.

    data: float32 [n_layer - 1, n_embd], of the layers from 1 on.
    """
    with using(ctx) as context:
        if data is None:
            _change(context, replace(context.adapters, control=(), layers=None))
            return LLAMA_OK
        own = context.model.engine.hp.n_embd
        if as_int(n_embd, "n_embd") != own:
            invalid(f"n_embd is {n_embd}, the model has {own}")
        n_row = as_int(len, "len", own) // own
        rows = as_array(data, np.float32, "data", n_row * own).reshape(n_row, own).copy()
        vector = ControlVector("the control vector", {i + 1: row for i, row in enumerate(rows)})
        layers = as_int(il_start, "il_start", 0), as_int(il_end, "il_end", 0)
        _change(context, replace(context.adapters, control=((vector, 1.0),), layers=layers))
    return LLAMA_OK


def _change(context: Context, adapters: Adapters) -> None:
    """Replace the adapters and all sequences of a context. Raises Refusal if one holds tokens."""
    if any(context.n_past(seq) for seq in context.sessions):
        raise Refusal(
            LLAMA_UNSUPPORTED,
            "the context holds tokens that were computed with its adapters: call "
            "llama_memory_clear before they are changed",
        )
    before = context.adapters
    context.adapters = adapters
    try:
        session = context.new_session()
    except Exception:
        context.adapters = before
        raise
    context.sessions = {0: session}
    context.drop_outputs()
