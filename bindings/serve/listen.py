"""The socket and the signals around an application: uvicorn, ended by SIGINT or SIGTERM."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from tamis.bindings.serve.app import Server

MOST_CONNECTIONS = 512
IDLE_SECONDS = 30  # that a connection without a request is kept


def serve(
    server: Server, host: str, port: int, *, grace: int, ready: Callable[[str], None]
) -> None:
    """Serve until a signal comes; replies under way then end with an error.

    ready(url) is called when connections are taken. Raises OSError where the address is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            server.app,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=grace,
        )
        try:
            asyncio.run(_until_signal(_Uvicorn(config), server, listener, lambda: ready(url)))
        finally:
            server.stop()
            server.close()


class _Uvicorn(uvicorn.Server):
    """uvicorn, which would raise the signals once more when it has ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _until_signal(
    inner: _Uvicorn, server: Server, listener: socket.socket, ready: Callable[[], None]
) -> None:
    loop = asyncio.get_running_loop()

    def end() -> None:
        inner.force_exit = inner.should_exit  # the second time
        inner.should_exit = True
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    listener.listen(MOST_CONNECTIONS)
    ready()
    await inner.serve(sockets=[listener])
