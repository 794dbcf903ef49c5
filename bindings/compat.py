"""class Llama: llama_cpp.Llama's constructor, methods, defaults and results over a tamis engine.

Arguments that mean nothing here are taken and warned about by name; LlamaGrammar, the caches and
the lists of processors and criteria are llama_cpp's too. One Llama holds one sequence: calls that
give a whole answer wait for each other, and a stream that another call overtakes ends with an
error.
"""

import contextlib
import os
import random
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Self, Unpack, overload

import numpy as np

from tamis.bindings.drop_in import chat, completion, formatters, pictures
from tamis.bindings.drop_in.answers import (
    CreateChatCompletionResponse,
    CreateChatCompletionStreamResponse,
    CreateCompletionResponse,
    CreateEmbeddingResponse,
)
from tamis.bindings.drop_in.arguments import (
    NoSession,
    as_text,
    file_of,
    kv_type,
    load_engine,
    lora_of,
    sampling_of,
    warn_without_effect,
)
from tamis.bindings.drop_in.caches import (
    BaseLlamaCache,
    LlamaCache,
    LlamaDiskCache,
    LlamaRAMCache,
    LlamaState,
    longest_token_prefix,
)
from tamis.bindings.drop_in.completion import Answer, Chunk, Request
from tamis.bindings.drop_in.drafting import (
    LlamaAttentionDrafting,
    LlamaDraftModel,
    LlamaModelDrafting,
    LlamaPromptLookupDecoding,
)
from tamis.bindings.drop_in.grammar import LlamaGrammar
from tamis.bindings.drop_in.options import ChatOptions, CompletionOptions
from tamis.bindings.drop_in.sampling import (
    LogitsProcessorList,
    MinTokensLogitsProcessor,
    Sampling,
    StoppingCriteriaList,
)
from tamis.bindings.drop_in.tokenizer import BaseLlamaTokenizer, LlamaTokenizer
from tamis.bindings.flat.context import Context, flat_handles
from tamis.bindings.flat.facts import llama_model_is_hybrid, llama_model_is_recurrent
from tamis.bindings.flat.handles import TABLE
from tamis.bindings.flat.model import VocabOnly, llama_model_get_vocab
from tamis.bindings.flat.params import LLAMA_DEFAULT_SEED, llama_context_params
from tamis.bindings.flat.state import load_session, session_bytes
from tamis.engine.checks import typed
from tamis.engine.engine import Engine
from tamis.engine.errors import ContextError
from tamis.engine.session_file import SessionFileError
from tamis.fetch import registry as models
from tamis.model.heads import POOLINGS
from tamis.sampling.chain import Sampler
from tamis.sampling.vocabulary import GrammarTokenizer
from tamis.text.thinking import ThinkingBudget
from tamis.vision.held import whole_pictures

__all__ = [
    "BaseLlamaCache",
    "Llama",
    "LlamaAttentionDrafting",
    "LlamaCache",
    "LlamaDiskCache",
    "LlamaDraftModel",
    "LlamaGrammar",
    "LlamaModelDrafting",
    "LlamaPromptLookupDecoding",
    "LlamaRAMCache",
    "LlamaState",
    "LlamaTokenizer",
    "LogitsProcessorList",
    "MinTokensLogitsProcessor",
    "StoppingCriteriaList",
]


class Llama:
    """A model and one sequence, with llama_cpp.Llama's interface.

    These arguments are tamis's own. attn and prefill: the methods of decode steps and of prompts,
    as `tamis methods` writes them (attn="auto" is dense up to 12,288 tokens; with draft_model it
    equals prefill). min_mass: the share of attention that each head is to retain, see
    Engine.session. precision: "fast" or "exact", for the activations of a prompt on the CPU, see
    Engine.load.

    n_gpu_layers and offload_kqv are llama.cpp's, for the first CUDA device. type_k, type_v: ggml's
    numbers of f16 (1) and q8_0 (8). logprobs need no logits_all, but echo with logprobs does.
    Raises FileNotFoundError, GGUFError, ArchError, TokenizerError, ValueError, MemoryError.
    """

    @typed
    def __init__(
        self,
        model_path: str,
        *,
        n_gpu_layers: int = 0,
        split_mode: int = 1,
        main_gpu: int = 0,
        tensor_split: list[float] | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: dict[str, bool | int | float | str] | None = None,
        seed: int = LLAMA_DEFAULT_SEED,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | None = -1,
        pooling_type: int = -1,
        attention_type: int = -1,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0,
        yarn_beta_slow: float = 1.0,
        yarn_orig_ctx: int = 0,
        logits_all: bool = False,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool = False,
        op_offload: bool | None = None,
        swa_full: bool | None = None,
        no_perf: bool = False,
        last_n_tokens_size: int = 64,
        lora_base: str | None = None,
        lora_scale: float = 1.0,
        lora_path: str | None = None,
        numa: bool | int = False,
        chat_format: str | None = None,
        chat_handler: Any = None,
        draft_model: LlamaDraftModel | None = None,
        tokenizer: Any = None,
        type_k: int | None = None,
        type_v: int | None = None,
        spm_infill: bool = False,
        verbose: bool = True,
        attn: str = "auto",
        prefill: str = "dense",
        min_mass: float | None = None,
        precision: Literal["fast", "exact"] = "fast",
        **kwargs: Any,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "kwargs", "__class__")}
        warn_without_effect(given, kwargs)
        self._given = given  # what pickle keeps
        self.model_path, self.verbose = model_path, verbose
        self.n_batch, self.last_n_tokens_size = n_batch, last_n_tokens_size
        self.draft_model, self.spm_infill = draft_model, spm_infill
        self.chat_format, self.chat_handler = chat_format, chat_handler
        self.cache: BaseLlamaCache | None = None
        self._seed, self._logits_all, self._embedding = seed, logits_all, embedding
        self._lock = threading.RLock()
        _living.add(self)
        self._engine: Any = None
        self._session: Any = None
        if vocab_only:
            self._engine, self._session = VocabOnly(model_path), NoSession()
        else:
            self._engine = load_engine(
                model_path,
                n_threads,
                n_gpu_layers,
                offload_kqv=offload_kqv,
                precision=precision,
                mmproj=getattr(chat_handler, "clip_model_path", None),
            )
        self._n_ctx = n_ctx or self._engine.hp.n_ctx_train
        if draft_model is not None and attn == "auto":
            attn = prefill
        if draft_model is not None and attn != prefill:
            raise ValueError("draft_model needs one method: drafts are checked as prompts are")
        self._drafts_by_attention = isinstance(draft_model, LlamaAttentionDrafting)
        if isinstance(draft_model, LlamaAttentionDrafting):
            attn = draft_model.attn
        if not vocab_only:
            self._session = self._engine.session(
                n_ctx=self._n_ctx,
                n_ubatch=self._ubatch(min(n_ubatch, n_batch, self._n_ctx)),
                attn=attn,
                prefill=prefill,
                min_mass=min_mass,
                type_k=kv_type(type_k, "type_k"),
                type_v=kv_type(type_v, "type_v"),
                adapters=lora_of(lora_path, lora_scale),
            )
        if isinstance(draft_model, LlamaModelDrafting):
            draft_model.open_for(self._engine, self._n_ctx)
        if isinstance(draft_model, LlamaAttentionDrafting) and not vocab_only:
            draft_model.open_for(self._session)
        heads = None if vocab_only else self._engine.model.heads
        self._pooling = "none" if heads is None else heads.numbered(pooling_type)
        self._format: chat.ChatFormat | None = None
        if chat_format is not None and formatters.registered(chat_format) is None:
            self._format = chat.ChatFormat(self._engine, chat_format)
        self._grammar_tokenizer: GrammarTokenizer | None = None
        self._scores = np.zeros((self._n_ctx if logits_all else 0, self.n_vocab()), np.float32)
        self._row: np.ndarray | None = None  # the logits of the last token
        # in the KV cache, but not yet in the text
        self._ahead: deque[tuple[int, np.ndarray]] = deque()
        self._turn = 0
        self.tokenizer_ = tokenizer or LlamaTokenizer(self)
        self._handles: tuple[int, int] | None = None  # of the flat API: (model, context)
        self.metadata = {key: as_text(value) for key, value in self._engine.metadata.items()}

    def _ubatch(self, n: int) -> int:
        """Tokens of a chunk: at least those of a picture whose rows see each other."""
        encoder = self._engine.encoder
        return n if encoder is None else max(n, encoder.least_ubatch)

    # --- what it is ------------------------------------------------------------------------------

    def n_ctx(self) -> int:
        """Tokens of context."""
        return self._n_ctx

    def n_embd(self) -> int:
        """Width of the model."""
        return self._engine.hp.n_embd

    def n_vocab(self) -> int:
        """Tokens of the vocabulary."""
        return self._engine.hp.n_vocab

    def token_eos(self) -> int:
        """The token that ends a text, -1 for none."""
        return _id(self._engine.vocab.eos)

    def token_bos(self) -> int:
        """The token that begins a text, -1 for none."""
        return _id(self._engine.vocab.bos)

    def token_nl(self) -> int:
        """The token of a line feed."""
        return _id(next(iter(self._engine.tokenizer.encode("\n", add_special=False)), None))

    def tokenizer(self) -> BaseLlamaTokenizer:
        """Its tokenizer as an object."""
        return self.tokenizer_

    def token_cls(self) -> int:
        """The token that begins a text for a classifier, -1 for none."""
        return self.token_bos()

    def token_sep(self) -> int:
        """The token that separates texts, -1 for none."""
        return _id(self._engine.vocab.sep)

    def token_eot(self) -> int:
        """The token that ends a turn, -1 for none."""
        return _id(self._engine.vocab.eot)

    def token_prefix(self) -> int:
        """The token that marks the text before a gap, -1 for none."""
        return _id(self._engine.vocab.fim.get("pre"))

    def token_middle(self) -> int:
        """The token that marks the text that fills a gap, -1 for none."""
        return _id(self._engine.vocab.fim.get("mid"))

    def token_suffix(self) -> int:
        """The token that marks the text after a gap, -1 for none."""
        return _id(self._engine.vocab.fim.get("suf"))

    def pooling_type(self) -> int:
        """llama.h's number of the pooling that makes one embedding of a text's rows."""
        return POOLINGS.index(self._pooling)

    @property
    def engine(self) -> Engine:
        """The engine that runs the model, for what llama_cpp has no name for."""
        return self._engine

    @property
    def model(self) -> int:
        """A handle of the model, for functions of llama.h."""
        return self._flat()[0]

    @property
    def ctx(self) -> int:
        """A handle of the context, for functions of llama.h; sequence 0 is this Llama's text."""
        return self._flat()[1]

    def _flat(self) -> tuple[int, int]:
        with self._lock:
            if self._handles is None:
                self._handles = flat_handles(self._engine, self._session, self.context_params)
            self._show_logits()
            return self._handles

    def _show_logits(self) -> None:
        """Make llama_get_logits return the logits of the last token."""
        if self._handles is not None and self._row is not None:
            TABLE.get(self._handles[1], Context).logits = {self.n_tokens - 1: self._row}

    @property
    def context_params(self) -> llama_context_params:
        """The parameters of the context, as the flat API reports them."""
        n_ubatch = min(self._given["n_ubatch"], self.n_batch, self._n_ctx)
        return llama_context_params(n_ctx=self._n_ctx, n_batch=self.n_batch, n_ubatch=n_ubatch)

    # Private names of llama_cpp's that programs read nevertheless.

    @property
    def _ctx(self) -> SimpleNamespace:
        return SimpleNamespace(ctx=self.ctx)

    @property
    def _model(self) -> SimpleNamespace:
        return SimpleNamespace(model=self.model, vocab=llama_model_get_vocab(self.model))

    @property
    def _is_recurrent(self) -> bool:
        return llama_model_is_recurrent(self.model)

    @property
    def _is_hybrid(self) -> bool:
        return llama_model_is_hybrid(self.model)

    @property
    def n_tokens(self) -> int:
        """Tokens of the text so far."""
        return self._session.n_past - len(self._ahead)

    @n_tokens.setter
    def n_tokens(self, n: int) -> None:
        self._drop_ahead()
        if n != self.n_tokens:
            self._session.truncate(n)
            self._row = None  # its token was removed

    @property
    def input_ids(self) -> np.ndarray:
        """Tokens of the text so far, int32 [n_tokens]."""
        return np.array(self._session.tokens[: self.n_tokens], np.int32)

    @property
    def eval_tokens(self) -> deque[int]:
        """Tokens of the text so far."""
        return deque(self.input_ids.tolist(), maxlen=self._n_ctx)

    @property
    def scores(self) -> np.ndarray:
        """Logits f32 [n, n_vocab]: of all positions with logits_all, else of the last token."""
        if self._logits_all:
            return self._scores
        return np.empty((0, self.n_vocab())) if self._row is None else self._row[None]

    @property
    def eval_logits(self) -> deque[list[float]]:
        """Logits of the text so far: of all tokens with logits_all, else of the last."""
        rows = self._scores[: self.n_tokens] if self._logits_all else self.scores
        return deque(rows.tolist(), maxlen=self._n_ctx if self._logits_all else 1)

    @typed
    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of a text in UTF-8; special: control tokens written out in it are read."""
        decoded = text.decode("utf-8", "replace")
        return self._engine.tokenizer.encode(decoded, add_special=add_bos, parse_special=special)

    @typed
    def detokenize(
        self,
        tokens: Sequence[int],
        prev_tokens: Sequence[int] | None = None,
        special: bool = False,
    ) -> bytes:
        """The bytes of tokens; without prev_tokens, a space that follows a leading BOS is cut."""
        piece = self._engine.tokenizer.piece
        out = b"".join(piece(int(token), special=special) for token in tokens)
        first_is_bos = prev_tokens is None and len(tokens) > 0 and tokens[0] == self.token_bos()
        return out.removeprefix(b" ") if first_is_bos else out

    @typed
    def set_cache(self, cache: BaseLlamaCache | None) -> None:
        """Use `cache` for the states of completions: later ones begin from them."""
        self.cache = cache

    @typed
    def set_seed(self, seed: int) -> None:
        """Set the seed from which later calls draw theirs if they name none."""
        self._seed = seed

    # --- tokens ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop the text."""
        with self._lock:
            self.n_tokens = 0

    @typed
    def eval(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text.

        Many tokens run in chunks of n_ubatch; Ctrl-C stops them. Raises ContextError, ValueError;
        the text is then unchanged.
        """
        with self._lock:
            self._drop_ahead()
            if len(tokens):
                self._append(list(map(int, tokens)), last_only=True)

    def _append(self, tokens: list[int], *, last_only: bool) -> np.ndarray:
        """Append tokens.

        Returns the logits of all f32 [n, n_vocab], or of the last one [1, n_vocab].
        """
        first = self._session.n_past
        if len(tokens) == 1 and first and not self._drafts_by_attention:
            rows = self._session.decode(tokens[0])[None]
        elif last_only and not self._logits_all:
            rows = self._session.prefill(tokens)[None]
        else:
            rows = np.concatenate(list(self._session.logits(tokens)))
        if self._logits_all:
            self._scores[first : first + len(tokens)] = rows
        self._row = rows[-1]
        self._show_logits()
        return rows

    def _begin_anew(self) -> None:
        """Drop the text that another thread was changing when the process forked."""
        self._turn += 1
        self._ahead.clear()
        self._row = None
        self._session.truncate(0)

    def _drop_ahead(self) -> None:
        n_past, n_ahead = self._session.n_past, len(self._ahead)
        self._ahead.clear()
        if n_ahead:
            self._session.truncate(n_past - n_ahead)

    @typed
    def sample(
        self,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_eta: float = 0.1,
        mirostat_tau: float = 5.0,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        idx: int | None = None,
    ) -> int:
        """Sample a token from the logits of the last token, or of position idx with logits_all."""
        given = locals()
        if idx is None or idx in (-1, self.n_tokens - 1):
            row = self._last_row()
        elif self._logits_all:
            row = self._scores[idx]
        else:
            raise ValueError(f"idx is {idx}: logits of earlier tokens need logits_all=True")
        held = self.input_ids if idx is None or idx < 0 else self.input_ids[: idx + 1]
        return self._sampler(sampling_of(given), held.tolist()).sample(row)

    def _last_row(self) -> np.ndarray:
        if self._row is None:
            raise ValueError("there are no logits: call eval first")
        return self._row

    @typed
    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        grammar: LlamaGrammar | None = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield the tokens that follow a prompt, without end; the caller stops.

        reset: the prompt replaces the text, and their common prefix is not computed again. Tokens
        that the caller sends in follow the one just yielded.
        """
        prompt = list(map(int, tokens))
        held = [] if reset else self.input_ids.tolist()
        sampler = self._sampler(sampling_of(locals()), held + prompt)
        return self._generate(prompt, sampler, stopping_criteria, reset=reset, rows=[])

    def _generate(
        self,
        prompt: list[int],
        sampler: Sampler,
        criteria: StoppingCriteriaList | None,
        *,
        reset: bool,
        rows: list[np.ndarray],
        budget: ThinkingBudget | None = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens as `generate` does.

        `rows` receives the logits that each one was chosen from.
        """
        with self._lock:
            self._turn += 1
            turn = self._turn
            row = self._begin(prompt, reset=reset)
        forced = deque(budget.begin() if budget is not None else ())
        while True:
            token = forced.popleft() if forced else sampler.sample(row)
            if budget is not None:
                forced.extend(budget.accept(token))
            if criteria is not None and criteria(self.input_ids, row):
                return
            sampler.accept(token)
            rows[:] = [row]
            sent = yield token
            with self._lock:
                if turn != self._turn:
                    raise RuntimeError(
                        "another call on this Llama has taken over its context: read a stream to "
                        "its end first, or give each answer an Engine.session of its own"
                    )
                sampler.read(sent or ())
                row = self._follow(token, list(sent or ()))

    def _begin(self, prompt: list[int], *, reset: bool) -> np.ndarray:
        """Replace the text with the prompt, or append it; returns the logits of its last token."""
        self._drop_ahead()
        if reset:
            # The last token runs again: its logits are needed.
            n = min(longest_token_prefix(self._session.tokens, prompt), len(prompt) - 1)
            n = whole_pictures(prompt, n)
            self.n_tokens = max(n, 0)
            prompt = prompt[n:]
        elif not prompt:  # resume after the tokens that eval appended
            return self._last_row()
        return self._append(prompt, last_only=True)[-1]

    def _follow(self, token: int, sent: list[int]) -> np.ndarray:
        """Append a chosen token and those sent in; returns the logits of the last one."""
        if not sent and self._ahead and self._ahead[0][0] == token:
            self._row = row = self._ahead.popleft()[1]
            return row
        self._drop_ahead()
        tokens = [token, *sent]
        draft = self._draft(tokens)
        rows = self._append(tokens + draft, last_only=not draft)
        self._ahead.extend(zip(draft, rows[len(tokens) :], strict=True))
        self._row = row = rows[len(tokens) - 1] if draft else rows[-1]
        return row

    def _draft(self, tokens: list[int]) -> list[int]:
        if self.draft_model is None:
            return []
        text = np.array(self._session.tokens + tokens, np.int32)
        room = min(self._n_ctx - len(text), self._session.n_ubatch - len(tokens))
        return [int(i) for i in self.draft_model(text)[: max(room, 0)]]

    def _sampler(self, sampling: Sampling, held: Sequence[int], seed: int | None = None) -> Sampler:
        """A sampler whose history is the tokens before the answer."""
        seed = self._seed if seed is None else seed
        grammar = sampling.grammar
        return sampling.sampler(
            self.n_vocab(),
            seed=seed,
            last_n=self.last_n_tokens_size,
            ids=lambda: self.input_ids,
            grammar=None if grammar is None else grammar.step(self._tokenizer_of_grammars()),
            prompt=[i for i in held if i >= 0],  # others stand for pictures
        )

    def _tokenizer_of_grammars(self) -> GrammarTokenizer:
        if self._grammar_tokenizer is None:
            self._grammar_tokenizer = GrammarTokenizer(self._engine.tokenizer, self.n_vocab())
        return self._grammar_tokenizer

    # --- completions -----------------------------------------------------------------------------

    @overload
    def create_completion(
        self,
        prompt: str | list[int],
        *,
        stream: Literal[False] = False,
        **options: Unpack[CompletionOptions],
    ) -> CreateCompletionResponse: ...

    @overload
    def create_completion(
        self,
        prompt: str | list[int],
        *,
        stream: Literal[True],
        **options: Unpack[CompletionOptions],
    ) -> Iterator[CreateCompletionResponse]: ...

    @typed
    def create_completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006 - llama_cpp's default, never written to
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: dict[int, float] | None = None,
    ) -> Any:
        """Complete a text: a completion of OpenAI's API, or its chunks with stream=True.

        max_tokens None or below 1: up to the end of the context. suffix: the text after the gap,
        for models with tokens for gaps. Raises ValueError for a prompt that does not fit,
        SamplerError for parameters out of range.
        """
        sampling, ids = sampling_of(locals()), self._prompt(prompt, suffix)
        room = self._n_ctx - len(ids)
        if echo and logprobs is not None and not self._logits_all:
            raise ValueError("echo with logprobs needs a Llama with logits_all=True")
        text = prompt if isinstance(prompt, str) else self._decode(prompt)
        request = Request(
            prompt=ids,
            max_tokens=min(max_tokens, room) if max_tokens and max_tokens > 0 else room,
            model=self.model_path if model is None else model,
            stop=tuple(s for s in ([stop] if isinstance(stop, str) else stop or ()) if s),
            logprobs=logprobs,
            echo=text if echo else None,
            offset=0 if echo else len(text),
        )
        sampler = self._sampler(sampling, ids, seed if seed is not None else self._drawn_seed())
        return self._answer(request, sampler, stopping_criteria, stream=stream)

    __call__ = create_completion

    def _drawn_seed(self) -> int:
        """A new seed for a call that names none; all of them follow from the constructor's seed."""
        # -1 has these bits, too: the sampler draws its own
        if self._seed & 0xFFFFFFFF != LLAMA_DEFAULT_SEED:
            self._seed = random.Random(self._seed).randint(0, 0xFFFFFFFE)
        return self._seed

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.detokenize(tokens, special=True).decode("utf-8", "replace")

    def _prompt(self, prompt: str | Sequence[int], suffix: str | None) -> list[int]:
        """The tokens of a prompt. Raises ValueError where they do not fit."""
        tokenizer, vocab = self._engine.tokenizer, self._engine.vocab
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt, add_special=False, parse_special=suffix is None)
        else:
            ids = [int(i) for i in prompt]
        if suffix is not None:
            if not {"pre", "suf", "mid"} <= vocab.fim.keys():
                raise ValueError("suffix needs a model with tokens for filling gaps: leave it out")
            before = [vocab.fim["pre"], *ids]
            after = [vocab.fim["suf"], *tokenizer.encode(suffix, add_special=False)]
            ids = [*after, *before] if self.spm_infill else [*before, *after]
            ids.append(vocab.fim["mid"])
        if isinstance(prompt, str) or suffix is not None:
            bos, eos = tokenizer.bos, tokenizer.eos
            ids = [bos, *ids] if tokenizer.add_bos and bos is not None else ids
            ids = [*ids, eos] if tokenizer.add_eos and eos is not None else ids
        if not ids and vocab.bos is not None:
            ids = [vocab.bos]
        if len(ids) >= self._n_ctx:
            raise ValueError(
                f"Requested tokens ({len(ids)}) exceed context window of {self._n_ctx}: "
                "raise n_ctx or shorten the prompt"
            )
        return ids

    def _answer(
        self,
        request: Request,
        sampler: Sampler,
        criteria: StoppingCriteriaList | None,
        *,
        stream: bool,
    ) -> Chunk | Iterator[Chunk]:
        answer = Answer(request, self._engine.tokenizer, sampler)
        pieces = self._pieces(request, sampler, criteria, answer)
        if stream:
            return completion.chunks(request, pieces)
        with self._lock:
            found = list(pieces)
            if request.echo is not None and request.logprobs is not None:
                answer.prompt_rows = self._scores[: len(request.prompt)]
            tokens = answer.prompt_tokens()
            return self._weighed(completion.whole(request, found, answer.n_completion, tokens))

    def _weighed(self, chunk: Chunk) -> Chunk:
        """A chunk whose usage has the estimated retained attention mass, if it is measured."""
        if self._session.mass is not None:
            chunk["usage"]["attention"] = self._session.mass.rounded()
        return chunk

    def _pieces(
        self,
        request: Request,
        sampler: Sampler,
        criteria: StoppingCriteriaList | None,
        answer: Answer | None = None,
    ) -> Iterator[completion.Piece]:
        rows: list[np.ndarray] = []
        budget = None if request.budget is None else request.budget.watch()
        tokens = self._generate(
            request.prompt, sampler, criteria, reset=True, rows=rows, budget=budget
        )
        answer = answer or Answer(request, self._engine.tokenizer, sampler)
        return self._cached(request, answer, answer.pieces(tokens, rows))

    def _cached(
        self, request: Request, answer: Answer, pieces: Iterator[completion.Piece]
    ) -> Iterator[completion.Piece]:
        """Yield the pieces, resuming from the cache's state if that helps.

        Save the state at the end.
        """
        if self.cache is not None:
            self._recall(self.cache, request.prompt)
        yield from pieces
        if self.cache is not None:
            self.cache[request.prompt + answer.tokens] = self.save_state()

    def _recall(self, cache: BaseLlamaCache, prompt: list[int]) -> None:
        try:
            state = cache[prompt]
        except KeyError:
            return
        held = longest_token_prefix(self.input_ids.tolist(), prompt)
        if longest_token_prefix(state.input_ids.tolist(), prompt) > held:
            # A state that is damaged or of another model counts as none.
            with contextlib.suppress(SessionFileError, ContextError):
                # With the same seed the answers would be the same.
                self.load_state(state._replace(seed=self._seed))

    @overload
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> CreateChatCompletionResponse: ...

    @overload
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Iterator[CreateChatCompletionStreamResponse]: ...

    @typed
    def create_chat_completion(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: list[dict[str, Any]] | None = None,
        function_call: str | dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006 - llama_cpp's default, never written to
        seed: int | None = None,
        response_format: dict[str, Any] | None = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: dict[int, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        thinking_budget: int | None = None,
    ) -> Any:
        """Answer a conversation: a chat completion of OpenAI's API, or an iterator of its chunks.

        Control tokens written out in messages remain text. response_format: json_object, with or
        without a schema, or json_schema. A tool_choice that names a tool forces a call of it;
        otherwise calls and thoughts (`reasoning_content`) are parsed out of the answer while it is
        generated, in the format that the template shows.

        These arguments are tamis's own: chat_template_kwargs, such as {"enable_thinking": False},
        and thinking_budget, the number of tokens that the model may think for. Raises PromptError,
        ValueError, SamplerError.
        """
        given = {k: v for k, v in locals().items() if k != "self"}
        if self.chat_handler is not None:
            return self.chat_handler(llama=self, **given)
        handler = formatters.registered(self.chat_format)
        return self._chat(given) if handler is None else handler(llama=self, **given)

    def _chat(
        self, given: dict[str, Any], format: chat.ChatFormat | None = None
    ) -> Chunk | Iterator[Chunk]:
        """Answer as create_chat_completion does, in a format; None: this Llama's own."""
        wanted = chat.wanted(given)
        if format is None:
            if self._format is None:
                self._format = chat.ChatFormat(self._engine, self.chat_format)
            format = self._format
        budget, variables = given["thinking_budget"], given["chat_template_kwargs"] or {}
        on = variables.get("enable_thinking", False if wanted.formed else None)
        thinking = chat.Thinking(on, budget)
        prompt = format.prompt(
            pictures.marked(given["messages"], self._mark),
            wanted.tools,
            thinking=thinking,
            variables=variables,
            ids_of=self._engine.ids_of_mark,
        )
        wanted = wanted._replace(tail=prompt.tail)
        request = self._chat_request(given, prompt, (*format.stop, *prompt.stop))
        seed = given["seed"] if given["seed"] is not None else self._drawn_seed()
        sampling = sampling_of({**given, "grammar": wanted.grammar})
        sampler = self._sampler(sampling, request.prompt, seed)
        pieces = self._pieces(request, sampler, prompt.criteria)
        if given["stream"]:
            return chat.chunks(chat.Chunks(request, wanted, format), pieces)
        with self._lock:
            return self._weighed(chat.whole(request, list(pieces), wanted, format))

    def _mark(self, url: str) -> str:
        """The mark of a picture by its URL. Raises ValueError, ImportError."""
        if self._engine.encoder is None:
            raise ValueError(
                "a message has a picture, and this Llama no encoder: pass "
                "chat_handler=MTMDChatHandler(clip_model_path=...)"
            )
        load = getattr(self.chat_handler, "load_image", pictures.load_image)
        return str(self._engine.picture_mark(load(url)))

    def _chat_request(
        self, given: Mapping[str, Any], prompt: chat.Prompt, stops: Sequence[str]
    ) -> Request:
        ids, room = self._prompt(prompt.ids, None), self._n_ctx - len(prompt.ids)
        n, stop = given["max_tokens"], given["stop"]
        stop = [stop] if isinstance(stop, str) else list(stop or ())
        return Request(
            prompt=ids,
            max_tokens=min(n, room) if n and n > 0 else room,
            model=self.model_path if given["model"] is None else given["model"],
            stop=tuple(s for s in [*stop, *stops] if s),
            logprobs=(given["top_logprobs"] or 0) if given["logprobs"] else None,
            shown=prompt.shown,
            budget=prompt.budget,
        )

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """Answer as create_chat_completion does, in the classes of the package openai.

        Raises ImportError.
        """
        try:
            from openai.types.chat import ChatCompletion, ChatCompletionChunk
        except ImportError as e:
            raise ImportError("this method needs the package openai: pip install openai") from e
        found: Any = self.create_chat_completion(*args, **kwargs)
        if kwargs.get("stream", False):
            return (ChatCompletionChunk(**chunk) for chunk in found)
        return ChatCompletion(**found)

    # --- embeddings ------------------------------------------------------------------------------

    @typed
    def create_embedding(
        self, input: str | list[str], model: str | None = None
    ) -> CreateEmbeddingResponse:
        """Embeddings of texts in OpenAI's shape. Needs embedding=True."""
        texts = [input] if isinstance(input, str) else input
        found, n_tokens = self.embed(texts, return_count=True)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "embedding": row, "index": i} for i, row in enumerate(found)
            ],
            "model": self.model_path if model is None else model,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    @typed
    def embed(
        self,
        input: str | list[str],
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """Embeddings of texts: a list of n_embd floats each, or without pooling one list per token.

        An embedding is the input of the output head, after its norm. With pooling_type
        LLAMA_POOLING_TYPE_RANK a text is a query and a document, and the result is one score for
        each of the model's labels. truncate: texts of more than n_batch tokens are cut there, with
        a warning; otherwise they are a ValueError. normalize: to Euclidean length 1. The Llama's
        own text is dropped. Raises RuntimeError without embedding=True.
        """
        if not self._embedding:
            raise RuntimeError("embeddings need a Llama made with embedding=True")
        most, found, n_tokens = min(self.n_batch, self._n_ctx), [], 0
        with self._lock:
            self._turn += 1
            for text in [input] if isinstance(input, str) else input:
                ids = self.tokenize(text.encode())
                if len(ids) > most:
                    if not truncate:
                        raise ValueError(f"a text has {len(ids)} tokens, n_batch is {most}")
                    warnings.warn(f"a text of {len(ids)} tokens was cut at {most}", stacklevel=2)
                n_tokens += len(ids[:most])
                found.append(self._embedding_of(ids[:most], normalize))
            self.reset()
        out = found[0] if isinstance(input, str) else found
        return (out, n_tokens) if return_count else out

    def _embedding_of(self, ids: list[int], normalize: bool) -> list[Any]:
        self.reset()
        ids = ids or [max(self.token_bos(), 0)]
        out = self._session.embed(ids, self._pooling)
        if normalize:
            out = out / np.linalg.norm(out, axis=-1, keepdims=True)
        return out.tolist()

    # --- states ----------------------------------------------------------------------------------

    def save_state(self) -> LlamaState:
        """The tokens and their KV cache as a state for load_state, or for a cache of prompts."""
        with self._lock:
            self._drop_ahead()
            data = session_bytes(self._session)
            n = self.n_tokens
            scores = self._scores[:n].copy()
            return LlamaState(self.input_ids, scores, n, data, len(data), self._seed)

    @typed
    def load_state(self, state: LlamaState) -> None:
        """Replace the text with a state of this model. Raises SessionFileError, ContextError."""
        n = len(state.scores)
        if n and self._logits_all and state.scores.shape != (n, self._scores.shape[1]):
            raise SessionFileError(
                f"the state has scores {state.scores.shape}, expected {self._scores.shape[1]} a "
                "token: save it again with this model"
            )
        if n > len(self._scores):
            raise SessionFileError(f"the state has {n} rows of scores, n_ctx is {self._n_ctx}")
        with self._lock:
            self._turn += 1
            self._drop_ahead()
            load_session(self._session, state.llama_state)
            if len(state.scores) and self._logits_all:
                self._scores[: len(state.scores)] = state.scores
            self._row, self._seed = None, state.seed

    def __repr__(self) -> str:
        name = os.path.basename(self.model_path)
        return f"<Llama of {name}: {self.n_tokens} of {self._n_ctx} tokens>"

    def __getstate__(self) -> dict[str, Any]:
        return self._given

    def __setstate__(self, state: dict[str, Any]) -> None:
        Llama.__init__(self, **state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads. Calls afterwards raise RuntimeError."""
        self._engine.close()

    @staticmethod
    def logits_to_logprobs(logits: Any, axis: int = -1) -> np.ndarray:
        """The log of the softmax along an axis, f32."""
        x = np.asarray(logits, np.float64)
        x = x - x.max(axis=axis, keepdims=True)
        return (x - np.log(np.exp(x).sum(axis=axis, keepdims=True))).astype(np.float32)

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """The length of the common prefix of two sequences, in tokens."""
        return longest_token_prefix(a, b)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: list[str] | None = None,
        local_dir: Any = None,
        local_dir_use_symlinks: Any = "auto",
        cache_dir: Any = None,
        **kwargs: Any,
    ) -> "Llama":
        """A Llama of a file of the Hugging Face hub, fetched once into the folder of models.

        filename: a name, or a pattern that matches one file of the repository; None: its only file.
        local_dir: the folder for the file. Raises ModelError.
        """
        for name, value in (("additional_files", additional_files), ("cache_dir", cache_dir)):
            if value is not None:
                warnings.warn(f"{name} has no effect in tamis", stacklevel=2)
        spec = f"hf:{repo_id}" + (f"/{file_of(repo_id, filename)}" if filename else "")
        path = models.pull(spec, dest=None if local_dir is None else Path(local_dir))
        return cls(str(path), **kwargs)


_living: weakref.WeakSet[Llama] = weakref.WeakSet()


def _after_fork() -> None:
    """Reset, in the child, each Llama whose lock another thread held when the process forked."""
    for llama in list(_living):
        if llama._lock.acquire(blocking=False):  # free, or this thread's own
            llama._lock.release()
        else:
            llama._lock = threading.RLock()
            llama._begin_anew()


os.register_at_fork(after_in_child=_after_fork)


def _id(token: int | None) -> int:
    return -1 if token is None else token
