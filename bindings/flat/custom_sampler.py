"""Samplers of a program's own: C functions as steps of a chain; and the sampler of infill."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tamis.bindings.flat.buffers import as_array, as_function
from tamis.bindings.flat.handles import TABLE
from tamis.bindings.flat.model import Vocab
from tamis.bindings.flat.params import TOKEN_DATA, llama_token_data_array
from tamis.bindings.flat.sampler import Sampler
from tamis.bindings.flat.status import invalid, returns
from tamis.sampling.base import Candidates, Step
from tamis.sampling.infill import Infill


@dataclass(slots=True)
class llama_sampler_i:
    """A sampler's functions; the first argument of each is the ctx of llama_sampler_init.

    apply changes a llama_token_data_array: logits, size, order, and selected if it chooses a token.
    clone returns the ctx of a copy; without it ctx is copied deeply.
    """

    apply: Callable[[Any, llama_token_data_array], None]
    accept: Callable[[Any, int], None] | None = None
    reset: Callable[[Any], None] | None = None
    clone: Callable[[Any], Any] | None = None
    name: Callable[[Any], bytes | str] | None = None


class Custom(Step):
    """A step that calls a program's functions. It chooses a token if they set `selected`."""

    def __init__(self, functions: llama_sampler_i, ctx: Any) -> None:
        self._functions, self._ctx = functions, ctx
        self.chooses = False  # type: ignore[misc]  # what the last call did

    def __deepcopy__(self, memo: dict[int, Any]) -> "Custom":
        clone = self._functions.clone
        return Custom(self._functions, clone(self._ctx) if clone else copy.deepcopy(self._ctx))

    def apply(self, c: Candidates) -> Candidates:
        """The candidates that the program's function returns.

        Raises Refusal if they are malformed.
        """
        data = np.zeros(len(c), TOKEN_DATA)
        data["id"], data["logit"], data["p"] = c.ids, c.logits, c.probs()
        array = llama_token_data_array(data, len(data), -1, c.sorted)
        self._functions.apply(self._ctx, array)
        if not 1 <= array.size <= len(array.data) or not -1 <= array.selected < array.size:
            invalid(f"apply left size {array.size} and selected {array.selected}")
        left = as_array(array.data, TOKEN_DATA, "data", array.size)
        self.chooses = array.selected >= 0  # type: ignore[misc]
        rows = slice(array.selected, array.selected + 1) if self.chooses else slice(None)
        return Candidates(left["id"][rows].copy(), left["logit"][rows].copy(), bool(array.sorted))

    def accept(self, token_id: int) -> None:
        """Pass the token to the program's function."""
        if self._functions.accept is not None:
            self._functions.accept(self._ctx, token_id)

    def reset(self) -> None:
        """Call the program's function."""
        if self._functions.reset is not None:
            self._functions.reset(self._ctx)


@returns(0)
def llama_sampler_init(iface: llama_sampler_i, ctx: Any) -> int:
    """A handle of a sampler with a program's own functions, which are called with ctx."""
    if not isinstance(iface, llama_sampler_i):
        invalid(f"iface is {iface!r}, expected llama_sampler_i")
    for field in ("apply", "accept", "reset", "clone", "name"):
        as_function(getattr(iface, field), field)
    if iface.apply is None:
        invalid("iface.apply is None, expected a function")
    name = iface.name(ctx) if iface.name is not None else "custom"
    text = name.decode() if isinstance(name, bytes) else str(name)
    return TABLE.add(Sampler(text, Custom(iface, ctx)))


@returns(0)
def llama_sampler_init_infill(vocab: int) -> int:
    """A handle of a sampler that ends or continues infill; put it after top-k and top-p."""
    engine = TABLE.get(vocab, Vocab).model.engine
    tokenizer = engine.tokenizer
    if not tokenizer.eog:
        invalid("the vocabulary has no token that ends a text")
    eot = engine.vocab.eot if engine.vocab.eot is not None else min(tokenizer.eog)
    return TABLE.add(Sampler("infill", Infill(tokenizer.piece, tokenizer.eog, eot)))
