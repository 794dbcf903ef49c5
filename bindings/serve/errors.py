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


def too_long(n_prompt: int, n_ctx: int) -> ApiError:
    """Status 400: the prompt leaves no room for an answer."""
    return ApiError(
        400,
        f"the prompt is {n_prompt} tokens and the context {n_ctx}, of which an answer needs at "
        "least one: shorten the prompt, or start the server with a larger --ctx",
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


def stopping() -> ApiError:
    """Status 503: the server ends."""
    return ApiError(503, "the server is stopping", code="stopping")
