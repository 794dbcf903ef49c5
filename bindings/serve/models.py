"""The models that a server offers: loaded on request, unloaded when they are idle.

To be used from one event loop. A model that was taken is not unloaded before it is given back.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from starlette.types import ASGIApp

from tamis.bindings.serve.errors import ApiError, busy, not_loaded, stopping
from tamis.bindings.serve.jobs import Counts
from tamis.bindings.serve.supervisor import Loaded, LoadError, Supervisor
from tamis.bindings.serve.text import TextModel
from tamis.fetch.base import ModelError
from tamis.fetch.hub import HubSpec, pick

GIB = 1 << 30
PATIENCE = 5.0  # seconds after which a waiting request goes before newer requests for loaded models


@dataclass(frozen=True)
class Model:
    """Facts of a loaded model."""

    name: str  # in replies
    path: str
    text: TextModel
    loaded: Loaded
    worker: Supervisor


class Offer(NamedTuple):
    """A model that could be loaded."""

    name: str
    path: str
    n_byte: int  # of its files
    modified: float  # seconds since 1970
    aliases: tuple[str, ...] = ()  # other names that requests may use
    tags: tuple[str, ...] = ()  # words about it that lists show
    args: tuple[str, ...] = ()  # its own settings; a model with other ones is loaded anew
    hidden: bool = False  # whether lists leave it out


class Served(Protocol):
    """What the router needs of the application of one model: a Protocol."""

    @property
    def app(self) -> ASGIApp:
        """The ASGI application for uvicorn."""

    def stop(self) -> None:
        """End its process and all running jobs."""

    def close(self) -> None:
        """Wait until nothing is running."""


class Source(Protocol):
    """A source of models; its calls may take time, and come from any thread."""

    def offers(self) -> list[Offer]:
        """All models of the source."""

    def sees(self, offer: Offer) -> bool:
        """Whether a model takes pictures; it may read files, and is asked for lists alone."""

    def reload(self) -> None:
        """Read the source's list of models anew. Raises UsageError; the list then stays."""

    def start(self, offer: Offer) -> Supervisor:
        """Begin to load a model."""

    def text(self, offer: Offer) -> TextModel:
        """The vocabulary and template of a model, loaded or not."""

    def serve(self, offer: Offer, worker: Supervisor) -> Served:
        """The application of a loaded model."""


@dataclass(eq=False)
class Running:
    """A model that is loaded, or is being loaded."""

    offer: Offer
    worker: Supervisor
    keep: float  # seconds without a request before it is unloaded; infinite: for ever
    served: Served | None = None  # None until it is loaded
    n_byte: int = 0
    users: int = 0
    used: float = 0.0  # when its last user left
    leaving: bool = False

    @property
    def until(self) -> float:
        """The time of time.monotonic at which it is unloaded; infinite while it is used."""
        return math.inf if self.users else self.used + self.keep


@dataclass(eq=False)
class _Request:
    offer: Offer
    found: "asyncio.Future[Running]"
    since: float


class Models:
    """Loads one model at a time; without memory for it the least recently used one is unloaded."""

    def __init__(
        self,
        source: Source,
        *,
        keep: float,
        n_byte: int | None,
        n_queue: int,
        log: Callable[[str], None],
        n_model: int | None = None,
        autoload: bool = True,
    ) -> None:
        """Make the set of models; n_byte: memory for all, None: all free memory.

        keep: seconds without a request before a model is unloaded. n_model: the most models loaded
        at once; None: any number. autoload: whether a request loads its model; otherwise only
        `load` does.
        """
        self._source, self._keep, self._n_byte = source, keep, n_byte
        self.n_model, self.autoload = n_model, autoload
        # Is called with the name and the new state of a model.
        self.changed: Callable[[str, str], None] = lambda name, state: None
        self._n_queue, self._log = n_queue, log
        self._running: dict[str, Running] = {}  # by name
        self.failed: set[str] = set()  # names of models whose last load failed
        self._requests: list[_Request] = []  # requests that wait for a model
        self._loading: asyncio.Task[None] | None = None
        self._sizes: dict[str, int] = {}  # bytes of models that were loaded before, by name
        self._tight: set[str] = set()  # names that lacked memory, until another model is unloaded
        self._leaving: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False
        self._past = Counts()  # the counters of processes that have ended

    @property
    def running(self) -> list[Running]:
        """The loaded models that are not being unloaded, the last used first."""
        found = [
            one for one in self._running.values() if one.served is not None and not one.leaving
        ]
        return sorted(found, key=lambda one: (one.users == 0, -one.used))

    @property
    def paths(self) -> list[str]:
        """The files of all models with a process, also of those being loaded or unloaded."""
        return [one.offer.path for one in self._running.values()]

    @property
    def stopped(self) -> bool:
        """Whether no more requests are taken."""
        return self._stopping

    @property
    def counts(self) -> Counts:
        """The counters of all models."""
        return sum((one.worker.counts for one in self._running.values()), self._past)

    @property
    def n_running(self) -> int:
        """The number of jobs that have a slot."""
        return sum(one.worker.n_running for one in self._running.values())

    @property
    def n_waiting(self) -> int:
        """The number of jobs without a slot, and of requests for models that are not loaded."""
        waiting = sum(one.worker.n_waiting for one in self._running.values())
        return waiting + len(self._requests)

    @property
    def full(self) -> bool:
        """Whether a model's queue, or the queue for models, is full."""
        waiting = [one.worker.n_waiting for one in self._running.values()]
        return max([*waiting, len(self._requests)], default=0) >= self._n_queue

    def adopt(self, offer: Offer, worker: Supervisor, served: Served) -> None:
        """Take over a model that was loaded before there was a loop."""
        one = Running(offer, worker, self._keep, served)
        assert worker.loaded is not None
        one.n_byte, one.used = worker.loaded.n_byte, time.monotonic()
        self._running[offer.name] = one

    def state(self, name: str) -> str:
        """The state of a model in llama.cpp's words, such as "loaded"."""
        one = self._running.get(name)
        if one is None or one.leaving:
            asked = any(request.offer.name == name for request in self._requests)
            return "loading" if asked else "unloaded"
        return "loading" if one.served is None else "loaded"

    async def offers(self) -> list[Offer]:
        """All models of the source."""
        return await asyncio.to_thread(self._source.offers)

    def sees(self, offer: Offer) -> bool:
        """Whether a model takes pictures; it may read files, so ask beside the loop."""
        return self._source.sees(offer)

    async def reload(self) -> None:
        """Read the list of models anew, and unload those that are gone from it or have changed.

        Raises UsageError; the list then stays.
        """
        await asyncio.to_thread(self._source.reload)
        offers = {offer.name: offer for offer in await self.offers()}
        for name, one in self._running.items():
            found = offers.get(name)
            if found is None or (found.path, found.args) != (one.offer.path, one.offer.args):
                one.keep = 0
        self._turn()

    def text(self, offer: Offer) -> TextModel:
        """The vocabulary and template of a model, loaded or not; reads its file, in any thread.

        Raises OSError, GGUFError, TokenizerError.
        """
        return self._source.text(offer)

    def load(self, offer: Offer) -> None:
        """Begin to load a model that no request waits for; a failure is logged.

        Raises ApiError.
        """

        def loaded(found: "asyncio.Future[Running]") -> None:
            if found.exception() is None:
                self.give_back(found.result())

        self._wait(offer).found.add_done_callback(loaded)

    async def take(
        self, offer: Offer, keep: float | None = None, autoload: bool | None = None
    ) -> Running:
        """Take a model into use, until `give_back`; keep: a new time until it is unloaded.

        autoload: whether it may be loaded for this; None: as the server does. Raises ApiError.
        """
        autoload = self.autoload if autoload is None else autoload
        if not autoload and self.state(offer.name) == "unloaded":
            raise ApiError(
                400,
                f"model {offer.name} is not loaded: ask POST /models/load first, or start the "
                "server without --no-models-autoload",
                code="not_loaded",
                param="model",
            )
        request = self._wait(offer)
        found = request.found
        try:
            one = await found
        except asyncio.CancelledError:
            if request in self._requests:
                self._requests.remove(request)
            elif found.done() and not found.cancelled() and found.exception() is None:
                self.give_back(found.result())
            raise
        if keep is not None:
            one.keep = keep
        return one

    def _wait(self, offer: Offer) -> _Request:
        """Append a request for a model to the queue. Raises ApiError."""
        if self._stopping:
            raise stopping()
        if len(self._requests) >= self._n_queue:
            raise busy(len(self._requests))
        found = asyncio.get_running_loop().create_future()
        request = _Request(offer, found, time.monotonic())
        self._requests.append(request)
        self._turn()
        return request

    def give_back(self, one: Running) -> None:
        """End the use of a model that was taken."""
        one.users -= 1
        one.used = time.monotonic()
        self._turn()

    def unload(self, name: str) -> bool:
        """Unload a model once it is not used any more; returns whether it is loaded."""
        one = self._running.get(name)
        if one is None or one.served is None or one.leaving:
            return False
        one.keep = 0
        self._turn()
        return True

    def stop(self) -> None:
        """End all processes and requests; may be called more than once."""
        self._stopping = True
        for request in self._requests:
            if not request.found.done():
                request.found.set_exception(stopping())
        self._requests.clear()
        for one in self._running.values():
            one.worker.stop()
            if one.served is not None:
                one.served.stop()

    def close(self) -> None:
        """Wait after `stop` until all processes have ended; the loop must have ended before."""
        for one in self._running.values():
            if one.served is not None:
                one.served.close()
            one.worker.join()

    # --- the next step ---------------------------------------------------------------------------

    def _turn(self) -> None:
        """Do all that can be done now: grant models, make room, load, unload."""
        if self._stopping:
            return
        self._grant()
        now = time.monotonic()
        for one in list(self._running.values()):
            if one.served is not None and not one.users and one.until <= now:
                self._leave(one, "unused")
        if self._requests and self._loading is None and not self._leaving:
            self._make_room(self._requests[0].offer)
        self._set_timer()

    def _grant(self) -> None:
        """Give requests the models that are loaded, unless one has waited long for another."""
        first = self._requests[0] if self._requests else None
        now = time.monotonic()
        for request in list(self._requests):
            one = self._running.get(request.offer.name)
            if one is None or one.served is None or one.leaving:
                continue
            if one.worker.failed and not one.users:  # such as when its file has changed
                self._leave(one, "failed")
                continue
            waits = self._loading is None and first is not None and now - first.since > PATIENCE
            if first is not request and waits:
                continue
            self._requests.remove(request)
            if first is request:
                first = self._requests[0] if self._requests else None
            if not request.found.done():
                one.users += 1
                request.found.set_result(one)

    def _make_room(self, offer: Offer) -> None:
        """Load a model, or unload another one for it, or wait until one is idle."""
        if offer.name in self._running:
            return
        idle = [one for one in self._running.values() if not one.users]
        needed = self._sizes.get(offer.name, offer.n_byte)
        held = sum(one.n_byte for one in self._running.values())
        fits = self._n_byte is None or held + needed <= self._n_byte
        fits = fits and (self.n_model is None or len(self._running) < self.n_model)
        if (fits and offer.name not in self._tight) or not self._running:
            self._loading = asyncio.ensure_future(self._load(offer))
        elif idle:
            self._leave(min(idle, key=lambda one: one.used), f"for {offer.name}")

    async def _load(self, offer: Offer) -> None:
        """Load a model for all requests that wait for it."""
        error: Exception | None = None
        try:
            one = await self._loaded(offer)
            one.used = time.monotonic()
            self._tight.discard(offer.name)
            self._sizes[offer.name] = one.n_byte
            self.failed.discard(offer.name)
            self.changed(offer.name, "loaded")
            mine = [request for request in self._requests if request.offer.name == offer.name]
            for request in mine:  # these go before a request that has waited long for another model
                self._requests.remove(request)
                if not request.found.done():
                    one.users += 1
                    request.found.set_result(one)
        except (LoadError, OSError, ValueError, RuntimeError) as found:
            error = found
            if (gone := self._running.get(offer.name)) is not None:
                gone.worker.stop()
                await asyncio.to_thread(gone.worker.join)
                self._running.pop(offer.name, None)
        finally:
            self._loading = None
        if error is not None:
            self._failed(offer, error)
        self._shrink()
        self._turn()

    async def _loaded(self, offer: Offer) -> Running:
        worker = self._source.start(offer)
        one = Running(offer, worker, self._keep)
        self._running[offer.name] = one
        self._log(f"loading {offer.name}")
        self.changed(offer.name, "loading")
        loaded = await asyncio.to_thread(worker.wait)
        one.n_byte = loaded.n_byte
        if self._n_byte is not None and one.n_byte > self._n_byte:
            raise LoadError(
                f"it takes {one.n_byte / GIB:.1f} GiB, all models may take "
                f"{self._n_byte / GIB:.1f} GiB: raise --memory or lower --ctx"
            )
        one.served = await asyncio.to_thread(self._source.serve, offer, worker)
        return one

    def _failed(self, offer: Offer, error: Exception) -> None:
        """Handle a failed load.

        If memory was lacking another model is unloaded, otherwise the requests for this one fail.
        """
        if isinstance(error, LoadError) and error.memory and self._running:
            self._tight.add(offer.name)
            return
        self._log(f"{offer.name} cannot be loaded: {error}")
        self.failed.add(offer.name)
        self.changed(offer.name, "unloaded")
        for request in [each for each in self._requests if each.offer.name == offer.name]:
            self._requests.remove(request)
            if not request.found.done():
                request.found.set_exception(not_loaded(str(error)))

    def _shrink(self) -> None:
        """Unload idle models while all together exceed their memory: sizes are known only now."""
        held = sum(one.n_byte for one in self._running.values() if not one.leaving)
        idle = [one for one in self._running.values() if not one.users and not one.leaving]
        for one in sorted(idle, key=lambda one: one.used):
            if self._n_byte is not None and held > self._n_byte:
                held -= one.n_byte
                self._leave(one, "for others")

    def _leave(self, one: Running, why: str) -> None:
        if one.leaving:
            return
        one.leaving = True
        self._log(f"unloading {one.offer.name}: {why}")
        task = asyncio.ensure_future(self._unloaded(one))
        self._leaving.add(task)
        task.add_done_callback(self._left)

    async def _unloaded(self, one: Running) -> None:
        served, worker = one.served, one.worker
        worker.stop()
        if served is not None:
            served.stop()
            await asyncio.to_thread(served.close)
        await asyncio.to_thread(worker.join)
        self._past = self._past + worker.counts
        self._running.pop(one.offer.name, None)
        self.changed(one.offer.name, "unloaded")

    def _left(self, task: "asyncio.Task[None]") -> None:
        self._leaving.discard(task)
        self._tight.clear()
        self._turn()

    def _set_timer(self) -> None:
        """Set the timer for the next model to be unloaded, or request that has waited long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = [one.until for one in self._running.values() if not one.leaving]
        ends = [end for end in ends if end < math.inf]
        if ends:
            delay = max(0.0, min(ends) - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay, self._turn)


def unknown_model(name: str, offers: list[Offer]) -> ApiError:
    """Status 404: there is no model of that name."""
    names = ", ".join(offer.name for offer in offers if not offer.hidden) or "none"
    return ApiError(
        404,
        f"there is no model {name[:100]!r} here: {names}",
        code="model_not_found",
        param="model",
    )


def named(name: str, offers: list[Offer]) -> Offer | None:
    """The model of a client's name: with or without .gguf, hf: or :latest; None for no match.

    A model of the hub also matches owner/repo:QUANT if only one file fits.
    """
    for spelling in (name, name.removesuffix(":latest"), f"hf:{name}"):
        for offer in offers:
            if spelling in (offer.name, offer.name.removesuffix(".gguf"), *offer.aliases):
                return offer
        for offer in offers:
            if spelling == offer.path.rpartition("/")[2].removesuffix(".gguf"):
                return offer
    try:
        spec = HubSpec.parse(f"hf:{name.removeprefix('hf:')}")
        head = f"hf:{spec.repo}/"
        of_repo = {o.name.removeprefix(head): o for o in offers if o.name.startswith(head)}
        return of_repo[pick(list(of_repo), spec)[0]]
    except ModelError:
        return None
