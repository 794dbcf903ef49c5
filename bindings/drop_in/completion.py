"""A completion in OpenAI's shape: text, finish reason, logprobs, usage; whole or streamed."""

import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tamis.sampling.chain import Sampler
from tamis.select.meter import Mass
from tamis.text.detokenize import TextStream
from tamis.text.thinking import ThinkingBudget
from tamis.text.tokenizer import Tokenizer

Chunk = dict[str, Any]


class Budget(NamedTuple):
    """The number of tokens that an answer may think for, and the tokens that mark thoughts."""

    n_tokens: int
    start: list[int]
    end: list[int]
    is_open: bool  # whether the prompt ends in a thought

    def watch(self) -> ThinkingBudget:
        """A new observer that counts the thoughts of one answer."""
        return ThinkingBudget(self.n_tokens, start=self.start, end=self.end, is_open=self.is_open)


@dataclass(frozen=True)
class Request:
    """What a completion needs of the call that asked for it."""

    prompt: list[int]
    max_tokens: int
    model: str
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: str | None = None  # the prompt's text, if the answer is to repeat it
    offset: int = 0  # characters before the answer, for the text offsets of logprobs
    shown: frozenset[int] = frozenset()  # control tokens that are text: marks of a chat format
    budget: Budget | None = None  # of thoughts
    shifts: bool = False  # whether the older half of a full context is dropped
    n_keep: int = 0  # tokens of the prompt that are never dropped
    n_draft: int | None = None  # tokens of a draft, if fewer than usual are asked for
    post_sampling: bool = False  # whether probabilities are those after the sampler's steps
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4()}")
    created: int = field(default_factory=lambda: int(time.time()))


class Likely(NamedTuple):
    """A token and the natural logarithm of its probability."""

    id: int
    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        """The bytes as text; an incomplete character becomes U+FFFD."""
        return self.data.decode("utf-8", "replace")


class TokenInfo(NamedTuple):
    """A token of the answer, its logprob, and the likeliest tokens at its position."""

    id: int
    data: bytes
    logprob: float | None  # None for the first token of a prompt
    top: list[Likely]

    @property
    def text(self) -> str:
        """The bytes as text; an incomplete character becomes U+FFFD."""
        return self.data.decode("utf-8", "replace")


class Counts(NamedTuple):
    """Tokens and seconds of an answer so far."""

    n_cached: int = 0  # tokens of the prompt that were in the KV cache already
    n_read: int = 0  # tokens of the prompt that were computed
    n_answer: int = 0
    read_seconds: float = 0.0
    answer_seconds: float = 0.0
    mass: Sequence[Any] | None = None  # the fields of a select.meter.Mass, if a meter measured it
    n_drafted: int = 0  # tokens that speculative decoding proposed
    n_accepted: int = 0  # those of them that are in the answer

    def attention(self) -> dict[str, Any]:
        """The attention fields of usage: the estimated retained mass of a metered method."""
        return {} if self.mass is None else {"attention": Mass(*self.mass).rounded()}


class Piece(NamedTuple):
    """A part of the answer: its text, its tokens, and the finish reason if it is the last."""

    text: str
    tokens: list[TokenInfo]
    finish: str | None
    ids: tuple[int, ...] = ()
    word: str | None = None  # the stop string that ended the answer
    counts: Counts = Counts()


class Answer:
    """Makes pieces of text out of the tokens of an answer, one token at a time."""

    def __init__(self, request: Request, tokenizer: Tokenizer, sampler: Sampler) -> None:
        self._request, self._tokenizer, self._sampler = request, tokenizer, sampler
        self._stream = TextStream(stop=request.stop)
        self._waiting: list[TokenInfo] = []  # tokens whose text has not been returned yet
        self._ids: list[int] = []  # likewise
        self.prompt_rows: np.ndarray | None = None  # f32 [n_prompt, n_vocab], for echo
        self.finished = False
        self.n_completion = 0
        self.tokens: list[int] = []

    def push(self, token: int, row: np.ndarray | None) -> list[Piece]:
        """The pieces that one more token adds.

        row: the logits f32 [n_vocab] that it was chosen from.

        row may be None if the request asks for no logprobs. Only the last piece of an answer has a
        finish reason.
        """
        r = self._request
        if token in self._tokenizer.eog:
            return [self.finish("stop")]
        self.tokens.append(token)
        self._ids.append(token)
        self.n_completion += 1
        if r.logprobs is not None:
            assert row is not None
            self._waiting.append(self._info(token, row))
        text = self._stream.push(self._tokenizer.piece(token, special=token in r.shown))
        if self._stream.stopped is not None:
            self._waiting = _within(self._waiting, text)
            return [self._piece(text), self.finish("stop")]
        found = []
        if text:
            found.append(self._piece(text))
        if self.n_completion >= r.max_tokens:
            found.append(self.finish("length"))
        return found

    def _piece(self, text: str, finish: str | None = None) -> Piece:
        tokens, self._waiting = self._waiting, []
        ids, self._ids = tuple(self._ids), []
        counts = Counts(n_answer=self.n_completion)
        return Piece(text, tokens, finish, ids, self._stream.stopped, counts)

    def finish(self, reason: str) -> Piece:
        """The last piece, with the text that was held back."""
        self.finished = True
        return self._piece(self._stream.finish(), reason)

    def pieces(self, tokens: Generator[int, Any, None], rows: list[np.ndarray]) -> Iterator[Piece]:
        """Yield the pieces of a generator's answer.

        rows[-1] holds the logits of the token just yielded.
        """
        try:
            for token in tokens:
                yield from self.push(token, rows[-1])
                if self.finished:
                    return
        finally:
            tokens.close()
        # a stopping criterion may end the tokens before the answer is complete
        yield self.finish("stop")

    def prompt_tokens(self) -> list[TokenInfo]:
        """The prompt's tokens with their logprobs; the first has none."""
        rows, ids = self.prompt_rows, self._request.prompt
        if rows is None:
            return []
        return [self.first_info()] + [
            self._info(t, row) for t, row in zip(ids[1:], rows[:-1], strict=True)
        ]

    def first_info(self) -> TokenInfo:
        """The prompt's first token, for which there are no logits."""
        first = self._request.prompt[0]
        return TokenInfo(first, self._data(first), None, [])

    def prompt_info(self, i: int, row: np.ndarray) -> TokenInfo:
        """Token i of the prompt; row: the logits f32 [n_vocab] of the one before."""
        return self._info(self._request.prompt[i], row)

    def _info(self, token: int, row: np.ndarray) -> TokenInfo:
        n = self._request.logprobs or 0
        if self._request.post_sampling:
            likely = self._sampler.after_steps(row, n, token)
        else:
            likely = self._sampler.logprobs(row, n), self._sampler.logprob(row, token)
        top = [Likely(i, self._data(i), p) for i, p in likely[0]]
        return TokenInfo(token, self._data(token), likely[1], top)

    def _data(self, token: int) -> bytes:
        return self._tokenizer.piece(token, special=True)


def _within(tokens: list[TokenInfo], text: str) -> list[TokenInfo]:
    """The tokens that begin within the text; the text ends before its stop string."""
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

    def begin(self, prompt: Sequence[TokenInfo] = ()) -> list[Chunk]:
        """The chunk before the answer: the prompt and its tokens, if the answer is to repeat it."""
        r = self._request
        logprobs = logprobs_of(list(prompt), r.offset) if prompt else None
        return [_chunk(r, r.echo, logprobs, None)] if r.echo else []

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
        "top_logprobs": [_top(token) for token in tokens],
    }


def _top(token: TokenInfo) -> dict[str, float] | None:
    """The likeliest tokens and the chosen one; None if there are no logits for the token."""
    if token.logprob is None:
        return None
    return {each.text: each.logprob for each in token.top} | {token.text: token.logprob}


def _chunk(request: Request, text: str, logprobs: Any, finish: str | None) -> Chunk:
    choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish}
    return {
        "id": request.id,
        "object": "text_completion",
        "created": request.created,
        "model": request.model,
        "choices": [choice],
    }
