"""The response to a request that fails: a status and an error object."""

import json
from typing import Any

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}

_ANTHROPIC_KINDS = {
    "server_error": "api_error",
    "unavailable_error": "overloaded_error",
    "not_supported_error": "invalid_request_error",
}


class ApiError(Exception):
    """The refusal of a request. Its text is for the client and quotes no part of a prompt."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers: dict[str, str] = {}
        self.kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.more: dict[str, Any] = {}

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error | self.more}

    def packed(self) -> bytes:
        """The error as JSON, for another process."""
        parts = [self.status, self.message, self.code, self.param, self.kind, self.more]
        return json.dumps(parts).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> "ApiError":
        """The error that `packed` wrote."""
        status, message, code, param, kind, more = json.loads(data)
        error = cls(int(status), str(message), code=code, param=param)
        error.kind, error.more = str(kind), dict(more)
        return error

    def body_for(self, path: str) -> dict[str, Any]:
        """The error in the form of a path's API: ollama's and Anthropic's differ from OpenAI's."""
        if path.startswith("/api/"):
            return {"error": self.message}
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": self._as_anthropics()}
        return self.body

    def _as_anthropics(self) -> dict[str, str]:
        """The message by which Claude Code and others recognise that they must shorten a prompt."""
        n, most = (self.more.get(key) for key in ("n_prompt_tokens", "n_ctx"))
        if n is not None and most is not None:
            message = f"prompt is too long: {n} tokens > {most} maximum: shorten it, or start the "
            message += "server with a larger --ctx"
            return {"type": "invalid_request_error", "message": message}
        kind = "request_too_large" if self.status == 413 else self.kind
        return {"type": _ANTHROPIC_KINDS.get(kind, kind), "message": self.message}


def invalid(message: str, param: str | None = None) -> ApiError:
    """Status 400: an argument is not valid."""
    return ApiError(400, message, code="invalid_value", param=param)


def too_long(n_prompt: int, n_ctx: int, *, at_least: bool = False) -> ApiError:
    """Status 400: the prompt leaves no room for an answer; at_least: n_prompt is a lower bound.

    The wording is llama.cpp's and OpenAI's, which clients look for.
    """
    n = f"at least {n_prompt}" if at_least else f"{n_prompt}"
    error = ApiError(
        400,
        f"the request ({n} tokens) exceeds the available context size ({n_ctx} tokens): it is too "
        f"large, this model's maximum context length is {n_ctx} tokens, of which an answer needs "
        "at least one; shorten the prompt, or start the server with a larger --ctx",
        code="context_length_exceeded",
        param="messages",
    )
    error.kind = "exceed_context_size_error"
    error.more = {"n_prompt_tokens": n_prompt, "n_ctx": n_ctx}
    return error


def busy(n_waiting: int) -> ApiError:
    """Status 429: the queue is full."""
    error = ApiError(
        429, f"{n_waiting} requests are waiting already: try again later", code="queue_full"
    )
    error.headers["Retry-After"] = "1"
    return error


def gone() -> ApiError:
    """Status 499, which is only logged: the client has closed its connection."""
    return ApiError(499, "the client has gone")


def unread(n: int) -> ApiError:
    """Status 408, at the end of a stream: its client reads more slowly than the model generates."""
    return ApiError(408, f"{n} parts of the stream wait to be read: read faster", code="timeout")


def slow_client(seconds: float) -> ApiError:
    """Status 408: the body did not come in time."""
    return ApiError(408, f"the body took more than {seconds:g} s: send it faster", code="timeout")


def costly(seconds: float) -> ApiError:
    """Status 400: preparing a request exceeded its limit in seconds."""
    return ApiError(
        400,
        f"preparing the request took more than {seconds:g} s: shorten its text, schema or grammar",
        code="too_costly",
    )


def costly_grammar(seconds: float) -> ApiError:
    """Status 400: compiling a schema or grammar exceeded its limit in seconds of processor time."""
    return ApiError(
        400,
        f"compiling the grammar took more than {seconds:g} s of processor time: give the schema or "
        "grammar fewer properties, alternatives or long patterns",
        code="too_costly",
    )


def crashed(signal_number: int) -> ApiError:
    """Status 400: a signal ended the helper process that prepared a request."""
    return ApiError(
        400,
        f"preparing the request ended its process by signal {signal_number}: its schema or grammar "
        "is too deep or too large",
        code="too_costly",
    )


def no_helper(why: str) -> ApiError:
    """Status 503: no helper process could be started for a request."""
    return ApiError(503, f"the request could not be prepared: {why}", code="unavailable")


def stopping() -> ApiError:
    """Status 503: the server ends."""
    return ApiError(503, "the server is stopping", code="stopping")


def ended(why: str) -> ApiError:
    """Status 503: the process that runs the model ended during the answer."""
    error = ApiError(
        503, f"the model's process {why} within the answer: try again", code="process_ended"
    )
    error.headers["Retry-After"] = "1"
    return error


def not_loaded(why: str) -> ApiError:
    """Status 503: the model cannot be loaded."""
    return ApiError(503, f"the model cannot be loaded: {why}", code="not_loaded")


def loading() -> ApiError:
    """Status 503: the model is being loaded."""
    return ApiError(503, "the model is being loaded: try again later", code="loading")
