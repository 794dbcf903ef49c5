"""A model, a context, a batch and a sampler as objects, for programs that use llama_cpp's."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from llama_cpp import llama_cpp as api
from llama_cpp.llama_grammar import LlamaGrammar


class LlamaModel:
    """The model of a file. Raises ValueError if it cannot be loaded."""

    def __init__(self, *, path_model: str, params: Any, verbose: bool = True) -> None:
        self.model = api.llama_model_load_from_file(path_model, params)
        if not self.model:
            raise ValueError(api.tamis_last_error()[1].decode())
        self.vocab = api.llama_model_get_vocab(self.model)
        self._contexts: list[LlamaContext] = []

    def close(self) -> None:
        """Free the model and its contexts."""
        for context in self._contexts:
            context.close()
        if self.model:
            api.llama_model_free(self.model)
        self.model = self.vocab = None

    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return api.llama_vocab_n_tokens(self.vocab)

    def n_ctx_train(self) -> int:
        """The context length that the model was trained with, in tokens."""
        return api.llama_model_n_ctx_train(self.model)

    def n_embd(self) -> int:
        """Width of the model."""
        return api.llama_model_n_embd(self.model)

    def token_bos(self) -> int:
        """The token that begins a text."""
        return api.llama_vocab_bos(self.vocab)

    def token_eos(self) -> int:
        """The token that ends a text."""
        return api.llama_vocab_eos(self.vocab)

    def tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
        """Token ids of a text in UTF-8."""
        n = len(text) + 8
        out = np.zeros(n, np.int32)
        found = api.llama_tokenize(self.vocab, text, len(text), out, n, add_bos, special)
        return out[:found].tolist()

    def token_to_piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of a token."""
        out = bytearray(256)
        return bytes(out[: api.llama_token_to_piece(self.vocab, token, out, 256, 0, special)])

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> bytes:
        """The bytes of tokens, as one text."""
        found = b"".join(self.token_to_piece(token, special) for token in tokens)
        leading = len(tokens) > 0 and tokens[0] == self.token_bos()
        return found.removeprefix(b" ") if leading else found

    @staticmethod
    def default_params() -> Any:
        """The default parameters for loading a model."""
        return api.llama_model_default_params()


class LlamaContext:
    """A context of a model, closed with it. Raises ValueError if it cannot be made."""

    def __init__(self, *, model: LlamaModel, params: Any, verbose: bool = True) -> None:
        self.ctx = api.llama_init_from_model(model.model, params)
        if not self.ctx:
            raise ValueError(api.tamis_last_error()[1].decode())
        self.memory = api.llama_get_memory(self.ctx)
        model._contexts.append(self)

    def close(self) -> None:
        """Free the context."""
        if self.ctx:
            api.llama_free(self.ctx)
        self.ctx = None

    def n_ctx(self) -> int:
        """The context length in tokens."""
        return api.llama_n_ctx(self.ctx)

    def decode(self, batch: "LlamaBatch") -> None:
        """Run a batch. Raises RuntimeError if it fails."""
        code = api.llama_decode(self.ctx, batch.batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code}: {api.tamis_last_error()[1].decode()}")

    def kv_cache_clear(self) -> None:
        """Clear all sequences."""
        api.llama_memory_clear(self.memory, True)

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove positions of a sequence."""
        return api.llama_memory_seq_rm(self.memory, seq_id, p0, p1)

    def get_logits_ith(self, i: int) -> Any:
        """The logits of output i."""
        return api.llama_get_logits_ith(self.ctx, i)

    @staticmethod
    def default_params() -> Any:
        """The default parameters of a context."""
        return api.llama_context_default_params()


class LlamaBatch:
    """Tokens to decode."""

    def __init__(self, *, n_tokens: int, embd: int, n_seq_max: int, verbose: bool = True) -> None:
        self.batch = api.llama_batch_init(n_tokens, embd, n_seq_max)

    def n_tokens(self) -> int:
        """The number of tokens in it."""
        return self.batch.n_tokens

    def reset(self) -> None:
        """Remove all tokens."""
        self.batch.n_tokens = 0

    def set_batch(self, batch: Sequence[int], n_past: int, logits_all: bool) -> None:
        """Fill it with tokens of sequence 0 from position n_past on.

        The logits of the last token are wanted, or of all.
        """
        self.reset()
        self.add_sequence(batch, 0, logits_all, n_past)

    def add_sequence(
        self, batch: Sequence[int], seq_id: int, logits_all: bool, n_past: int = 0
    ) -> None:
        """Append tokens of a sequence from position n_past on.

        The logits of the last token are wanted, or of all.
        """
        b, first = self.batch, self.batch.n_tokens
        rows = slice(first, first + len(batch))
        b.token[rows], b.pos[rows] = batch, n_past + np.arange(len(batch))
        b.seq_id[rows, 0], b.n_seq_id[rows], b.logits[rows] = seq_id, 1, logits_all
        b.n_tokens = rows.stop
        b.logits[rows.stop - 1] = 1

    def close(self) -> None:
        """Free the batch."""
        api.llama_batch_free(self.batch)


class LlamaSampler:
    """A chain of samplers."""

    def __init__(self) -> None:
        self.sampler = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())

    def _add(self, sampler: int) -> None:
        if not sampler:
            raise ValueError(api.tamis_last_error()[1].decode())
        api.llama_sampler_chain_add(self.sampler, sampler)

    def add_greedy(self) -> None:
        """Add a step that chooses the largest logit."""
        self._add(api.llama_sampler_init_greedy())

    def add_dist(self, seed: int) -> None:
        """Add a step that samples by probability."""
        self._add(api.llama_sampler_init_dist(seed))

    def add_top_k(self, k: int) -> None:
        """Add a step that keeps the k best tokens."""
        self._add(api.llama_sampler_init_top_k(k))

    def add_top_p(self, p: float, min_keep: int = 1) -> None:
        """Add a step that keeps the likeliest tokens whose probabilities sum to p."""
        self._add(api.llama_sampler_init_top_p(p, min_keep))

    def add_min_p(self, p: float, min_keep: int = 1) -> None:
        """Add a step that keeps tokens of at least p times the highest probability."""
        self._add(api.llama_sampler_init_min_p(p, min_keep))

    def add_typical(self, p: float, min_keep: int = 1) -> None:
        """Add a step that keeps the most typical tokens whose probabilities sum to p."""
        self._add(api.llama_sampler_init_typical(p, min_keep))

    def add_temp(self, temp: float) -> None:
        """Add a step that divides logits by a temperature."""
        self._add(api.llama_sampler_init_temp(temp))

    def add_grammar(self, model: LlamaModel, grammar: LlamaGrammar) -> None:
        """Add a step that keeps the tokens a grammar allows."""
        self._add(api.llama_sampler_init_grammar(model.vocab, grammar._grammar, "root"))

    def add_penalties(self, last_n: int, repeat: float, freq: float, present: float) -> None:
        """Add a step that penalises the last tokens."""
        self._add(api.llama_sampler_init_penalties(last_n, repeat, freq, present))

    def add_logit_bias(self, n_vocab: int, logit_bias: Mapping[int, float]) -> None:
        """Add a step that adds biases to logits."""
        biases = [api.llama_logit_bias(token, bias) for token, bias in logit_bias.items()]
        self._add(api.llama_sampler_init_logit_bias(n_vocab, len(biases), biases))

    def sample(self, ctx: LlamaContext, idx: int = -1) -> int:
        """Sample a token from the logits of output idx."""
        return api.llama_sampler_sample(self.sampler, ctx.ctx, idx)

    def accept(self, token: int) -> None:
        """Enter a token into the history."""
        api.llama_sampler_accept(self.sampler, token)

    def reset(self) -> None:
        """Clear the history."""
        api.llama_sampler_reset(self.sampler)

    def close(self) -> None:
        """Free the sampler."""
        api.llama_sampler_free(self.sampler)
