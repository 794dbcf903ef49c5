"""The generation of an answer, token by token: logits, sampler, text, until it ends."""

from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tamis.engine.checks import check_count, typed
from tamis.graph.topk_logits import Best
from tamis.sampling.base import LogitsError, Step
from tamis.sampling.chain import Sampler, SamplerParams, breaker_sequences
from tamis.text.detokenize import TextStream
from tamis.text.tokenizer import Tokenizer

# Called with the number of a prompt's tokens that were read, and with the number of all.
TokenProgress = Callable[[int, int], None]


class Piece(NamedTuple):
    """One step of generation.

    text may be empty while a character or a stop string is incomplete.
    """

    text: str
    token_id: int
    logprob: float
    finish: str | None  # "stop" or "length"; None: the answer continues


class Decoder(Protocol):
    """What generation needs of a session that holds a prompt: a Protocol."""

    def decode_best(self, token_id: int, n: int | None) -> Best | np.ndarray:
        """Append a token; returns the n best of its logits, or all."""
        ...


class Generating:
    """What holds a sequence of tokens, reads a prompt and answers it: a Protocol."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        raise NotImplementedError

    @property
    def tokens(self) -> list[int]:
        """The tokens that it holds."""
        raise NotImplementedError

    @property
    def n_free(self) -> int:
        """The number of tokens that still fit."""
        raise NotImplementedError

    def prefill(self, ids: Sequence[int], progress: TokenProgress | None = None) -> np.ndarray:
        """Append tokens; returns the logits f32 [n_vocab] of the last one."""
        raise NotImplementedError

    def decode_best(self, token_id: int, n: int | None) -> Best | np.ndarray:
        """Append a token; returns the n best of its logits, or all."""
        raise NotImplementedError

    def settle(self) -> None:
        """Drop tokens that were computed ahead of the answer."""

    def check_weights(self) -> None:
        """Raise GGUFError if weights have changed since they were loaded.

        For logits that are not finite.
        """

    @typed
    def generate(
        self,
        ids: Sequence[int],
        params: SamplerParams | None = None,
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        grammar: Step | None = None,
        progress: TokenProgress | None = None,
        shown: Collection[int] = (),
    ) -> Generator[Piece, None, None]:
        """Append the prompt `ids` and stream an answer.

        params None: the defaults of SamplerParams, which sample at temperature 0.8. grammar: a
        tamis.sampling.grammar.Grammar that constrains the answer. shown: control tokens whose
        text is part of the answer, such as the marks of tool calls. The last Piece has the finish
        "stop" (end-of-generation token or stop string) or "length" (max_tokens, or the context is
        full). Tokens of the answer are in the KV cache as soon as they are yielded. Raises
        ValueError for max_tokens below 0.
        """
        check_count("max_tokens", max_tokens)
        # Those below 0 stand for pictures or for a compressed text.
        read = [token for token in [*self.tokens, *ids] if token >= 0]
        sampler = sampler_of(params or SamplerParams(), self.tokenizer, read, grammar)
        logits = self.prefill(ids, progress)
        n_max = self.n_free if max_tokens is None else min(self.n_free, max_tokens)
        try:
            yield from generate(
                self, logits, sampler, self.tokenizer, n_max=n_max, stop=stop, shown=shown
            )
        except LogitsError:
            self.check_weights()
            raise
        finally:
            self.settle()

    def stream(
        self,
        ids: Sequence[int],
        params: SamplerParams | None = None,
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        grammar: Step | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Do what `generate` does for `async for`: steps run in a thread, so that others may run.

        If the caller is cancelled or closes the stream, the step in progress is the last one; the
        session can be used again once that has returned. A prompt that is being read is dropped.
        """
        from tamis.engine.streaming import stream

        return stream(
            lambda progress: self.generate(
                ids, params, stop=stop, max_tokens=max_tokens, grammar=grammar, progress=progress
            )
        )


def sampler_of(
    params: SamplerParams,
    tokenizer: Tokenizer,
    held: Sequence[int],
    grammar: Step | None = None,
) -> Sampler:
    """A Sampler whose history is these tokens; grammar: constrains the tokens to come.

    The sequence breakers of DRY are looked up in the vocabulary.
    """
    breakers = None
    if params.dry and params.dry_sequence_breakers:
        pieces = [tokenizer.piece(i) for i in range(tokenizer.n_vocab)]
        breakers = breaker_sequences(
            params.dry_sequence_breakers,
            pieces,
            lambda text: tokenizer.encode(text, add_special=False),
        )
    sampler = Sampler(params, tokenizer.n_vocab, eog=tokenizer.eog, dry_breakers=breakers)
    sampler.read(held)
    return sampler if grammar is None else sampler.limited(grammar)


def generate(
    session: Decoder,
    logits: Best | np.ndarray,
    sampler: Sampler,
    tokenizer: Tokenizer,
    *,
    n_max: int,
    stop: Sequence[str] = (),
    shown: Collection[int] = (),
) -> Iterator[Piece]:
    """Stream an answer of up to n_max tokens; logits: those of the prompt's last token.

    shown: control tokens whose text is part of the answer. The last Piece has the finish "stop"
    (end-of-generation token or stop string) or "length".
    """
    stream, n_left = TextStream(stop=stop), n_max
    while n_left > 0:
        token, logprob = _sampled(sampler, logits)
        sampler.accept(token)
        n_left -= 1
        if token in tokenizer.eog:
            yield Piece(stream.finish(), token, logprob, "stop")
            return
        text = stream.push(tokenizer.piece(token, special=token in shown))
        if stream.stopped is not None:
            yield Piece(text, token, logprob, "stop")
            return
        logits = session.decode_best(token, sampler.n_best)
        if n_left > 0:
            yield Piece(text, token, logprob, None)
        else:
            yield Piece(text + stream.finish(), token, logprob, "length")


def _sampled(sampler: Sampler, logits: Best | np.ndarray) -> tuple[int, float]:
    """The sampled next token and the logarithm of its probability."""
    if not isinstance(logits, Best):
        token = sampler.sample(logits)
        return token, sampler.logprob(logits, token)
    row = sampler.sample_best(logits.ids, logits.logits)
    return int(logits.ids[row]), float(logits.logits[row]) - logits.log_sum
