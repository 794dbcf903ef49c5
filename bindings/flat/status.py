"""Failures of the flat API: a returned value and a message in the log, never an exception.

Void functions of llama.h return a code here: LLAMA_OK, or the code of the failure.
"""

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

from tamis.engine.session import SessionFileError
from tamis.select.notation import MethodError
from tamis.text.chat_template import PromptError

LLAMA_OK = 0
LLAMA_NO_KV_SLOT = 1  # the batch does not fit the context
LLAMA_ABORTED = 2  # the abort callback asked for it
LLAMA_INVALID = -1  # a handle, an index, a size or a buffer that cannot be used
LLAMA_FAILED = -2  # the call was valid, but the work failed
LLAMA_UNSUPPORTED = -3  # llama.h has it, this library does not
LLAMA_INTERNAL = -4  # a bug of this library
INT32_MIN = -(1 << 31)  # the failure value of functions whose negative values are sizes

GGML_LOG_LEVEL_INFO, GGML_LOG_LEVEL_WARN, GGML_LOG_LEVEL_ERROR = 2, 3, 4

LogCallback = Callable[[int, bytes, Any], None]
P = ParamSpec("P")
R = TypeVar("R")

# Exceptions that a valid call can meet; any other one is a bug.
_WORLD = (OSError, MemoryError, ValueError, ImportError, SessionFileError, PromptError, MethodError)
CODE = object()  # in `returns`: stands for the code of the failure
_log: list[Any] = [None, None]
_last = threading.local()


class Refusal(Exception):
    """The reason why a call is refused; `code` is returned by functions that return codes."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def invalid(message: str) -> NoReturn:
    """Raise a Refusal for an argument that is not valid."""
    raise Refusal(LLAMA_INVALID, message)


def returns(failed: Any = CODE) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: return `failed`, or the failure's code, where a function would raise.

    Interrupts are raised all the same.
    """

    def wrap(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Exception as e:
                code: Any = _report(function.__name__, e)
                return code if failed is CODE else failed

        return call

    return wrap


def _report(name: str, error: Exception) -> int:
    code = LLAMA_FAILED if isinstance(error, _WORLD) else LLAMA_INTERNAL
    code = error.code if isinstance(error, Refusal) else code
    text = str(error) if code != LLAMA_INTERNAL else f"{type(error).__name__}: {error}"
    _last.code, _last.text = code, f"{name}: {text}"
    say(GGML_LOG_LEVEL_ERROR, _last.text)
    return code


def say(level: int, text: str) -> None:
    """Pass a line to the log callback, or to the logger "tamis" if there is none."""
    callback, user_data = _log
    if callback is None:
        logging.getLogger("tamis").log(10 * level, text)
        return
    try:
        callback(level, text.encode() + b"\n", user_data)
    except Exception:
        logging.getLogger("tamis").exception("the log callback failed")


@returns()
def llama_log_set(log_callback: LogCallback | None, user_data: Any) -> int:
    """Send messages to log_callback(level, text, user_data); None: to the logger "tamis"."""
    if log_callback is not None and not callable(log_callback):
        invalid(f"log_callback is {log_callback!r}, expected a function or None")
    _log[:] = log_callback, user_data
    return LLAMA_OK


def llama_log_get() -> tuple[LogCallback | None, Any]:
    """The function that receives messages, None for the logger "tamis", and its user_data."""
    return _log[0], _log[1]


def tamis_last_error() -> tuple[int, bytes]:
    """The code and the message of this thread's last failed call.

    (LLAMA_OK, b"") if none failed.
    """
    return getattr(_last, "code", LLAMA_OK), getattr(_last, "text", "").encode()
