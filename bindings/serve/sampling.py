"""The sampling fields of requests: OpenAI's, llama.cpp's and other names for them."""

import math
from collections.abc import Mapping
from typing import Any, cast

from tamis.bindings.drop_in.sampling import Sampling
from tamis.bindings.serve.body import Body, shown
from tamis.bindings.serve.errors import invalid
from tamis.bindings.serve.text import TextModel

MAX_BREAKERS = 16
_HUGE = 1e6


def sampling_of(body: Body, text: TextModel) -> Sampling:
    """The sampling of a request; absent fields have llama.cpp's defaults. Raises ApiError."""
    usual = Sampling()

    def number(name: str, field: str, low: float, high: float) -> float:
        return body.number(name, getattr(usual, field), low, high)

    def integer(name: str, low: int, usually: int) -> int:
        found = body.integer(name, low, 1 << 30)
        return usually if found is None else found

    repeat = number("repetition_penalty", "repeat_penalty", 0.01, 100)
    breakers = usual.dry_sequence_breakers
    if body.get("dry_sequence_breakers") is not None:
        breakers = body.texts("dry_sequence_breakers", MAX_BREAKERS, 40)
    return Sampling(
        temp=number("temperature", "temp", 0, 100),
        top_k=max(integer("top_k", -1, usual.top_k), 0),
        top_p=number("top_p", "top_p", 0, 1),
        min_p=number("min_p", "min_p", 0, 1),
        typical_p=number("typical_p", "typical_p", 0, 1),
        repeat_penalty=body.number("repeat_penalty", repeat, 0.01, 100),
        repeat_last_n=body.integer("repeat_last_n", -1, 1 << 20),
        frequency_penalty=body.number("frequency_penalty", 0.0, -2, 2),
        presence_penalty=body.number("presence_penalty", 0.0, -2, 2),
        mirostat_mode=integer("mirostat", 0, 0),
        mirostat_tau=number("mirostat_tau", "mirostat_tau", 0, _HUGE),
        mirostat_eta=number("mirostat_eta", "mirostat_eta", 0, _HUGE),
        dynatemp_range=number("dynatemp_range", "dynatemp_range", 0, 100),
        dynatemp_exponent=number("dynatemp_exponent", "dynatemp_exponent", 0, _HUGE),
        top_n_sigma=number("top_n_sigma", "top_n_sigma", -1, _HUGE),
        xtc_probability=number("xtc_probability", "xtc_probability", 0, 1),
        xtc_threshold=number("xtc_threshold", "xtc_threshold", 0, 1),
        dry_multiplier=number("dry_multiplier", "dry_multiplier", 0, _HUGE),
        dry_base=number("dry_base", "dry_base", 0, _HUGE),
        dry_allowed_length=integer("dry_allowed_length", 1, usual.dry_allowed_length),
        dry_penalty_last_n=integer("dry_penalty_last_n", -1, usual.dry_penalty_last_n),
        dry_sequence_breakers=breakers,
        min_keep=integer("min_keep", 0, 0),
        ignore_eos=body.flag("ignore_eos"),
        logit_bias=_bias(body.get("logit_bias"), text),
    )


def check_defaults(fields: Mapping[str, Any]) -> None:
    """Raise ApiError for a wrong default of a field of requests; logit_bias is not checked."""
    known = {name: value for name, value in fields.items() if name != "logit_bias"}
    sampling_of(Body(known), cast(TextModel, None))


def _bias(given: Any, text: TextModel) -> dict[int, float] | None:
    """Biases by token id, from OpenAI's object or llama.cpp's list of pairs.

    A pair is an id or a text, and a number or False, which forbids the token.
    """
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not pairs:
        return None
    found: dict[int, float] = {}
    try:
        for key, value in pairs:
            number = -math.inf if value is False else float(value)
            for token in _tokens(key, text, as_id=isinstance(given, dict)):
                found[token] = number
    except (TypeError, ValueError, OverflowError):
        raise invalid("logit_bias is not of token ids and numbers", "logit_bias") from None
    n_vocab = len(text.vocab)
    if not all(0 <= token < n_vocab for token in found):
        raise invalid(f"logit_bias has a token that is not one of 0 to {n_vocab - 1}", "logit_bias")
    return found


def _tokens(key: Any, text: TextModel, *, as_id: bool) -> list[int]:
    if isinstance(key, int) and not isinstance(key, bool):
        return [key]
    if not isinstance(key, str):
        raise TypeError(shown(key))
    if as_id and key.lstrip("-").isdecimal():
        return [int(key)]
    return text.unbounded.encode(key, add_special=False)
