"""Documents as tools of the Model Context Protocol: an agent asks, and a long text is read here.

The agent's model gets an answer of some sentences and the passages that say it, never the document.
Needs `tamis[mcp]`.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import anyio.to_thread
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

from tamis.formats.documents import read_document
from tamis.summary.cache import Cache
from tamis.summary.meter import WorkMeter
from tamis.summary.plan import Settings
from tamis.summary.prompts import Task
from tamis.summary.reader import Watch
from tamis.summary.summarize import Summarizer, Summary, finished
from tamis.version import __version__

if TYPE_CHECKING:
    from tamis.engine.engine import Engine

MAX_WORDS = 4000  # of an answer
EVERY = 1.0  # seconds between reports of progress
INSTRUCTIONS = (
    "Reads documents of any length with a local model: text, Markdown, HTML and PDF. The whole "
    "document is read in every call, so send a question instead of asking for its contents. "
    "Reading a long document for the first time takes minutes; asking about it again is faster."
)


class Stopped(Exception):
    """The client no longer waits for the answer."""


class Passage(BaseModel):
    """A passage of a document: characters start to end of its text, from 0.

    page: of a PDF, from 1; line: of the text of every other document, from 1. part: of those that
    the document was read in, from 1.
    """

    file: str
    quote: str
    start: int
    end: int
    part: int
    page: int | None = None
    line: int | None = None


class Found(BaseModel):
    """An answer about a document, and where it stands.

    found: whether the document has one; sources: the passages that say it, or else those nearest to
    the question. n_tokens: of the document. seconds: that the call took; of the one that made the
    answer where it comes from the cache.
    """

    text: str
    found: bool
    sources: list[Passage]
    n_tokens: int
    seconds: float


class Documents:
    """The documents of some folders and the model that reads them, one call after the other.

    engine: called once, at the first document that is not in the cache. model: the file it loads.
    settings: of all calls, without their task. cache: of answers and KV caches. say: gets a line
    for the person who started the server.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        engine: "Callable[[], Engine]",
        model: Path,
        settings: Settings,
        cache: Cache | None,
        say: Callable[[str], None],
    ) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._load, self._model, self._cache, self._say = engine, model, cache, say
        self._settings = settings
        self._engine: Engine | None = None
        self._lock = threading.Lock()

    def file(self, path: str) -> Path:
        """The document of this path, which is relative to the first folder or absolute.

        Raises ValueError where it is in none of the folders, also by way of a link, or no file.
        """
        if "\0" in path:
            raise ValueError("the path has a zero byte: write the path of a file")
        found = (self._folders[0] / path).resolve()
        if not any(found.is_relative_to(folder) for folder in self._folders):
            listed = ", ".join(map(str, self._folders))
            raise ValueError(
                f"{path!r} is outside of the folders that are served ({listed}): name a file in "
                "them, or start `tamis mcp` with its folder"
            )
        if not found.is_file():
            raise ValueError(f"{path!r} is no file: no document was read")
        return found

    def answer(self, path: str, task: Task, meter: WorkMeter, stop: threading.Event) -> Summary:
        """What a task asks about a document. meter: gets what is done; stop: ends the work.

        Raises ValueError, OSError, ImportError, MemoryError, RuntimeError; Stopped.
        """
        file = self.file(path)
        document = read_document(path, file.read_bytes())
        settings = replace(self._settings, task=task)

        def check() -> None:
            if stop.is_set():
                raise Stopped

        while not self._lock.acquire(timeout=0.1):
            check()
        try:
            if found := finished(self._cache, self._model, document, settings):
                return found
            if self._engine is None:
                self._engine = self._load()
            watch = Watch(path, meter, self._say, lambda _: None, lambda *_: None, check)
            return Summarizer(self._engine, settings, self._cache).summarize(document, watch)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Free the model, when the call that runs has ended."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None


PathArgument = Annotated[
    str, Field(description="path of the document, relative to the served folder or absolute")
]
Words = Annotated[int, Field(ge=1, le=MAX_WORDS, description="length of the answer in words")]


def server_of(documents: Documents) -> MCPServer[Any]:
    """The server whose tools read these documents; `run("stdio")` serves it."""
    server: MCPServer[Any] = MCPServer(
        "tamis",
        title="tamis: long documents",
        instructions=INSTRUCTIONS,
        version=__version__,
        log_level="WARNING",
    )

    @server.tool(title="Ask a document", structured_output=True)
    async def ask_document(
        path: PathArgument,
        question: Annotated[str, Field(min_length=1, description="what you want to know")],
        context: Context,
        words: Words = 150,
    ) -> Found:
        """Answer a question from a document of any length, with the passages that say it.

        found is false where the document has no answer; sources are then the nearest passages.
        """
        if not question.strip():
            raise ToolError("the question is empty: write what you want to know")
        return await _call(documents, path, Task(words, question=question), context)

    @server.tool(title="Summarize a document", structured_output=True)
    async def summarize_document(
        path: PathArgument,
        context: Context,
        words: Words = 150,
        instruction: Annotated[
            str | None, Field(description="what to write instead of a summary")
        ] = None,
    ) -> Found:
        """Summarize a document of any length, or follow an instruction about it."""
        if instruction is not None and not instruction.strip():
            raise ToolError("the instruction is empty: leave it out for a summary")
        return await _call(documents, path, Task(words, instruction=instruction), context)

    return server


async def _call(documents: Documents, path: str, task: Task, context: Context) -> Found:
    """Read a document in a thread, and report how far it is; a client that leaves ends it."""
    meter, stop = WorkMeter(), threading.Event()

    async def report() -> None:
        while True:
            await anyio.sleep(EVERY)
            if (left := meter.left()) is not None:
                await context.report_progress(left[0], 1.0, f"{left[1]:.0f} s left")

    summary: Summary | Exception
    async with anyio.create_task_group() as group:
        group.start_soon(report)
        try:
            summary = await anyio.to_thread.run_sync(
                documents.answer, path, task, meter, stop, abandon_on_cancel=True
            )
        except (OSError, ValueError, RuntimeError, ImportError, MemoryError) as error:
            summary = error
        finally:
            stop.set()
        group.cancel_scope.cancel()
    if isinstance(summary, Exception):
        raise ToolError(str(summary)) from summary
    passages = [Passage.model_validate(source) for source in summary.sources]
    return Found(
        text=summary.text,
        found=summary.found,
        sources=passages,
        n_tokens=summary.n_tokens,
        seconds=round(summary.seconds, 2),
    )
