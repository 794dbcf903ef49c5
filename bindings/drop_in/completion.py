"""A completion in OpenAI's shape: text, finish reason, logprobs, usage; whole or streamed."""

import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tamis.sampling.chain import Sampler
from tamis.text.detokenize import TextStream
from tamis.text.tokenizer import Tokenizer

Chunk = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What a completion needs to know of its call."""

    prompt: list[int]
    max_tokens: int
    model: str
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: str | None = None  # the prompt's text, where it is to be in the answer
    offset: int = 0  # characters before the answer, in logprobs
    special: bool = False  # whether control tokens are text
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4()}")
    created: int = field(default_factory=lambda: int(time.time()))


class TokenInfo(NamedTuple):
    """A token of the answer and how likely it was."""

    text: str
    logprob: float | None
    top: dict[str, float] | None


class Piece(NamedTuple):
    """A part of the answer: its text, its tokens, and why it is the last."""

    text: str
    tokens: list[TokenInfo]
    finish: str | None


class Answer:
    """Turns the tokens of an answer into pieces of text, as they come."""

    def __init__(self, request: Request, tokenizer: Tokenizer, sampler: Sampler) -> None:
        self._request, self._tokenizer, self._sampler = request, tokenizer, sampler
        self._stream = TextStream(stop=request.stop)
        self._waiting: list[TokenInfo] = []  # tokens whose text is not out yet
        self.prompt_rows: np.ndarray | None = None  # f32 [n_prompt, n_vocab], for echo
        self.finished = False
        self.n_completion = 0
        self.tokens: list[int] = []

    def push(self, token: int, row: np.ndarray) -> list[Piece]:
        """The pieces that one more token gives; row: the logits f32 [n_vocab] it was chosen by.

        The last piece of an answer, and only it, has a finish reason.
        """
        r = self._request
        if token in self._tokenizer.eog:
            return [self.finish("stop")]
        self.tokens.append(token)
        self.n_completion += 1
        if r.logprobs is not None:
            self._waiting.append(self._info(token, row))
        text = self._stream.push(self._tokenizer.piece(token, special=r.special))
        if self._stream.stopped is not None:
            kept, self._waiting = _within(self._waiting, text), []
            return [Piece(text, kept, None), self.finish("stop")]
        found = []
        if text:
            found.append(Piece(text, self._waiting, None))
            self._waiting = []
        if self.n_completion >= r.max_tokens:
            found.append(self.finish("length"))
        return found

    def finish(self, reason: str) -> Piece:
        """The last piece: what was held back."""
        self.finished = True
        return Piece(self._stream.finish(), self._waiting, reason)

    def pieces(self, tokens: Generator[int, Any, None], rows: list[np.ndarray]) -> Iterator[Piece]:
        """The answer of a generator; rows[-1] is what the token just given was chosen by."""
        try:
            for token in tokens:
                yield from self.push(token, rows[-1])
                if self.finished:
                    return
        finally:
            tokens.close()
        yield self.finish("stop")  # tokens end before the answer where a stopping criterion says so

    def prompt_tokens(self) -> list[TokenInfo]:
        """The prompt's tokens with their logprobs; the first has none."""
        rows, ids = self.prompt_rows, self._request.prompt
        if rows is None:
            return []
        first = TokenInfo(self._text(ids[0]), None, None)
        return [first] + [self._info(t, row) for t, row in zip(ids[1:], rows[:-1], strict=True)]

    def _info(self, token: int, row: np.ndarray) -> TokenInfo:
        n = self._request.logprobs or 0
        top = {self._text(i): p for i, p in self._sampler.logprobs(row, n)}
        logprob = self._sampler.logprob(row, token)
        return TokenInfo(self._text(token), logprob, top | {self._text(token): logprob})

    def _text(self, token: int) -> str:
        return self._tokenizer.piece(token, special=True).decode("utf-8", "replace")


def _within(tokens: list[TokenInfo], text: str) -> list[TokenInfo]:
    """The tokens that begin inside a text that was cut off at a stop string."""
    kept, at = [], 0
    for token in tokens:
        if at < len(text):
            kept.append(token)
        at += len(token.text)
    return kept


def whole(
    request: Request, found: list[Piece], n_completion: int, prompt: Sequence[TokenInfo] = ()
) -> Chunk:
    """The completion as one dict; prompt: the tokens that an echo begins with."""
    text = "".join(piece.text for piece in found)
    tokens = [token for piece in found for token in piece.tokens]
    if request.echo is not None:
        text, tokens = request.echo + text, [*prompt, *tokens]
    logprobs = None if request.logprobs is None else logprobs_of(tokens, request.offset)
    n_prompt = len(request.prompt)
    chunk = _chunk(request, text, logprobs, found[-1].finish)
    chunk["usage"] = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
    }
    return chunk


class Chunks:
    """Makes the chunks of a streamed completion; the last has the finish reason and no text."""

    def __init__(self, request: Request) -> None:
        self._request, self._offset = request, request.offset + len(request.echo or "")

    def begin(self) -> list[Chunk]:
        """What comes before the answer: the prompt, where it is to be in it."""
        return [_chunk(self._request, self._request.echo, None, None)] if self._request.echo else []

    def of(self, piece: Piece) -> list[Chunk]:
        """The chunks of the next piece."""
        r, found, logprobs = self._request, [], None
        if r.logprobs is not None and piece.tokens:
            logprobs = logprobs_of(piece.tokens, self._offset)
            self._offset += sum(len(token.text) for token in piece.tokens)
        if piece.text or logprobs:
            found.append(_chunk(r, piece.text, logprobs, None))
        if piece.finish is not None:
            found.append(_chunk(r, "", None, piece.finish))
        return found


def chunks(request: Request, pieces: Iterator[Piece]) -> Iterator[Chunk]:
    """The completion as a stream."""
    stream = Chunks(request)
    yield from stream.begin()
    for piece in pieces:
        yield from stream.of(piece)


def logprobs_of(tokens: list[TokenInfo], offset: int) -> dict[str, list[Any]]:
    """The logprobs of a completion's choice."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "text_offset": offsets,
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [token.top for token in tokens],
    }


def _chunk(request: Request, text: str, logprobs: Any, finish: str | None) -> Chunk:
    choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish}
    return {
        "id": request.id,
        "object": "text_completion",
        "created": request.created,
        "model": request.model,
        "choices": [choice],
    }
