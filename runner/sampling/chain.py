"""From logits to a token: the parameters with llama.cpp's names and defaults, and the chain.

A chain is a list of steps, `[Penalties(64, 1.1), TopK(40), TopP(0.95), Temp(0.8), Dist(seed=1)]`;
the steps are in `tamis.samplers`. Imports NumPy and the standard library only.
"""

import copy
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tamis.sampling.base import (
    RANGES,
    Candidates,
    LogitsError,
    SamplerError,
    Step,
    check,
    resolve_seed,
)
from tamis.sampling.choose import Dist, Greedy, Mirostat, MirostatV2
from tamis.sampling.dry import Dry, breaker_sequences
from tamis.sampling.logits import DynaTemp, LogitBias, Penalties, Temp, check_bias
from tamis.sampling.truncate import MinP, TopK, TopNSigma, TopP, Typical, Xtc

__all__ = [
    "Candidates",
    "Dist",
    "Dry",
    "DynaTemp",
    "Greedy",
    "LogitBias",
    "MinP",
    "Mirostat",
    "MirostatV2",
    "Penalties",
    "Sampler",
    "SamplerError",
    "SamplerParams",
    "Step",
    "Temp",
    "TopK",
    "TopNSigma",
    "TopP",
    "Typical",
    "Xtc",
    "breaker_sequences",
    "build_chain",
]

MIROSTAT_M = 100  # the paper's and llama.cpp's number of tokens in the fit of version 1
MAX_BREAKER_CHARS = 40  # llama.cpp truncates longer ones; here they are refused


@dataclass(frozen=True)
class SamplerParams:
    """The user's sampling parameters, with the names of llama-server and llama.cpp's defaults.

    Each value is checked against its range (SamplerError; NaN is refused). temp <= 0 is greedy,
    unless dynatemp_range > 0. With mirostat 1 or 2 only logit_bias, ignore_eos, temp, seed and the
    mirostat values count, as in llama.cpp. seed None or -1 draws one: see `Sampler.seed`.
    logit_bias maps token ids to the number that is added to their logits (-inf forbids); it is
    stored as pairs, so that parameters can be hashed.
    """

    seed: int | None = -1
    temp: float = 0.8
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    top_n_sigma: float = -1.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repeat_last_n: int = 64
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    min_keep: int = 0
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = field(default=())

    def __post_init__(self) -> None:
        for name in RANGES:
            if name != "seed" or self.seed is not None:
                check(name, getattr(self, name))
        bias = dict(self.logit_bias)
        for token_id, value in bias.items():
            check_bias(token_id, value)
        object.__setattr__(self, "logit_bias", tuple(bias.items()))
        if isinstance(self.dry_sequence_breakers, str):
            raise SamplerError(
                f"dry_sequence_breakers is the string {self.dry_sequence_breakers!r}, "
                "expected several: put it in a tuple"
            )
        for text in self.dry_sequence_breakers:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_BREAKER_CHARS:
                raise SamplerError(
                    f"dry_sequence_breakers has {text!r}, "
                    f"expected text of 1 to {MAX_BREAKER_CHARS} characters: shorten it"
                )
        object.__setattr__(self, "dry_sequence_breakers", tuple(self.dry_sequence_breakers))

    @property
    def dry(self) -> bool:
        """Whether DRY has an effect."""
        on = self.dry_multiplier > 0 and self.dry_base >= 1 and self.dry_penalty_last_n != 0
        return on and self.mirostat == 0

    @property
    def greedy(self) -> bool:
        """Whether the last step chooses the best token without drawing a random number."""
        return self.temp <= 0 and (self.dynatemp_range <= 0 or self.mirostat != 0)


def build_chain(
    params: SamplerParams,
    n_vocab: int,
    *,
    eog: Collection[int] = (),
    dry_breakers: Sequence[Sequence[int]] = (),
) -> list[Step]:
    """Return llama.cpp's default chain for `params`, without the steps that would have no effect.

    logit_bias · penalties · dry · top_n_sigma · top_k · typical_p · top_p · min_p · xtc ·
    temperature · dist or greedy; with mirostat: logit_bias · temperature · mirostat. A grammar, if
    there is one, follows logit_bias. All random steps get one seed.
    """
    p, seed = params, resolve_seed(params.seed)
    bias = dict(p.logit_bias) | (dict.fromkeys(eog, -math.inf) if p.ignore_eos else {})
    steps: list[Step] = [LogitBias(bias)] if bias else []
    if p.mirostat:
        return steps + _mirostat_tail(p, n_vocab, seed)
    if p.repeat_last_n and (p.repeat_penalty, p.frequency_penalty, p.presence_penalty) != (1, 0, 0):
        steps.append(
            Penalties(p.repeat_last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty)
        )
    if p.dry:
        allowed, last_n = p.dry_allowed_length, p.dry_penalty_last_n
        steps.append(Dry(p.dry_multiplier, p.dry_base, allowed, last_n, dry_breakers))
    # Of the truncations only these two can drop the best token: greedy needs no others.
    if not p.greedy or p.typical_p < 1 or p.xtc_probability > 0:
        steps += _truncations(p, seed)
    if p.greedy:
        return [*steps, Greedy()]
    if p.dynatemp_range > 0:
        return [*steps, DynaTemp(p.temp, p.dynatemp_range, p.dynatemp_exponent), Dist(seed)]
    return [*steps, *_temp(p), Dist(seed)]


def _truncations(p: SamplerParams, seed: int) -> list[Step]:
    return [
        *([TopNSigma(p.top_n_sigma)] if p.top_n_sigma > 0 else []),
        *([TopK(p.top_k)] if p.top_k > 0 else []),
        *([Typical(p.typical_p, p.min_keep)] if p.typical_p < 1 else []),
        *([TopP(p.top_p, p.min_keep)] if p.top_p < 1 else []),
        *([MinP(p.min_p, p.min_keep)] if p.min_p > 0 else []),
        *(
            [Xtc(p.xtc_probability, p.xtc_threshold, p.min_keep, seed)]
            if p.xtc_probability > 0
            else []
        ),
    ]


def _temp(p: SamplerParams) -> list[Step]:
    return [Temp(p.temp)] if p.temp != 1 else []


def _mirostat_tail(p: SamplerParams, n_vocab: int, seed: int) -> list[Step]:
    if p.greedy:
        return [Greedy()]
    if p.mirostat == 1:
        last = Mirostat(p.mirostat_tau, p.mirostat_eta, seed, MIROSTAT_M, n_vocab)
        return [*_temp(p), last]
    return [*_temp(p), MirostatV2(p.mirostat_tau, p.mirostat_eta, seed)]


class Sampler:
    """Chooses the next token of one sequence, and keeps the state of the steps.

    eog: the ids that end a text, forbidden with params.ignore_eos. dry_breakers: the sequence
    breakers of DRY as token ids; the tokenizer's owner makes them of params.dry_sequence_breakers
    with `breaker_sequences`, so that nothing here depends on tokenizers.
    """

    def __init__(
        self,
        params: SamplerParams,
        n_vocab: int,
        *,
        eog: Collection[int] = (),
        dry_breakers: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if params.dry and params.dry_sequence_breakers and dry_breakers is None:
            raise SamplerError(
                f"dry_sequence_breakers is {params.dry_sequence_breakers!r} and dry_breakers None: "
                "pass dry_breakers=breaker_sequences(...), or set dry_sequence_breakers=()"
            )
        steps = build_chain(params, n_vocab, eog=eog, dry_breakers=dry_breakers or ())
        self._set_up(steps, n_vocab)
        self.params: SamplerParams | None = params

    @classmethod
    def chain(cls, steps: Iterable[Step], n_vocab: int) -> "Sampler":
        """Return a sampler of these steps in this order; the last one, and only it, chooses."""
        sampler = cls.__new__(cls)
        sampler._set_up(list(steps), n_vocab)
        sampler.params = None
        return sampler

    def limited(self, grammar: Step) -> "Sampler":
        """Return this sampler with a grammar after its biases.

        The grammar ignores tokens seen so far.
        """
        other = self.clone()
        n = sum(isinstance(step, LogitBias) for step in other.steps)
        other.steps = (*other.steps[:n], grammar, *other.steps[n:])
        return other

    def _set_up(self, steps: list[Step], n_vocab: int) -> None:
        if n_vocab < 1:
            raise SamplerError(f"n_vocab is {n_vocab}, expected at least 1: pass the model's")
        choosing = [i for i, step in enumerate(steps) if step.chooses]
        if choosing != [len(steps) - 1]:
            raise SamplerError(
                f"the chain is {steps}, expected exactly one step that chooses, at its end: "
                "close it with Dist(seed), Greedy(), Mirostat(...) or MirostatV2(...)"
            )
        self.n_vocab = n_vocab
        self.steps = tuple(steps)
        for step in steps:
            if isinstance(step, LogitBias):
                for token_id in step.bias:
                    self._check_id(token_id, "logit_bias has")
        self._ids = np.arange(n_vocab, dtype=np.int32)  # made once: shared by all candidates
        self._ids.flags.writeable = False

    def _check_id(self, token_id: int, who: str) -> None:
        if not 0 <= token_id < self.n_vocab:
            raise SamplerError(
                f"{who} token id {token_id}, expected 0 to {self.n_vocab - 1}: "
                "ids must come from this model's tokenizer"
            )

    @property
    def seed(self) -> int | None:
        """The seed in use, including a drawn one; None for a chain without randomness."""
        seeds = [step.seed for step in self.steps if hasattr(step, "seed")]
        return seeds[-1] if seeds else None

    def sample(self, logits: np.ndarray) -> int:
        """Return the id of the next token; `logits` float32 [n_vocab] are not changed.

        Draws random numbers, but does not change the history: `accept` does. Raises SamplerError
        for logits of another shape, NaN, +inf, or none that can be chosen.
        """
        c = Candidates(self._ids, self._checked(logits))
        for step in self.steps:
            c = step.apply(c)
        assert len(c) == 1, f"{self.steps[-1]} left {len(c)} candidates"
        return int(c.ids[0])

    def after_steps(
        self, logits: np.ndarray, n: int, chosen: int
    ) -> tuple[list[tuple[int, float]], float]:
        """The results of `logprobs` and `logprob` for the candidates before the choosing step.

        To be called between `sample` and `accept`. Changes no state.
        """
        c = Candidates(self._ids, self._checked(logits))
        for step in self.steps[:-1]:
            state = step.get_state()
            c = step.apply(c)
            step.set_state(state)
        if isinstance(self.steps[-1], Greedy):
            c = c.head(1)
        best = c.all_sorted()
        found = [
            (int(i), math.log(p)) for i, p in zip(best.ids, best.probs(), strict=True) if p > 0
        ]
        return found[: max(n, 0)], dict(found).get(chosen, -math.inf)

    @property
    def n_best(self) -> int | None:
        """The number of best logits that `sample` needs; None: it needs all."""
        first = self.steps[0]
        if isinstance(first, TopK) and first.k > 0:
            return first.k
        return 1 if isinstance(first, Greedy) else None

    def sample_best(self, ids: np.ndarray, logits: np.ndarray) -> int:
        """Do what `sample` does with only the `n_best` best finite logits.

        Returns the row of the token.

        ids int32, logits float32 [n_best]: by falling logit, equal ones by rising id.
        """
        c = Candidates(ids, logits, sorted=True)
        for step in self.steps:
            c = step.apply(c)
        return int(np.flatnonzero(ids == c.ids[0])[0])

    def _checked(self, logits: np.ndarray) -> np.ndarray:
        logits = np.asarray(logits, dtype=np.float32)
        if logits.shape != (self.n_vocab,):
            raise SamplerError(
                f"logits have shape {logits.shape}, expected ({self.n_vocab},): pass one row"
            )
        top = logits.max()  # NaN if any logit is NaN: one pass checks everything
        if math.isfinite(top):
            return logits
        if top == -math.inf:
            raise LogitsError("all logits are -inf, expected at least one finite: check the model")
        row = int(np.argmax(logits))
        raise LogitsError(
            f"the logit of token {row} is {logits[row]}, expected a finite number: the forward "
            "pass overflowed or the model file is damaged"
        )

    def accept(self, token_id: int) -> None:
        """Append a token, of the prompt or sampled, to the history of all steps."""
        self._check_id(token_id, "accept got")
        for step in self.steps:
            step.accept(int(token_id))

    def read(self, token_ids: Sequence[int]) -> None:
        """Append the tokens of a prompt to the history of all steps that consider the prompt."""
        ids = [int(token_id) for token_id in token_ids]
        for end in (min(ids), max(ids)) if ids else ():
            self._check_id(end, "read got")
        for step in self.steps:
            step.read(ids)

    def reset(self) -> None:
        """Clear the history and restart the random streams: the same text follows."""
        for step in self.steps:
            step.reset()

    def clone(self) -> "Sampler":
        """Return an independent sampler in the same state."""
        other = copy.copy(self)
        other.steps = copy.deepcopy(self.steps)
        return other

    def get_state(self) -> dict[str, Any]:
        """Return history, random streams and mu as a dict that JSON can hold."""
        steps = [{"step": type(s).__name__, "state": s.get_state()} for s in self.steps]
        return {"version": 1, "n_vocab": self.n_vocab, "steps": steps}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a sampler with the same steps, including its seed.

        SamplerError for another version, vocabulary or chain, or a damaged state; then nothing has
        changed.
        """
        names = [type(s).__name__ for s in self.steps]
        try:
            saved = [entry["step"] for entry in state["steps"]]
            found = (state["version"], state["n_vocab"], saved)
            if found != (1, self.n_vocab, names):
                raise SamplerError(
                    f"the saved sampler is (version, n_vocab, steps) = {found}, "
                    f"expected {(1, self.n_vocab, names)}: build it with the same parameters"
                )
            steps = copy.deepcopy(self.steps)
            for step, entry in zip(steps, state["steps"], strict=True):
                step.set_state(entry["state"])
        except SamplerError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise SamplerError(
                f"the saved sampler state is damaged ({error!r}): call reset() and go on without it"
            ) from error
        self.steps = steps

    def logprobs(self, logits: np.ndarray, n: int) -> list[tuple[int, float]]:
        """Return (id, natural log of the probability) of the `n` likeliest tokens, best first.

        Probabilities are of the softmax of all raw logits, in float64, before any step.
        """
        logits = self._checked(logits)
        log_sum = _log_sum_exp(logits)
        best = Candidates(self._ids, logits).head(max(n, 0))
        return [(int(i), float(x) - log_sum) for i, x in zip(best.ids, best.logits, strict=True)]

    def logprob(self, logits: np.ndarray, token_id: int) -> float:
        """Return the natural log of the probability of one token, as in `logprobs`."""
        self._check_id(token_id, "logprob got")
        logits = self._checked(logits)
        return float(logits[token_id]) - _log_sum_exp(logits)


def _log_sum_exp(logits: np.ndarray) -> float:
    x = logits.astype(np.float64)
    top = float(x.max())
    x -= top
    np.exp(x, out=x)
    return top + math.log(float(x.sum()))
