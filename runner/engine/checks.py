"""Checks of argument types: value, expectation and remedy, before anything is done.

`typed` checks the calls of a function by its annotations.
"""

import difflib
import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

P = ParamSpec("P")
R = TypeVar("R")

_ONE: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bytes: "bytes",
    bool: "True or False",
    dict: "a dictionary",
    Mapping: "a dictionary",
    Path: "a path",
    type(None): "None",
}
_MANY: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "texts", dict: "dictionaries"}
_NUMBERS: dict[Any, tuple[type, ...]] = {
    bool: (int, np.bool_),
    int: (int, np.integer),
    float: (int, float, np.number),
}
_PLAIN = (str, bytes, int, float, list, tuple, dict, type(None), np.ndarray, np.generic)


def typed(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose calls check arguments of plain types by its annotations.

    A call with a wrong one raises TypeError, which says the argument's name, value, expectation and
    remedy. Of objects only a plain value in their place is noticed; of a sequence's elements, one
    of each type is looked at. Annotations with names that only type checkers import are passed by.
    """
    signature = inspect.signature(function)

    @functools.lru_cache(maxsize=1)
    def hints() -> dict[str, Any]:
        names = inspect.unwrap(function).__globals__
        return {
            each.name: _evaluated(each.annotation, names)
            for each in signature.parameters.values()
            if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        }

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            names = [*signature.parameters]
            close = [nearest(name, names) for name in kwargs if name not in names]
            raise TypeError(f"{function.__qualname__}: {error}{''.join(close[:1])}") from None
        for name, hint in hints().items():
            if name not in given:
                continue
            if name in _BY_NAME:
                _BY_NAME[name](given[name])
            elif not _fits(given[name], hint):
                raise TypeError(_report(signature.parameters[name], given[name], hint))
        return function(*args, **kwargs)

    return checked


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error message with the name that was meant; "" if none is near."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    if annotation is inspect.Parameter.empty:
        return Any
    if isinstance(annotation, str):
        try:
            return eval(annotation, names)
        except NameError:
            return Any
    return annotation


def _choices(hint: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    return any(_fits_one(value, each) for each in _choices(hint))


def _fits_one(value: Any, hint: Any) -> bool:
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in _NUMBERS:
        return isinstance(value, _NUMBERS[kind])
    if kind is Any or not isinstance(kind, type) or not isinstance(value, _PLAIN):
        return True
    if isinstance(value, list | tuple | np.ndarray):
        is_list = issubclass(kind, list | tuple) or kind in (Sequence, np.ndarray)
        return is_list and (not inner or _elements_fit(value, inner[0]))
    if isinstance(value, dict):
        return issubclass(kind, dict) or kind is Mapping
    return issubclass(type(value), kind) and kind is not Sequence


def _elements_fit(values: Any, hint: Any) -> bool:
    if isinstance(values, np.ndarray):
        values = values.ravel()[:1]
    return all(_fits(each, hint) for each in {type(each): each for each in values}.values())


def _report(parameter: inspect.Parameter, value: Any, hint: Any) -> str:
    choices = _choices(hint)
    words = [_described(each) for each in choices if each is not str or Path not in choices]
    text = f"{parameter.name} is {shown(value)}, expected "
    text += ", ".join(words[:-1]) + (" or " if words[:-1] else "") + words[-1]
    default = parameter.default
    if default is parameter.empty or default in (None, [], ()):
        return text
    return f"{text}: write {parameter.name}={default!r}"


def _described(hint: Any) -> str:
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (list, tuple, Sequence):
        many = _MANY.get(typing.get_origin(inner[0]) or inner[0]) if inner else None
        return f"a list of {many}" if many else "a list"
    name = str(getattr(kind, "__name__", kind))
    return _ONE.get(kind) or f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def check_engine(engine: Any) -> None:
    """Raise TypeError for what is no Engine, such as a model's name."""
    if not hasattr(engine, "encode_chat"):
        raise TypeError(f"engine is {shown(engine)}, expected an Engine: Engine.load(model)")


def check_count(name: str, value: Any, least: int = 0) -> None:
    """Raise TypeError or ValueError unless a value is None or a whole number >= least."""
    if value is None:
        return
    if not _fits(value, int):
        raise TypeError(f"{name} is {shown(value)}, expected a whole number or None")
    if value < least:
        raise ValueError(f"{name} is {value}, expected {least} or more; None: as many as there are")


def check_ids(ids: Any) -> None:
    """Raise TypeError for a text in place of token ids, or for something else than numbers."""
    is_text = isinstance(ids, str | bytes)
    if not is_text and not _fits(ids, Sequence[int]):
        raise TypeError(f"ids is {shown(ids)}, expected a list of whole numbers: token ids")
    if is_text:
        raise TypeError(
            f"ids is the text {shown(ids)}, expected token ids: encode it with "
            "engine.encode(text) or engine.encode_chat(messages)"
        )


def check_messages(messages: Any) -> None:
    """Raise TypeError unless a value is a conversation: a sequence of messages with their roles.

    The content of a message is a text, None, or a list of parts.
    """
    remedy = 'write [{"role": "user", "content": text}]'
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise TypeError(f"messages is {shown(messages)}, expected a list of them: {remedy}")
    for i, message in enumerate(messages):
        if not hasattr(message, "keys"):
            raise TypeError(f"messages[{i}] is {shown(message)}, expected a dictionary: {remedy}")
        if not isinstance(message.get("role"), str):
            raise TypeError(f'messages[{i}] has no text as its "role": {remedy}')
        if "content" not in message and message["role"] in ("system", "user"):
            raise TypeError(f'messages[{i}] has no "content": {remedy}')
        content = message.get("content")
        parts = content if isinstance(content, list | tuple) else ()
        if not isinstance(content, str | None | list | tuple) or not all(
            hasattr(part, "keys") for part in parts
        ):
            raise TypeError(
                f'messages[{i}]["content"] is {shown(content)}, expected a text: {remedy}'
            )


_BY_NAME: dict[str, Callable[[Any], None]] = {"ids": check_ids, "messages": check_messages}


def shown(value: Any) -> str:
    """A value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
