"""How llama_cpp's arguments become a sampler: its names, its order of steps, its special cases."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tamis.bindings.drop_in.grammar import LlamaGrammar
from tamis.sampling.base import Candidates, Step
from tamis.sampling.chain import Sampler, SamplerParams, breaker_sequences, build_chain
from tamis.sampling.logits import LogitBias, Penalties
from tamis.text.tokenizer import Tokenizer

LogitsProcessor = Callable[[np.ndarray, np.ndarray], np.ndarray]
StoppingCriteria = Callable[[np.ndarray, np.ndarray], bool]
Ids = Callable[[], np.ndarray]


class LogitsProcessorList(list[LogitsProcessor]):
    """Functions of (tokens int32 [n], logits f32 [n_vocab]) that return logits, applied in turn."""

    def __call__(self, input_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Logits after all functions."""
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Functions of (tokens int32 [n], logits f32 [n_vocab]).

    The answer ends when one returns true.
    """

    def __call__(self, input_ids: np.ndarray, logits: np.ndarray) -> bool:
        """Whether the answer ends."""
        return any(criterion(input_ids, logits) for criterion in self)


class MinTokensLogitsProcessor:
    """Forbids the token that ends the text until there are min_tokens new tokens."""

    def __init__(self, min_tokens: int, token_eos: int) -> None:
        self.min_tokens, self.token_eos = min_tokens, token_eos
        self.prompt_tokens: int | None = None

    def __call__(self, input_ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """The logits, with the end of the text forbidden as long as there are too few tokens."""
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) - self.prompt_tokens < self.min_tokens:
            scores = scores.copy()
            scores[self.token_eos] = -np.inf
        return scores


class _Processors(Step):
    """The caller's functions as a step; it comes first, as they expect all logits."""

    def __init__(self, processors: LogitsProcessorList, ids: Ids) -> None:
        self._processors, self._ids = processors, ids

    def apply(self, c: Candidates) -> Candidates:
        """Return what the functions make of the logits."""
        scores = np.array(c.logits, np.float32)
        for processor in self._processors:
            scores = np.asarray(processor(self._ids(), scores), np.float32)
        return Candidates(c.ids, scores)


@dataclass(frozen=True)
class Sampling:
    """The sampling arguments of llama_cpp.Llama's methods.

    last_n is llama_cpp's last_n_tokens_size.
    """

    temp: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    mirostat_mode: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logits_processor: LogitsProcessorList | None = None
    grammar: LlamaGrammar | None = None
    logit_bias: Mapping[int, float] | None = None
    # Fields of llama.cpp's server, with the names of SamplerParams.
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    min_keep: int = 0
    repeat_last_n: int | None = None  # replaces the sampler's last_n
    ignore_eos: bool = False

    def sampler(
        self,
        n_vocab: int,
        *,
        seed: int | None,
        last_n: int,
        ids: Ids,
        grammar: Step | None,
        tokenizer: Tokenizer | None = None,
        prompt: Sequence[int] = (),
    ) -> Sampler:
        """The chain: processors, biases, grammar, penalties, then the steps of SamplerParams.

        grammar: the compiled step of `self.grammar`, from a caller that has a tokenizer. tokenizer:
        for the sequence breakers of DRY, and for ignore_eos. prompt: the tokens before the answer,
        which penalties and DRY count as well. As in llama_cpp, a temperature of 0 is greedy, and a
        negative one draws from all tokens with their probabilities unchanged. Raises SamplerError,
        ImportError.
        """
        steps: list[Step] = []
        if self.logits_processor:
            steps.append(_Processors(self.logits_processor, ids))
        if self.logit_bias:
            steps.append(LogitBias(dict(_bias(*pair) for pair in self.logit_bias.items())))
        if grammar is not None:
            steps.append(grammar)
        penalties = self.repeat_penalty, self.frequency_penalty, self.presence_penalty
        last_n = last_n if self.repeat_last_n is None else self.repeat_last_n
        if last_n and penalties != (1.0, 0.0, 0.0):
            steps.append(Penalties(last_n, *penalties))
        params = self._params(seed)
        breakers: tuple[tuple[int, ...], ...] = ()
        if tokenizer is not None and params.dry:
            breakers = _breakers(tokenizer, params.dry_sequence_breakers)
        eog = () if tokenizer is None else tokenizer.eog
        chain = build_chain(params, n_vocab, eog=eog, dry_breakers=breakers)
        sampler = Sampler.chain([*steps, *chain], n_vocab)
        sampler.read(prompt)
        return sampler

    def _params(self, seed: int | None) -> SamplerParams:
        if self.temp < 0:
            return SamplerParams(
                seed=seed, temp=1.0, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=self.ignore_eos
            )
        return SamplerParams(
            seed=seed,
            temp=self.temp,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            mirostat=self.mirostat_mode,
            mirostat_tau=self.mirostat_tau,
            mirostat_eta=self.mirostat_eta,
            dynatemp_range=self.dynatemp_range,
            dynatemp_exponent=self.dynatemp_exponent,
            top_n_sigma=self.top_n_sigma,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=self.dry_penalty_last_n,
            dry_sequence_breakers=self.dry_sequence_breakers,
            min_keep=self.min_keep,
            ignore_eos=self.ignore_eos,
        )


@lru_cache(maxsize=8)
def _breakers(tokenizer: Tokenizer, texts: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    pieces = [tokenizer.piece(i) for i in range(tokenizer.n_vocab)]
    return breaker_sequences(texts, pieces, lambda text: tokenizer.encode(text, add_special=False))


def _bias(token: Any, bias: Any) -> tuple[int, float]:
    """A token id and its bias; JSON has ids as text. Raises TypeError."""
    try:
        return int(token), float(bias)
    except (TypeError, ValueError):
        raise TypeError(
            f"logit_bias has {token!r}: {bias!r}, expected a token id with a number: "
            "write logit_bias={42: -1.5}"
        ) from None
