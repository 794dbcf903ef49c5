"""A completion in OpenAI's shape: text, finish reason, logprobs, usage; whole or streamed."""

import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tamis.sampler import Sampler
from tamis.stream import TextStream
from tamis.tokenizer import Tokenizer

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
    """Turns the tokens that a generator gives into pieces of text."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer, sampler: Sampler, rows: list[np.ndarray]
    ) -> None:
        self._request, self._tokenizer, self._sampler = request, tokenizer, sampler
        self._rows = rows  # its last entry: the logits that the token just given was chosen by
        self.prompt_rows: np.ndarray | None = None  # f32 [n_prompt, n_vocab], for echo
        self.n_completion = 0
        self.tokens: list[int] = []

    def pieces(self, tokens: Generator[int, Any, None]) -> Iterator[Piece]:
        """The answer; the last piece, and only it, has a finish reason."""
        r, waiting, finish = self._request, [], "length"
        stream = TextStream(stop=r.stop)
        try:
            for token in tokens:
                if token in self._tokenizer.eog:
                    finish = "stop"
                    break
                self.tokens.append(token)
                self.n_completion += 1
                if r.logprobs is not None:
                    waiting.append(self._info(token, self._rows[-1]))
                text = stream.push(self._tokenizer.piece(token, special=r.special))
                if stream.stopped is not None:
                    finish = "stop"
                    yield Piece(text, _within(waiting, text), None)
                    waiting = []
                    break
                if text:
                    yield Piece(text, waiting, None)
                    waiting = []
                if self.n_completion >= r.max_tokens:
                    break
        finally:
            tokens.close()
        yield Piece(stream.finish(), waiting, finish)

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


def whole(request: Request, answer: Answer, found: list[Piece]) -> Chunk:
    """The completion as one dict."""
    text = "".join(piece.text for piece in found)
    tokens = [token for piece in found for token in piece.tokens]
    if request.echo is not None:
        text, tokens = request.echo + text, answer.prompt_tokens() + tokens
    logprobs = None if request.logprobs is None else logprobs_of(tokens, request.offset)
    n_prompt, n_completion = len(request.prompt), answer.n_completion
    chunk = _chunk(request, text, logprobs, found[-1].finish)
    chunk["usage"] = {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_completion,
        "total_tokens": n_prompt + n_completion,
    }
    return chunk


def chunks(request: Request, pieces: Iterator[Piece]) -> Iterator[Chunk]:
    """The completion as a stream; the last chunk has the finish reason and no text."""
    if request.echo:
        yield _chunk(request, request.echo, None, None)
    offset = request.offset
    for piece in pieces:
        logprobs = None
        if request.logprobs is not None and piece.tokens:
            logprobs = logprobs_of(piece.tokens, offset)
            offset += sum(len(token.text) for token in piece.tokens)
        if piece.text or logprobs:
            yield _chunk(request, piece.text, logprobs, None)
        if piece.finish is not None:
            yield _chunk(request, "", None, piece.finish)


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
