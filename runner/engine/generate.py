"""An answer, a token at a time: logits, sampler, text, until something ends it."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tamis.graph.topk_logits import Best
from tamis.sampling.base import LogitsError, Step
from tamis.sampling.chain import Sampler, SamplerParams, breaker_sequences
from tamis.text.detokenize import TextStream
from tamis.text.tokenizer import Tokenizer

# Called with how many of a prompt's tokens were read, and with their count.
TokenProgress = Callable[[int, int], None]


class Piece(NamedTuple):
    """One step of generation. text may be empty while a character or a stop string is open."""

    text: str
    token_id: int
    logprob: float
    finish: str | None  # None, "stop" or "length"


class Decoder(Protocol):
    """What generation asks of a session that holds a prompt."""

    def decode_best(self, token_id: int, n: int | None) -> Best | np.ndarray:
        """Append a token; the n best of its logits, or all."""
        ...


class Generating:
    """What holds a sequence of tokens, reads a prompt and answers it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        raise NotImplementedError

    @property
    def tokens(self) -> list[int]:
        """Those that it holds."""
        raise NotImplementedError

    @property
    def n_free(self) -> int:
        """How many more tokens it can hold."""
        raise NotImplementedError

    def prefill(self, ids: Sequence[int], progress: TokenProgress | None = None) -> np.ndarray:
        """Append tokens; logits f32 [n_vocab] of the last one."""
        raise NotImplementedError

    def decode_best(self, token_id: int, n: int | None) -> Best | np.ndarray:
        """Append a token; the n best of its logits, or all."""
        raise NotImplementedError

    def settle(self) -> None:
        """Drop what was read ahead of the answer."""

    def check_weights(self) -> None:
        """Raise GGUFError where weights are not as they were loaded: logits are not finite."""

    def generate(
        self,
        ids: Sequence[int],
        params: SamplerParams,
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        grammar: Step | None = None,
        progress: TokenProgress | None = None,
    ) -> Iterator[Piece]:
        """Append the prompt `ids` and stream an answer.

        grammar: of the answer alone, a tamis.sampling.grammar.Grammar. Ends with a Piece whose
        finish is "stop" (end-of-generation token or stop string) or "length" (max_tokens, or the
        context is full). Tokens of the answer are held as they come.
        """
        sampler = sampler_of(params, self.tokenizer, [*self.tokens, *ids], grammar)
        found = self.prefill(ids, progress)
        n_max = self.n_free if max_tokens is None else min(self.n_free, max_tokens)
        try:
            yield from generate(self, found, sampler, self.tokenizer, n_max=n_max, stop=stop)
        except LogitsError:
            self.check_weights()
            raise
        finally:
            self.settle()


def sampler_of(
    params: SamplerParams,
    tokenizer: Tokenizer,
    held: Sequence[int],
    grammar: Step | None = None,
) -> Sampler:
    """A Sampler that has seen these tokens; grammar: what limits those to come, which it follows.

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
    found: Best | np.ndarray,
    sampler: Sampler,
    tokenizer: Tokenizer,
    *,
    n_max: int,
    stop: Sequence[str] = (),
) -> Iterator[Piece]:
    """Stream an answer of up to n_max tokens; found: the logits of the prompt's last token.

    Ends with a Piece whose finish is "stop" (end-of-generation token or stop string) or "length".
    """
    stream, n_left = TextStream(stop=stop), n_max
    while n_left > 0:
        token, logprob = _sampled(sampler, found)
        sampler.accept(token)
        n_left -= 1
        if token in tokenizer.eog:
            yield Piece(stream.finish(), token, logprob, "stop")
            return
        text = stream.push(tokenizer.piece(token))
        if stream.stopped is not None:
            yield Piece(text, token, logprob, "stop")
            return
        found = session.decode_best(token, sampler.n_best)
        if n_left > 0:
            yield Piece(text, token, logprob, None)
        else:
            yield Piece(text + stream.finish(), token, logprob, "length")


def _sampled(sampler: Sampler, found: Best | np.ndarray) -> tuple[int, float]:
    """The next token and the logarithm of its probability."""
    if not isinstance(found, Best):
        token = sampler.sample(found)
        return token, sampler.logprob(found, token)
    row = sampler.sample_best(found.ids, found.logits)
    return int(found.ids[row]), float(found.logits[row]) - found.log_sum
