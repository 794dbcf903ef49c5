"""Checks before every request (Host, Origin, type, API key), and the log's line after it."""

import hmac
import ipaddress
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tamis.bindings.serve.errors import ApiError

OPEN = {
    "/",
    "/health",
    "/v1/health",
    "/ready",
}  # paths that need no key: the page, and states without anyone's data
LOCAL = ("localhost", "127.0.0.1", "::1")
ANY = "*"
_SPACE = " \t\r"
READS = ("GET", "HEAD", "OPTIONS")  # methods that change nothing, on paths that start nothing
Log = Callable[[str], None]


@dataclass(frozen=True)
class Access:
    """Access rules: the server's host names, and the API keys, one per line ("" for none).

    origins: of pages of other sites that may read replies (CORS); "localhost": all pages of this
    machine, "*": all pages.
    """

    hosts: tuple[str, ...] = LOCAL
    key: str = ""
    origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.key and not self.keys:
            raise ValueError('the key is blank, expected one, or "" to let everyone in')

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys, one per client."""
        return keys_of(self.key)

    def grants(self, origin: str) -> bool:
        """Whether pages of an Origin may read replies."""
        if not origin or ANY in self.origins or origin.lower() in self.origins:
            return bool(origin)
        return "localhost" in self.origins and _host_of(origin) in LOCAL


def keys_of(text: str) -> tuple[str, ...]:
    """The keys of a text, one per line, stripped of spaces, which no header can contain."""
    return tuple(line.strip(_SPACE) for line in text.split("\n") if line.strip())


class Guard:
    """ASGI middleware. Refuses unknown Host headers (DNS rebinding), other sites and wrong keys."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        log: Log,
        starts: Callable[[Scope], bool] = lambda scope: False,
    ) -> None:
        """Make the guard; starts(scope): whether a request with a reading method has an effect.

        A page of another site can make a browser send such a request, as an image for instance.
        """
        self._app, self._access, self._log, self._starts = app, access, log, starts
        self._keys = [key.encode() for key in access.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, headers = time.monotonic(), 0, Headers(scope=scope)
        added = [*_SAFE, *self._granted(headers)]

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                # headers that the guard of a model's application has set
                given = {name for name, _ in message["headers"]}
                new = [header for header in added if header[0] not in given]
                message["headers"] = [*message["headers"], *new]
            await send(message)

        try:
            owner = self._owner(headers)
            error = self._refusal(scope, headers, known=owner is not None)
            client = scope.get("client")
            scope["tamis.owner"] = (client[0] if client else "") if owner is None else owner
            if error is not None:
                await _refuse(error, scope["path"], noted)
            elif _is_preflight(scope, headers):
                await _empty(noted)
            else:
                await self._app(scope, receive, noted)
        finally:
            seconds = time.monotonic() - begin
            path = scope["path"][:80].encode("ascii", "backslashreplace").decode()
            self._log(f"{scope['method'][:20]} {path!r} {status or 'cut off'} {seconds:.2f} s")

    def _granted(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """The headers that allow a page to read the reply."""
        origin = headers.get("origin", "")
        if not self._access.grants(origin):
            return []
        wanted = headers.get("access-control-request-headers", "*")
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-allow-methods", b"GET, POST, DELETE, OPTIONS"),
            (b"access-control-allow-headers", wanted.encode("latin-1")),
            (b"access-control-expose-headers", b"*"),
            (b"access-control-max-age", b"600"),
            (b"vary", b"Origin"),
        ]

    def _owner(self, headers: Headers) -> int | None:
        """The index of the request's key; None if it has no valid one."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if not scheme and "x-api-key" in headers:  # as Anthropic's clients send it
            scheme, given = "bearer", headers["x-api-key"]
        # Headers are decoded as Latin-1, in which more bytes count as spaces than in HTTP, and a
        # key in UTF-8 may end with one. The comparison takes the same time for any value.
        data, found = given.strip(_SPACE).encode("latin-1"), None
        for i, key in enumerate(self._keys):
            if hmac.compare_digest(data, key):
                found = i
        return found if scheme.lower() == "bearer" else None

    def _refusal(self, scope: Scope, headers: Headers, *, known: bool) -> ApiError | None:
        if _host(headers.get("host", "")) not in self._access.hosts:
            return ApiError(
                403, "this server does not answer to that Host: see --allow-host", code="host"
            )
        # browsers send no key for pages
        is_open = scope["path"] in OPEN or _is_preflight(scope, headers)
        if self._keys and not known and not is_open:
            error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            error.headers["WWW-Authenticate"] = "Bearer"
            return error
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy that believes the other header would take the following bytes for a new
            # request.
            error = ApiError(400, "the body has two lengths: Content-Length and Transfer-Encoding")
            error.headers["Connection"] = "close"
            return error
        packed = headers.get("content-encoding", "identity")
        if packed != "identity":
            message = f"the body is compressed ({packed[:20]}): send it as it is"
            return ApiError(415, message, code="content_encoding")
        if _is_preflight(scope, headers):  # it is answered here and starts nothing
            return None
        reads = scope["method"] in READS and not self._starts(scope)
        return None if reads else self._of_a_page(scope["path"], headers)

    def _of_a_page(self, path: str, headers: Headers) -> ApiError | None:
        """The error for a request that another site's page may have caused, or None.

        Such a page can make a browser send some content types without a preflight, but not without
        an Origin or Sec-Fetch-Site; application/json needs a preflight, which only origins of
        --cors-origins pass.
        """
        if not self._may_ask(headers.get("origin", "")):
            message = "this server does not answer to pages of that Origin"
            return ApiError(403, message, code="origin")
        kind = headers.get("content-type", "").split(";")[0].strip().lower()
        from_page = any(name in headers for name in ("origin", "sec-fetch-site"))
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        # Clients of ollama send any content type, or none.
        named = from_page or (has_body and not path.startswith("/api/"))
        if named and kind != "application/json":
            return ApiError(415, "the body must be application/json", code="content_type")
        return None

    def _may_ask(self, origin: str) -> bool:
        """Whether an Origin is not a web site's, or belongs to a host name of this server."""
        if self._access.grants(origin):
            return True
        try:
            url = urlsplit(origin)
            return url.scheme not in ("http", "https") or url.hostname in self._access.hosts
        except ValueError:
            return False


class Prefix:
    """ASGI middleware that serves an application below a path; all other paths are status 404."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        """Make it; prefix: "" or a path without a slash at its end."""
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on without the prefix, or refuse it."""
        if scope["type"] == "http" and self._prefix:
            path = scope["path"]
            if not f"{path}/".startswith(f"{self._prefix}/"):
                error = ApiError(404, f"this server's paths begin with {self._prefix}")
                await _refuse(error, path, send)
                return
            scope = {**scope, "path": path.removeprefix(self._prefix) or "/"}
        await self._app(scope, receive, send)


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    """Whether a request is a browser's preflight."""
    return scope["method"] == "OPTIONS" and "access-control-request-method" in headers


def _host_of(origin: str) -> str | None:
    """The host of an Origin; None if it is not that of a web site."""
    try:
        url = urlsplit(origin)
        return url.hostname if url.scheme in ("http", "https") else None
    except ValueError:
        return None


_SAFE = (
    (b"x-content-type-options", b"nosniff"),
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
)


def _host(value: str) -> str:
    """The name in a Host header, without its port, in lower case."""
    name = value.rsplit(":", 1)[0] if value.count(":") == 1 or "]:" in value else value
    return name.strip("[]").lower()


def is_local(host: str) -> bool:
    """Whether an address to listen on is reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _empty(send: Send) -> None:
    headers = [(b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


async def _refuse(error: ApiError, path: str, send: Send) -> None:
    body = json.dumps(error.body_for(path)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    given = (headers | error.headers).items()
    raw = [(name.lower().encode(), value.encode()) for name, value in given]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
