"""What a client is told when a request fails: a status and OpenAI's error object."""

from typing import Any


class ApiError(Exception):
    """A request that is refused. Its text is for the client and names no part of a prompt."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers: dict[str, str] = {}

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 429:
            kind = "rate_limit_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(message: str, param: str | None = None) -> ApiError:
    """Status 400: an argument is not what it should be."""
    return ApiError(400, message, code="invalid_value", param=param)


def too_long(n_prompt: int, n_ctx: int, *, at_least: bool = False) -> ApiError:
    """Status 400: the prompt leaves no room for an answer; at_least: n_prompt is a lower bound."""
    n = f"at least {n_prompt}" if at_least else f"{n_prompt}"
    return ApiError(
        400,
        f"the prompt is {n} tokens and the context {n_ctx}, of which an answer needs at least one: "
        "shorten the prompt, or start the server with a larger --ctx",
        code="context_length_exceeded",
        param="messages",
    )


def busy(n_waiting: int) -> ApiError:
    """Status 429: the queue is full."""
    error = ApiError(
        429, f"{n_waiting} requests are waiting already: try again later", code="queue_full"
    )
    error.headers["Retry-After"] = "1"
    return error


def gone() -> ApiError:
    """Status 499, which only the log sees: the client has closed its connection."""
    return ApiError(499, "the client has gone")


def slow_client(seconds: float) -> ApiError:
    """Status 408: the body did not come in time."""
    return ApiError(408, f"the body took more than {seconds:g} s: send it faster", code="timeout")


def costly(seconds: float) -> ApiError:
    """Status 400: preparing a request took more time than one may take."""
    return ApiError(
        400,
        f"preparing the request took more than {seconds:g} s: shorten its text, schema or grammar",
        code="too_costly",
    )


def crashed(signal_number: int) -> ApiError:
    """Status 400: the process of its own that prepared a request was ended by a signal."""
    return ApiError(
        400,
        f"preparing the request ended its process by signal {signal_number}: its schema or grammar "
        "is too deep or too large",
        code="too_costly",
    )


def no_helper(why: str) -> ApiError:
    """Status 503: no process could be had to prepare a request."""
    return ApiError(503, f"the request could not be prepared: {why}", code="unavailable")


def stopping() -> ApiError:
    """Status 503: the server ends."""
    return ApiError(503, "the server is stopping", code="stopping")
