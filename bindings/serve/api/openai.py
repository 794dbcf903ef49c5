"""OpenAI's chat completions and completions."""

from collections.abc import Iterable
from typing import Any

from tamis.bindings.drop_in import chat, completion
from tamis.bindings.drop_in.completion import Chunk, Counts, Piece
from tamis.bindings.serve.jobs import Progress
from tamis.bindings.serve.replies import About, Reply, timings
from tamis.bindings.serve.tasks import Task


class _Completions(Reply):
    """What both replies share: usage, the fingerprint, timings."""

    kind = ""

    def _head(self) -> Chunk:
        r = self.task.requests[0]
        prefix = "chat" if self.kind.startswith("chat") else ""
        return {
            "id": prefix + r.id,
            "object": self.kind,
            "created": r.created,
            "model": r.model,
            "system_fingerprint": self.about.fingerprint,
            "choices": [],
        }

    def _said(self, i: int, chunk: Chunk, *, timed: bool = True) -> Chunk:
        """A chunk of choice i with the additional fields that the request asks for."""
        for choice in chunk["choices"]:
            choice["index"] = i
        chunk["system_fingerprint"] = self.about.fingerprint
        if self.task.include_usage:
            chunk["usage"] = self._usage(self.counts[i]) if self.task.running_usage else None
        if self.task.timings and timed:
            chunk["timings"] = timings(self.counts[i])
        return chunk

    def progress(self, i: int, event: Progress) -> Iterable[Any]:
        """A chunk without choices that reports progress, if the request asks for it."""
        if not self.task.progress:
            return []
        return [self._head() | self.progress_of(event)]

    def end(self) -> Iterable[Any]:
        """A chunk with usage, if the request asks for it."""
        if not self.task.include_usage:
            return []
        return [self._head() | {"usage": self.usage(), "timings": timings(self.total)}]

    def usage(self) -> dict[str, Any]:
        """The tokens of all choices; a prompt counts once."""
        return self._usage(self.total)

    def _usage(self, counts: Counts) -> dict[str, Any]:
        n_prompt = self.task.prompt_tokens
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": counts.n_answer,
            "total_tokens": n_prompt + counts.n_answer,
            "prompt_tokens_details": {"cached_tokens": counts.n_cached},
            **counts.attention(),
        }

    def _whole(self, choices: list[dict[str, Any]]) -> Chunk:
        for i, choice in enumerate(choices):
            choice["index"] = i
        rest = {"choices": choices, "usage": self.usage(), "timings": timings(self.total)}
        return self._head() | rest

    def _timed_last(self, piece: Piece, found: list[Chunk]) -> list[Chunk]:
        """The chunks of a piece; the last one has timings unless the chunk of usage has them."""
        if piece.finish is not None and not self.task.include_usage:
            found[-1]["timings"] = timings(piece.counts)
        return found


class Chat(_Completions):
    """/v1/chat/completions."""

    kind = "chat.completion"

    def __init__(self, task: Task, about: About) -> None:
        super().__init__(task, about)
        assert task.wanted is not None
        self._wanted, format = task.wanted, about.format()
        self._format = format
        if task.stream:
            self.kind = "chat.completion.chunk"
            self._streams = [chat.Chunks(r, task.wanted, format) for r in task.requests]

    def begin(self) -> Iterable[Any]:
        """The chunk that names the role of the message."""
        for i, stream in enumerate(self._streams):
            chunk = stream.chunk({"role": "assistant", "content": None})
            yield self._said(i, chunk, timed=False)

    def piece(self, i: int, piece: Piece) -> Iterable[Any]:
        """The chunks with the piece's deltas."""
        found = [self._said(i, chunk) for chunk in self._streams[i].of(piece)]
        if piece.finish is not None:
            found[-1] |= self._verbose()
        return self._timed_last(piece, found)

    def whole(self, found: list[list[Piece]]) -> Any:
        """A chat completion."""
        choices = [
            chat.whole(request, pieces, self._wanted, self._format)["choices"][0]
            for request, pieces in zip(self.task.requests, found, strict=True)
        ]
        return self._whole(choices) | self._verbose()

    def _verbose(self) -> Chunk:
        """The rendered prompt, if the request asks for it."""
        return {"__verbose": {"prompt": self.task.about["prompt"]}} if self.task.about else {}


class Text(_Completions):
    """/v1/completions."""

    kind = "text_completion"

    def __init__(self, task: Task, about: About) -> None:
        super().__init__(task, about)
        self._streams = [completion.Chunks(r) for r in task.requests]
        self._begun = [False] * len(task.requests)

    def piece(self, i: int, piece: Piece) -> Iterable[Any]:
        """The chunk with the piece's text.

        The first one is preceded by the prompt if it is to be repeated.
        """
        stream, found = self._streams[i], []
        if not self._begun[i]:
            self._begun[i] = True
            found += stream.begin(self.prompt[i])
        found += stream.of(piece)
        return self._timed_last(piece, [self._said(i, chunk) for chunk in found])

    def whole(self, found: list[list[Piece]]) -> Any:
        """A completion."""
        choices = [
            completion.whole(request, pieces, 0, prompt)["choices"][0]
            for request, pieces, prompt in zip(self.task.requests, found, self.prompt, strict=True)
        ]
        return self._whole(choices)
