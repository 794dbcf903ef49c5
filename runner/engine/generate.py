"""An answer, a token at a time: logits, sampler, text, until something ends it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tamis.graph.topk_logits import Best
from tamis.sampling.base import Step
from tamis.sampling.chain import Sampler, SamplerParams, breaker_sequences
from tamis.text.detokenize import TextStream
from tamis.text.tokenizer import Tokenizer


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
    for token in held:
        sampler.accept(token)
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
