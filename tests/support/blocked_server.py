"""A server whose loop can be blocked: /sleep, /spin (Python), /hold (keeps the interpreter's lock).

python blocked_server.py writes its port to standard output.
"""

import asyncio
import re
import sys
import time

from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from tamis.bindings.serve.http import listen
from tamis.bindings.serve.http.json_reply import JsonReply


async def _health(_request):
    return JsonReply({"status": "ok"}, headers={"x-from": "the loop"})


async def _sleep(_request):
    time.sleep(60)  # the loop's thread gives the lock away
    return PlainTextResponse("")


async def _spin(_request):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pass
    return PlainTextResponse("")


async def _hold(_request):
    # One call of C code for minutes. Its own look at signals would only run Python's handlers.
    re.match(r"(?:a|a)*b", "a" * 40)
    return PlainTextResponse("")


async def _word(_request):
    return PlainTextResponse("a word")


class Served:
    """Stands in for a router."""

    app = Starlette(
        routes=[
            Route("/health", _health),
            Route("/word", _word, methods=["GET", "POST"]),
            Route("/sleep", _sleep),
            Route("/spin", _spin),
            Route("/hold", _hold),
        ]
    )

    def stop(self):
        """Nothing runs."""

    def close(self):
        """Nothing runs; with an argument this takes long."""
        if sys.argv[1:] == ["slow to end"]:
            time.sleep(60)


def ready(url):
    print(url.rpartition(":")[2], flush=True)


if __name__ == "__main__":
    limits = listen.Connections(total=64, header_seconds=5)
    listen.serve(Served(), "127.0.0.1", 0, connections=limits, ready=ready, log=print)
    assert asyncio.run(asyncio.sleep(0, True))  # all is as it was before
