"""Engines of a Ray cluster that answer requests: one per actor, each on a node with room for it.

When an actor ends, another one answers the requests that it had, and a new actor starts on any node
with room. Only the caller writes answers, so that none is written twice.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import ray
from ray.exceptions import RayActorError, RayError

from tamis.bindings.serve.offline import BatchError, Lost

START_SECONDS = 600  # covers the wait for a free node and the loading of the model there


class Answering(Protocol):
    """What an actor runs: a Protocol."""

    async def ask(self, url: str, body: bytes) -> tuple[int, bytes]:
        """The status and the body of the answer to a request."""

    def close(self) -> None:
        """Stop the engine."""


class _Actor:
    """The class that Ray runs in a process of its own, on any node."""

    def __init__(self, make: Callable[[Any], Answering], given: Any) -> None:
        self._answering = make(given)

    async def ready(self) -> None:
        """Return when the model is loaded."""

    async def ask(self, url: str, body: bytes) -> tuple[int, bytes]:
        return await self._answering.ask(url, body)


class _Engine:
    """An actor, as the pool sees it: its state and its number of requests."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.n_running, self.ready = actor, 0, False


class Pool:
    """As many engines as the nodes of a cluster have room for.

    n_thread: threads of each engine; None: as many as the smallest node has. make(given): builds
    what an actor runs. Raises BatchError if there is no cluster at the address.
    """

    def __init__(
        self, address: str, n_thread: int | None, make: Callable[[Any], Answering], given: Any
    ) -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, ValueError, RayError) as error:
            raise BatchError(
                f"no Ray cluster at {address}: {error}; begin one with ray start"
            ) from None
        cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
        cpus = [n for n in cpus if n]
        n_thread = n_thread or min(cpus, default=0)
        self.n_engine = sum(n // n_thread for n in cpus) if n_thread else 0
        if not self.n_engine:
            ray.shutdown()
            raise BatchError(f"no node of the cluster has {n_thread} processors: lower n_threads")
        given.threads = n_thread
        kind = ray.remote(num_cpus=n_thread, max_concurrency=1000)(_Actor)
        self._begin = lambda: _Engine(kind.remote(make, given))
        self._engines = [self._begin() for _ in range(self.n_engine)]
        self._changed: asyncio.Condition | None = None
        self._watching: set[asyncio.Task[None]] = set()
        self._failed: BaseException | None = None

    async def ask(self, url: str, body: bytes) -> tuple[int, bytes]:
        """The status and the body of an answer. Raises Lost if its engine has ended."""
        engine = await self._take()
        try:
            found: tuple[int, bytes] = await engine.actor.ask.remote(url, body)
            return found
        except RayActorError as error:
            if engine in self._engines:  # only the first thread that notices it
                self._engines.remove(engine)
                self._engines.append(self._begin())
                self._watch(self._engines[-1])
            raise Lost(str(error).splitlines()[0]) from None
        finally:
            engine.n_running -= 1

    async def _take(self) -> _Engine:
        """The ready engine with the fewest requests."""
        if self._changed is None:
            self._changed = asyncio.Condition()
            for engine in self._engines:
                self._watch(engine)
        async with self._changed:
            wait = self._changed.wait_for(lambda: self._failed or self._ready())
            await asyncio.wait_for(wait, START_SECONDS)
        if self._failed is not None:
            raise self._failed
        engine = min(self._ready(), key=lambda one: one.n_running)
        engine.n_running += 1
        return engine

    def _ready(self) -> list[_Engine]:
        return [engine for engine in self._engines if engine.ready]

    def _watch(self, engine: _Engine) -> None:
        task = asyncio.create_task(self._until_ready(engine))
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _until_ready(self, engine: _Engine) -> None:
        """Mark an engine as ready once it is; if none can ever start, note the reason."""
        assert self._changed is not None
        try:
            await engine.actor.ready.remote()
            engine.ready = True
        except RayError as error:
            self._engines.remove(engine)
            if not self._engines:
                why = str(getattr(error, "cause", error)).strip().splitlines()[-1]
                self._failed = BatchError(f"no node could load the model: {why}")
        async with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the engines, and leave the cluster."""
        ray.shutdown()
