"""Functions of samplers: single steps, chains of them, and sampling from a context's logits.

The steps are those of tamis.samplers; their random numbers are not llama.cpp's, so that a seed
gives another text than there. A sampler is for one thread at a time; a chain owns the samplers
added to it.
"""

import copy
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from tamis.bindings.flat.buffers import as_array, as_float, as_int, as_text
from tamis.bindings.flat.context import using
from tamis.bindings.flat.decode import _ith
from tamis.bindings.flat.handles import TABLE
from tamis.bindings.flat.model import Vocab
from tamis.bindings.flat.params import (
    LLAMA_DEFAULT_SEED,
    LLAMA_TOKEN_NULL,
    TOKEN_DATA,
    llama_logit_bias,
    llama_sampler_chain_params,
    llama_token_data_array,
)
from tamis.bindings.flat.status import GGML_LOG_LEVEL_INFO, LLAMA_OK, invalid, returns, say
from tamis.sampling.base import Candidates, Step
from tamis.sampling.choose import Dist, Greedy, Mirostat, MirostatV2
from tamis.sampling.dry import Dry, breaker_sequences
from tamis.sampling.grammar import Grammar, gbnf_grammar
from tamis.sampling.logits import DynaTemp, LogitBias, Penalties, Temp
from tamis.sampling.truncate import MinP, TopK, TopNSigma, TopP, Typical, Xtc
from tamis.sampling.vocabulary import GrammarTokenizer


class Sampler:
    """A step, or a chain of samplers."""

    def __init__(self, name: str, step: Step | None) -> None:
        self.name, self.step = name, step
        self.parts: list[Sampler] = []  # of a chain
        self.lock = threading.RLock()
        self.t_sample_ms, self.n_sample = 0.0, 0

    def steps(self) -> list[Step]:
        """The steps; of a chain, in their order."""
        if self.step is not None:
            return [self.step]
        return [step for part in self.parts for step in part.steps()]

    def apply(self, c: Candidates) -> tuple[Candidates, bool]:
        """The candidates that the steps leave, and whether the last one has chosen a token."""
        steps = self.steps()
        for step in steps:
            c = step.apply(c)
        return c, bool(steps) and steps[-1].chooses

    def accept(self, token: int) -> None:
        """Enter a token into the history of all steps."""
        for step in self.steps():
            step.accept(token)

    def clone(self) -> "Sampler":
        """An independent sampler in the same state."""
        other = Sampler(self.name, copy.deepcopy(self.step))
        other.parts = [part.clone() for part in self.parts]
        return other


class llama_perf_sampler_data(NamedTuple):
    """Milliseconds and samples since the chain was made or reset."""

    t_sample_ms: float
    n_sample: int


def _new(name: str, step: Step) -> int:
    return TABLE.add(Sampler(name, step))


def _seed(seed: Any) -> int:
    return as_int(seed, "seed", 0, LLAMA_DEFAULT_SEED)


@returns(0)
def llama_sampler_chain_init(params: llama_sampler_chain_params) -> int:
    """An empty chain."""
    if not isinstance(params, llama_sampler_chain_params):
        invalid(f"params is {params!r}, expected llama_sampler_chain_default_params()")
    return TABLE.add(Sampler("chain", None))


@returns()
def llama_sampler_chain_add(chain: int, smpl: int) -> int:
    """Append a sampler to a chain, which owns it: the sampler's own handle is stale afterwards."""
    whole = _chain(chain)
    with whole.lock:
        part = TABLE.get(smpl, Sampler)
        if part is whole:
            invalid("a chain cannot be added to itself")
        whole.parts.append(TABLE.remove(smpl, Sampler))
    return LLAMA_OK


@returns(0)
def llama_sampler_chain_remove(chain: int, i: int) -> int:
    """Remove sampler i from a chain.

    Returns a handle of it, to be freed, or 0 for no such index.
    """
    whole = _chain(chain)
    with whole.lock:
        return TABLE.add(whole.parts.pop(as_int(i, "i", 0, len(whole.parts) - 1)))


@returns(-1)
def llama_sampler_chain_n(chain: int) -> int:
    """How many samplers a chain has."""
    return len(_chain(chain).parts)


@returns(0)
def llama_sampler_chain_get(chain: int, i: int) -> int:
    """A handle of sampler i of a chain, or of the chain itself for i = -1; 0 for no such index.

    The chain still owns the sampler. Each call makes a new handle, to be freed when it is no longer
    used: that leaves the chain unchanged.
    """
    whole = _chain(chain)
    at = as_int(i, "i", -1, len(whole.parts) - 1)
    return chain if at < 0 else TABLE.add(whole.parts[at])


@returns(b"")
def llama_sampler_name(smpl: int) -> bytes:
    """The name of what a sampler does."""
    return TABLE.get(smpl, Sampler).name.encode()


def _chain(handle: Any) -> Sampler:
    chain = TABLE.get(handle, Sampler)
    if chain.step is not None:
        invalid(f"handle {handle} is of the sampler {chain.name}, expected a chain")
    return chain


@returns(0)
def llama_sampler_init_greedy() -> int:
    """Choose the largest logit."""
    return _new("greedy", Greedy())


@returns(0)
def llama_sampler_init_dist(seed: int) -> int:
    """Sample a token by its probability; LLAMA_DEFAULT_SEED draws a seed."""
    return _new("dist", Dist(_seed(seed)))


@returns(0)
def llama_sampler_init_top_k(k: int) -> int:
    """Keep the k best; k <= 0 keeps all."""
    return _new("top-k", TopK(as_int(k, "k")))


@returns(0)
def llama_sampler_init_top_p(p: float, min_keep: int) -> int:
    """Keep the smallest set of the likeliest tokens whose probabilities sum to p."""
    return _new("top-p", TopP(as_float(p, "p"), as_int(min_keep, "min_keep", 0)))


@returns(0)
def llama_sampler_init_min_p(p: float, min_keep: int) -> int:
    """Keep tokens of at least p times the highest probability."""
    return _new("min-p", MinP(as_float(p, "p"), as_int(min_keep, "min_keep", 0)))


@returns(0)
def llama_sampler_init_typical(p: float, min_keep: int) -> int:
    """Keep the most typical tokens whose probabilities sum to p."""
    return _new("typical", Typical(as_float(p, "p"), as_int(min_keep, "min_keep", 0)))


@returns(0)
def llama_sampler_init_temp(t: float) -> int:
    """Divide logits by t; t <= 0 keeps only the best one."""
    return _new("temp", Temp(as_float(t, "t")))


@returns(0)
def llama_sampler_init_temp_ext(t: float, delta: float, exponent: float) -> int:
    """Divide logits by a temperature from t - delta to t + delta that follows their entropy."""
    step = DynaTemp(as_float(t, "t"), as_float(delta, "delta"), as_float(exponent, "exponent"))
    return _new("temp-ext", step)


@returns(0)
def llama_sampler_init_xtc(p: float, t: float, min_keep: int, seed: int) -> int:
    """With probability p, drop all but the least likely of the tokens of probability t or more."""
    step = Xtc(as_float(p, "p"), as_float(t, "t"), as_int(min_keep, "min_keep", 0), _seed(seed))
    return _new("xtc", step)


@returns(0)
def llama_sampler_init_top_n_sigma(n: float) -> int:
    """Keep tokens within n standard deviations of the best logit."""
    return _new("top-n-sigma", TopNSigma(as_float(n, "n")))


@returns(0)
def llama_sampler_init_mirostat(n_vocab: int, seed: int, tau: float, eta: float, m: int) -> int:
    """Choose so that the surprise stays near tau (version 1)."""
    step = Mirostat(
        as_float(tau, "tau"),
        as_float(eta, "eta"),
        _seed(seed),
        as_int(m, "m", 2),
        as_int(n_vocab, "n_vocab", 1),
    )
    return _new("mirostat", step)


@returns(0)
def llama_sampler_init_mirostat_v2(seed: int, tau: float, eta: float) -> int:
    """Choose so that the surprise stays near tau (version 2)."""
    return _new("mirostat-v2", MirostatV2(as_float(tau, "tau"), as_float(eta, "eta"), _seed(seed)))


@returns(0)
def llama_sampler_init_grammar(vocab: int, grammar_str: Any, grammar_root: Any) -> int:
    """Keep the tokens that continue a text of a GBNF grammar; 0 if the grammar is not valid.

    grammar_root must be "root". Needs the extra `grammar`.
    """
    engine = TABLE.get(vocab, Vocab).model.engine
    if as_text(grammar_root, "grammar_root") != "root":
        invalid(f"grammar_root is {grammar_root!r}, expected root")
    tokenizer = GrammarTokenizer(engine.tokenizer, engine.hp.n_vocab)
    text = gbnf_grammar(as_text(grammar_str, "grammar_str"), tokenizer)
    return _new("grammar", Grammar(text, tokenizer))


@returns(0)
def llama_sampler_init_penalties(
    penalty_last_n: int, penalty_repeat: float, penalty_freq: float, penalty_present: float
) -> int:
    """Penalise the tokens among the last penalty_last_n (-1: all, 0: off)."""
    step = Penalties(
        as_int(penalty_last_n, "penalty_last_n"),
        as_float(penalty_repeat, "penalty_repeat"),
        as_float(penalty_freq, "penalty_freq"),
        as_float(penalty_present, "penalty_present"),
    )
    return _new("penalties", step)


@returns(0)
def llama_sampler_init_dry(
    vocab: int,
    n_ctx_train: int,
    dry_multiplier: float,
    dry_base: float,
    dry_allowed_length: int,
    dry_penalty_last_n: int,
    seq_breakers: Any,
    num_breakers: int,
) -> int:
    """Penalise tokens that would extend a repetition; seq_breakers: texts that end one."""
    engine = TABLE.get(vocab, Vocab).model.engine
    as_int(n_ctx_train, "n_ctx_train", 0)
    n = as_int(num_breakers, "num_breakers", 0)
    if n and (not isinstance(seq_breakers, list | tuple) or len(seq_breakers) < n):
        invalid(f"seq_breakers is no list of {n} texts")
    texts = [as_text(text, "seq_breakers") for text in (seq_breakers or [])[:n]]
    tokenizer = engine.tokenizer
    pieces = [tokenizer.piece(i) for i in range(engine.hp.n_vocab)] if texts else []
    step = Dry(
        as_float(dry_multiplier, "dry_multiplier"),
        as_float(dry_base, "dry_base"),
        as_int(dry_allowed_length, "dry_allowed_length"),
        as_int(dry_penalty_last_n, "dry_penalty_last_n"),
        breaker_sequences(texts, pieces, lambda text: tokenizer.encode(text, add_special=False)),
    )
    return _new("dry", step)


@returns(0)
def llama_sampler_init_logit_bias(n_vocab: int, n_logit_bias: int, logit_bias: Any) -> int:
    """Add biases to the logits of tokens; logit_bias: a list of llama_logit_bias."""
    n, n_vocab = as_int(n_logit_bias, "n_logit_bias", 0), as_int(n_vocab, "n_vocab", 1)
    if n and (not isinstance(logit_bias, list | tuple) or len(logit_bias) < n):
        invalid(f"logit_bias is no list of {n} llama_logit_bias")
    found = {}
    for entry in (logit_bias or [])[:n]:
        if not isinstance(entry, llama_logit_bias):
            invalid(f"logit_bias has {entry!r}, expected llama_logit_bias")
        found[as_int(entry.token, "token", 0, n_vocab - 1)] = entry.bias
    return _new("logit-bias", LogitBias(found))


@returns(LLAMA_DEFAULT_SEED)
def llama_sampler_get_seed(smpl: int) -> int:
    """The seed in use, including one that was drawn; LLAMA_DEFAULT_SEED if there is none."""
    seeds = [step.seed for step in TABLE.get(smpl, Sampler).steps() if hasattr(step, "seed")]
    return int(seeds[-1]) if seeds else LLAMA_DEFAULT_SEED


@returns()
def llama_sampler_accept(smpl: int, token: int) -> int:
    """Enter a token into the history."""
    sampler = TABLE.get(smpl, Sampler)
    with sampler.lock:
        sampler.accept(as_int(token, "token", 0))
    return LLAMA_OK


@returns()
def llama_sampler_apply(smpl: int, cur_p: llama_token_data_array) -> int:
    """Apply a sampler to candidates: changes data, size, sorted, and selected if a step chooses."""
    sampler = TABLE.get(smpl, Sampler)
    if not isinstance(cur_p, llama_token_data_array):
        invalid(f"cur_p is {cur_p!r}, expected llama_token_data_array")
    data = as_array(cur_p.data, TOKEN_DATA, "cur_p.data", as_int(cur_p.size, "cur_p.size", 1))
    with sampler.lock:
        before = Candidates(data["id"].copy(), data["logit"].copy(), bool(cur_p.sorted))
        c, chosen = sampler.apply(before)
    out = np.zeros(len(c), TOKEN_DATA)
    out["id"], out["logit"], out["p"] = c.ids, c.logits, c.probs()
    cur_p.data, cur_p.size, cur_p.sorted = out, len(out), c.sorted
    cur_p.selected = 0 if chosen else -1
    return LLAMA_OK


@returns()
def llama_sampler_reset(smpl: int) -> int:
    """Clear the history and reseed the random numbers."""
    sampler = TABLE.get(smpl, Sampler)
    with sampler.lock:
        for step in sampler.steps():
            step.reset()
    return LLAMA_OK


@returns(0)
def llama_sampler_clone(smpl: int) -> int:
    """An independent sampler in the same state."""
    sampler = TABLE.get(smpl, Sampler)
    with sampler.lock:
        return TABLE.add(sampler.clone())


@returns()
def llama_sampler_copy(src: int, dst: int) -> int:
    """Copy a sampler's state to another sampler of the same steps."""
    source, target = TABLE.get(src, Sampler), TABLE.get(dst, Sampler)
    if [type(step) for step in source.steps()] != [type(step) for step in target.steps()]:
        invalid("the samplers do not have the same steps")
    with source.lock:
        found = source.clone()
    with target.lock:
        target.step, target.parts = found.step, found.parts
    return LLAMA_OK


@returns()
def llama_sampler_free(smpl: int) -> int:
    """Free a sampler; a chain is freed with all samplers that it owns."""
    TABLE.remove(smpl, Sampler)
    return LLAMA_OK


@returns(LLAMA_TOKEN_NULL)
def llama_sampler_sample(smpl: int, ctx: int, idx: int) -> int:
    """Sample a token from the logits of output idx (see llama_get_logits_ith), and accept it.

    Returns LLAMA_TOKEN_NULL if the last step does not choose, or there are no logits.
    """
    sampler, begin = TABLE.get(smpl, Sampler), time.perf_counter()
    with using(ctx) as context, sampler.lock:
        logits = _ith(context.logits, idx, "logits")
        if not np.isfinite(logits.max()):
            invalid(f"the logits of output {idx} are not finite: the model file is damaged")
        c, chosen = sampler.apply(Candidates(np.arange(len(logits), dtype=np.int32), logits))
        if not chosen:
            invalid(f"the last step of {sampler.name} does not choose: add greedy or dist")
        sampler.accept(int(c.ids[0]))
        sampler.t_sample_ms += (time.perf_counter() - begin) * 1e3
        sampler.n_sample += 1
        return int(c.ids[0])


@returns(None)
def llama_perf_sampler(chain: int) -> llama_perf_sampler_data | None:
    """Time and number of samples; None for no chain."""
    sampler = TABLE.get(chain, Sampler)
    return llama_perf_sampler_data(sampler.t_sample_ms, sampler.n_sample)


@returns()
def llama_perf_sampler_reset(chain: int) -> int:
    """Count from zero."""
    sampler = TABLE.get(chain, Sampler)
    sampler.t_sample_ms, sampler.n_sample = 0.0, 0
    return LLAMA_OK


@returns()
def llama_perf_sampler_print(chain: int) -> int:
    """Write time and number of samples to the log."""
    sampler = TABLE.get(chain, Sampler)
    say(GGML_LOG_LEVEL_INFO, f"sampled {sampler.n_sample} tokens in {sampler.t_sample_ms:.1f} ms")
    return LLAMA_OK
