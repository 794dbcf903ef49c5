"""Checks of argument types: value, expectation and remedy, before anything is done."""

import os
from typing import Any

import numpy as np


def check_path(path: Any) -> None:
    """Raise TypeError unless a value is a path."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is {shown(path)}, expected the path of a .gguf file")


def check_whole(name: str, value: Any) -> None:
    """Raise TypeError unless a value is a whole number or None."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if value is not None and not whole:
        raise TypeError(f"{name} is {shown(value)}, expected a whole number: write {name}=4096")


def check_ids(ids: Any) -> None:
    """Raise TypeError for a text in place of token ids."""
    if isinstance(ids, str | bytes):
        raise TypeError(
            f"ids is the text {shown(ids)}, expected token ids: encode it with "
            "engine.tokenizer.encode(text) or engine.encode_chat(messages)"
        )


def check_messages(messages: Any) -> None:
    """Raise TypeError unless a value is a conversation."""
    if isinstance(messages, str | dict) or not all(hasattr(m, "keys") for m in messages):
        raise TypeError(
            f"messages is {shown(messages)}, expected a list of them: "
            'write [{"role": "user", "content": text}]'
        )


def shown(value: Any) -> str:
    """A value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
