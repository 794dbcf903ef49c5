"""One sequence: its tokens, its keys and values, its selector's state."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tamis.engine import session_file
from tamis.engine.session_file import SessionFile, SessionFileError
from tamis.graph.audit import Audit
from tamis.graph.device_graph import Own, Stage
from tamis.graph.forward import Forward
from tamis.graph.topk_logits import MOST, Best
from tamis.graph.workspace import HEAD_ROWS, workspaces
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE, kv_row
from tamis.kv.convert import all_finite
from tamis.kv.disk_tier import TierCounts, TieredKV
from tamis.kv.gpu_page_cache import HostKV
from tamis.kv.paged import KVCache
from tamis.kv.placed import Cache, PlacedKV
from tamis.kv.rerotate import close_up
from tamis.kv.types import KVOptions, KVTypes, Tier
from tamis.model.placement import Place, described
from tamis.sampling.chain import Sampler, SamplerParams
from tamis.select.base import Selector, SelectorShape
from tamis.text.detokenize import TextStream

if TYPE_CHECKING:
    from tamis.engine.engine import Engine, MemoryPlan, Progress

TokenProgress = Callable[[int, int], None]
MAX_CTX = 1 << 24


class ContextError(ValueError):
    """The tokens do not fit the context; the message has both numbers and the remedy."""


class Piece(NamedTuple):
    """One step of generation. text may be empty while a character or a stop string is open."""

    text: str
    token_id: int
    logprob: float
    finish: str | None  # None, "stop" or "length"


class Session:
    """A sequence of up to n_ctx tokens. A call that fails or is interrupted changes nothing."""

    def __init__(
        self,
        engine: "Engine",
        *,
        n_ctx: int,
        n_ubatch: int,
        selector: Selector,
        kv: KVOptions,
        audit: int = 0,
        progress: "Progress | None" = None,
    ) -> None:
        hp, model = engine.hp, engine.model
        if not 1 <= n_ctx <= MAX_CTX:
            raise ValueError(f"n_ctx is {n_ctx}, expected 1 to {MAX_CTX}")
        if not 1 <= n_ubatch <= 4096:
            raise ValueError(f"n_ubatch is {n_ubatch}, expected 1 to 4096")
        kv.types.check(hp.head_dim)
        for type in kv.types:
            if type not in engine.backend.kv_types:
                raise ValueError(f"this device has no {type} keys and values: use f16")
        if audit and len(engine.places) > 1:
            raise ValueError(
                "audit needs all layers on one device: leave out one of audit and -ngl"
            )
        plans = _checked_plans(engine, n_ctx, n_ubatch, kv)
        # A chunk of one token is decode's Program: chunks have room for two.
        n_tok = max(2, n_ubatch)
        self._engine, self.n_ctx = engine, n_ctx
        window, n_kv = tuple(map(model.window, range(hp.n_layer))), -(-n_ctx // PAGE) * PAGE
        shape = SelectorShape(
            n_layer=hp.n_layer,
            n_head=hp.n_head,
            n_head_kv=hp.n_head_kv,
            head_dim=hp.head_dim,
            n_ctx=n_kv,
            n_ubatch=n_tok,
            window=window,
        )
        self._audit = Audit(audit, hp, window, n_kv, kv.types, engine.n_threads) if audit else None
        spaces = workspaces(model, n_tok, [place.backend for place in engine.places])
        self._stages = [
            Stage(
                model,
                place,
                Own(
                    ws, self._cache(place, kv, plans[place.kv_device], n_tok), selector.open(shape)
                ),
                self._audit,
            )
            for place, ws in zip(engine.places, spaces, strict=True)
        ]
        self._kv: Cache | PlacedKV = self._stages[0].kv
        if len(self._stages) > 1:
            self._kv = PlacedKV([(stage.layers, stage.kv) for stage in self._stages])
        report = None if progress is None else (lambda i, n: progress("compile", i, n))
        self._forward = Forward(model, self._stages, audit=self._audit, progress=report)
        self._tokens: list[int] = []

    @property
    def tokens(self) -> list[int]:
        """A copy of the tokens whose keys and values are held."""
        return list(self._tokens)

    @property
    def n_past(self) -> int:
        """How many tokens are held."""
        return len(self._tokens)

    @property
    def _tiered(self) -> TieredKV | None:
        kv = self._kv.tiered if isinstance(self._kv, PlacedKV) else self._kv
        return kv if isinstance(kv, TieredKV) else None

    @property
    def kv_types(self) -> KVTypes:
        """The types that keys and values are kept in."""
        return self._kv.types

    @property
    def kv_ram(self) -> int | None:
        """Bytes of memory for keys and values; None where it is as much as they need."""
        return None if self._tiered is None else self._tiered.kv_ram

    @property
    def kv_vram(self) -> int | None:
        """Bytes of a GPU's memory for keys and values; None where it is as much as they need."""
        found = (stage.kv.kv_vram for stage in self._stages if isinstance(stage.kv, HostKV))
        return next(found, None)

    @property
    def kv_counts(self) -> TierCounts | None:
        """What the disk, or a GPU's frames, have been asked for; None where neither is there."""
        for stage in self._stages:
            if isinstance(stage.kv, HostKV):
                stage.backend.fetch(stage.kv.state)
                return stage.kv.counts
        return None if self._tiered is None else self._tiered.counts

    @property
    def audit(self) -> Audit | None:
        """What audited steps have shown; None where none are."""
        return self._audit

    @property
    def n_ubatch(self) -> int:
        """Tokens of a prompt that are computed at once."""
        return self._forward.n_ubatch

    @property
    def forward(self) -> Forward:
        """The recorded Programs, for profiles."""
        return self._forward

    def prefill(self, ids: Sequence[int], progress: TokenProgress | None = None) -> np.ndarray:
        """Append tokens; logits f32 [n_vocab] of the last one.

        progress(done, total) in tokens, after each chunk. Raises ContextError, ValueError.
        """
        logits = None
        for chunk, last in self._append(ids, progress):
            if last:
                logits = self._forward.logits(len(chunk) - 1, 1)[0]
        assert logits is not None
        return logits

    def prefill_steps(self, ids: Sequence[int]) -> Generator[int, None, np.ndarray]:
        """As `prefill`, a chunk a step: yields how many tokens are done; returns the logits.

        Other sessions may run between steps. Closed early, it has appended nothing.
        """
        done, logits = 0, None
        for chunk, last in self._append(ids, None):
            if last:
                logits = self._forward.logits(len(chunk) - 1, 1)[0]
            done += len(chunk)
            yield done
        assert logits is not None
        return logits

    def decode(self, token_id: int) -> np.ndarray:
        """Append one token; its logits, f32 [n_vocab], the caller's to keep and to change.

        Raises ContextError, ValueError, AuditError, KVFileError.
        """
        self._decode(token_id, whole=True)
        return self._forward.logits_of_step()

    def decode_best(self, token_id: int, n: int | None) -> Best | np.ndarray:
        """As `decode`, but only the n best logits, where that is worth it and all are numbers.

        On a GPU the others are not copied to the host. n None: all.
        """
        if n is None or n > min(MOST, self._engine.hp.n_vocab):
            return self.decode(token_id)
        self._decode(token_id, whole=False)
        best = self._forward.best(n)
        return best if math.isfinite(best.log_sum) else self._forward.logits_of_step()

    def _decode(self, token_id: int, *, whole: bool) -> None:
        ids = self._checked([token_id])
        self._kv.reserve(self.n_past, self.n_past + 1)
        self._forward.decode(int(ids[0]), self.n_past, self.n_past, whole=whole)
        self._tokens.append(int(ids[0]))

    @property
    def batchable(self) -> bool:
        """Whether a Batch may run its steps with others: no audit, keys and values in memory."""
        return self._audit is None and isinstance(self._kv, KVCache)

    def begin_step(self, token_id: int) -> None:
        """Make room for one more token, for a Batch. Raises ContextError, ValueError."""
        self._checked([token_id])
        self._kv.reserve(self.n_past, self.n_past + 1)

    def own_step(self) -> Program:
        """The Program of the next token, after `begin_step`, for a Batch."""
        return self._forward.own_step(self.n_past)

    def end_step(self, token_id: int) -> None:
        """Hold the token: its keys and values are in the pages."""
        self._tokens.append(token_id)

    def logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Append tokens; logits of all of them, in slices f32 [n_row, n_vocab].

        The tokens are held once the iterator is exhausted; one left early appends nothing.
        """
        for chunk, _ in self._append(ids, None):
            for row in range(0, len(chunk), HEAD_ROWS):
                yield self._forward.logits(row, min(HEAD_ROWS, len(chunk) - row))

    def hidden(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Append tokens; what the output head reads of each, in slices f32 [n_row, n_embd].

        The tokens are held once the iterator is exhausted; one left early appends nothing.
        """
        for chunk, _ in self._append(ids, None):
            yield self._forward.hidden(len(chunk))

    def truncate(self, n_tokens: int) -> None:
        """Forget all but the first n_tokens tokens. Raises ValueError where it holds fewer."""
        if not 0 <= n_tokens <= self.n_past:
            raise ValueError(f"cannot keep {n_tokens} tokens of {self.n_past}")
        del self._tokens[n_tokens:]
        self._kv.truncate(n_tokens)
        self._forget(n_tokens)

    def remove(self, first: int, end: int) -> None:
        """Forget tokens first .. end - 1; those after move down, and their keys turn with them.

        Later tokens keep what they have read of the forgotten ones: this is llama.cpp's context
        shift, not what a prompt without those tokens gives. Takes as much memory again as the keys
        and values from `first` on. Raises ValueError where there are no such tokens. Where keys and
        values are in a file there is no such copy: a call that fails or is interrupted then leaves
        only whole pages of what was before `first`, and says so.
        """
        if not 0 <= first <= end <= self.n_past:
            raise ValueError(f"cannot remove tokens {first} to {end} of {self.n_past}")
        if first == end:
            return
        if end == self.n_past:
            self.truncate(first)
            return
        before, model = self._tokens, self._engine.model
        gone, neox = range(first, end), model.arch.neox
        self._kv.reserve(first, self.n_past)  # pages that others hold are copied now
        self._fetch_kv()
        kept = None if self._tiered is not None else self._kv.pages_from(first)
        try:
            for layer in range(self._engine.hp.n_layer):
                inv_freq = model.frequencies(layer).inv_freq
                close_up(self._kv, layer, len(before), gone, inv_freq=inv_freq, neox=neox)
            self._send_kv()
            self._tokens = before[:first] + before[end:]
            self._forget(first)
            self.recall()
        except BaseException as error:
            self._tokens = before
            if kept is None:
                self.truncate(first // PAGE * PAGE)
                error.add_note(f"the session holds its first {self.n_past} tokens only")
            else:
                self._kv.put_back(first, kept)
                self._forget(first)
            self._send_kv()
            raise
        self._kv.truncate(self.n_past)

    def _forget(self, n_tokens: int) -> None:
        """Let the methods forget what they know of positions from n_tokens on."""
        for stage in self._stages:
            stage.backend.fetch(*stage.state.counters)
            stage.state.truncate(n_tokens)
            stage.backend.send(*stage.state.counters)

    def generate(
        self,
        ids: Sequence[int],
        params: SamplerParams,
        *,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        progress: TokenProgress | None = None,
    ) -> Iterator[Piece]:
        """Append the prompt `ids` and stream an answer.

        Ends with a Piece whose finish is "stop" (end-of-generation token or stop string) or
        "length" (max_tokens, or the context is full). Tokens of the answer are held as they come.
        """
        tokenizer = self._engine.tokenizer
        sampler = Sampler(params, self._engine.hp.n_vocab, eog=tokenizer.eog)
        for token in [*self._tokens, *ids]:
            sampler.accept(token)
        stream = TextStream(stop=stop)
        found: Best | np.ndarray = self.prefill(ids, progress)
        n_left = self.n_ctx - self.n_past
        n_left = n_left if max_tokens is None else min(n_left, max_tokens)
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
            found = self.decode_best(token, sampler.n_best)
            if n_left > 0:
                yield Piece(text, token, logprob, None)
            else:
                yield Piece(text + stream.finish(), token, logprob, "length")

    def copy(self, other: "Session", n_tokens: int | None = None) -> None:
        """Replace the sequence by another session's of the same engine, or its first n_tokens.

        Where both keep the same types in memory, they share its pages until one of them writes.
        Raises ContextError, ValueError where the other holds fewer.
        """
        n_tokens = other.n_past if n_tokens is None else n_tokens
        if not 0 <= n_tokens <= other.n_past:
            raise ValueError(f"cannot copy {n_tokens} tokens of {other.n_past}")
        self._check_room(f"what is copied is {n_tokens}", n_tokens)
        self.truncate(0)
        if not self._kv.share(other._kv, n_tokens):
            other._fetch_kv()
            for layer in range(self._engine.hp.n_layer):
                self._kv.write(layer, *other._kv.read(layer, n_tokens))
            self._send_kv()
        self._tokens = other.tokens[:n_tokens]
        self.recall()

    def recall(self) -> None:
        """Run the last tokens again for a method that learns from queries; few have any to run.

        Keys and values stay as they are: those of a file may come from another method's prefill.
        """
        n = min(max(stage.state.n_recall for stage in self._stages), self.n_past)
        if n == 0:
            return
        first = self.n_past - n
        self._kv.reserve(first, self.n_past)
        self._fetch_kv()
        pages = self._kv.pages_from(first)
        try:
            for start in range(first, self.n_past, self.n_ubatch):
                chunk = self._tokens[start : start + self.n_ubatch]
                prompt = range(first, self.n_past)
                self._forward.prefill(np.array(chunk, np.int32), start, prompt)
        finally:
            self._wait()
            self._kv.put_back(first, pages)
            self._send_kv()

    def save(self, path: str | Path) -> None:
        """Write tokens, keys and values to a file: whole or not at all."""
        header = {"model": self._fingerprint(), "tokens": self._tokens, "kv": self.kv_types}
        session_file.write(Path(path), header, self._arrays())

    def load(self, path: str | Path) -> None:
        """Replace the sequence by a saved one.

        Keys and values of another type than this session's are converted. What the session holds is
        copied meanwhile, and put back where this fails or is interrupted; where keys and values are
        in a file of the session there is no such copy: it then holds nothing.
        Raises SessionFileError (damaged, other version or model), ContextError before anything has
        changed, OSError.
        """
        with SessionFile(Path(path)) as saved:
            tokens, types = self._saved(saved)
            n_layer = self._engine.hp.n_layer
            shape = (len(tokens), self._engine.hp.n_head_kv)
            rows = [kv_row(type, self._engine.hp.head_dim) for type in types]
            sizes = [math.prod(shape) * row.itemsize for row in rows]
            for array, row in zip(saved.arrays(sizes * n_layer), rows * n_layer, strict=True):
                if not all_finite(np.ndarray(shape, row, array)):
                    raise saved.error("has keys or values that are not numbers")
            arrays = saved.arrays(sizes * n_layer)
            with self._restoring():
                for layer in range(n_layer):
                    k, v = (np.ndarray(shape, row, next(arrays)) for row in rows)
                    self._kv.write(layer, k, v)
                self._send_kv()
                self._tokens = tokens
                self.recall()

    def _saved(self, saved: SessionFile) -> tuple[list[int], KVTypes]:
        """Tokens and types of a saved session, checked. Raises SessionFileError, ContextError."""
        hp, header = self._engine.hp, saved.header
        if header.get("model") != self._fingerprint():
            raise SessionFileError(f"{saved.path} was saved for another model")
        tokens, kv = header.get("tokens"), header.get("kv", KVTypes())
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise saved.error("has no list of token ids")
        self._check_room(f"{saved.path} holds {len(tokens)}", len(tokens))
        if wrong := [token for token in tokens if not 0 <= token < hp.n_vocab]:
            raise saved.error(f"has token id {wrong[0]}, the vocabulary has {hp.n_vocab} tokens")
        # Files from before there was a choice have no types.
        if not isinstance(kv, list | KVTypes) or len(kv) != 2:
            raise saved.error(f"has keys and values of the types {kv!r}")
        types = KVTypes(*kv)
        try:
            types.check(hp.head_dim)
        except ValueError as error:
            raise saved.error(f"does not fit the model ({error})") from None
        return tokens, types

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Around what replaces an emptied sequence; the old one comes back where it fails."""
        before, kept = self._tokens, None
        self._fetch_kv()
        if self._tiered is None:
            self._kv.reserve(0, len(before))  # pages that others hold are copied now
            kept = self._kv.pages_from(0)
        try:
            self._tokens = []  # not cleared: it may have to come back
            self.truncate(0)
            self._wait()
            yield
        except BaseException as error:
            self._wait()
            self._tokens = []
            self.truncate(0)
            if kept is None:
                error.add_note("the session holds nothing now")
            else:
                self._kv.reserve(0, len(before))
                self._kv.put_back(0, kept)
                self._send_kv()
                self._tokens = before
                self.recall()
            raise

    def _cache(self, place: Place, kv: KVOptions, plan: "MemoryPlan", n_ubatch: int) -> Cache:
        """Where the keys and values of a place's layers are."""
        hp = place.share(self._engine.hp)
        if kv.vram is not None and plan.host:
            return HostKV(hp, self.n_ctx, kv.types, kv.vram, n_ubatch, place.backend.mapped)
        if kv.tier is not None and plan.disk and place.layers:
            return TieredKV(hp, self.n_ctx, kv.types, kv.tier, n_ubatch)
        store = self._engine.page_store(place, kv.types, -(-self.n_ctx // PAGE))
        return KVCache(hp, self.n_ctx, store)

    def _append(
        self, ids: Sequence[int], progress: TokenProgress | None
    ) -> Iterator[tuple[np.ndarray, bool]]:
        """Run the chunks of `ids`, yielding each with whether it is the last.

        The tokens count as held when the generator ends; on any error their pages are given back.
        """
        tokens, n_past = self._checked(ids), self.n_past
        try:
            self._kv.reserve(n_past, n_past + len(tokens))
            prompt = range(n_past, n_past + len(tokens))
            for start in range(0, len(tokens), self.n_ubatch):
                chunk = tokens[start : start + self.n_ubatch]
                self._engine.file.check_unchanged()
                self._forward.prefill(chunk, n_past + start, prompt)
                if progress is not None:
                    progress(start + len(chunk), len(tokens))
                yield chunk, start + len(chunk) == len(tokens)
            self._tokens += tokens.tolist()
        finally:
            self._kv.truncate(self.n_past)

    def _checked(self, ids: Sequence[int]) -> np.ndarray:
        """The ids as int32, all within the vocabulary and the context; the weights are there."""
        self._engine.file.check_unchanged()
        tokens = np.asarray(ids, np.int64)
        if tokens.ndim != 1 or len(tokens) == 0:
            raise ValueError("no tokens: expected a sequence of at least one token id")
        n_vocab = self._engine.hp.n_vocab
        wrong = tokens[(tokens < 0) | (tokens >= n_vocab)]
        if len(wrong):
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {n_vocab} tokens")
        if self.n_past + len(tokens) > self.n_ctx:
            held = f" after {self.n_past} held" if self.n_past else ""
            raise ContextError(
                f"prompt is {len(tokens)} tokens{held}, n_ctx is {self.n_ctx}: raise --ctx "
                f"to at least {self.n_past + len(tokens)} or shorten the prompt"
            )
        return tokens.astype(np.int32)

    def _check_room(self, holds: str, n_tokens: int) -> None:
        if n_tokens > self.n_ctx:
            raise ContextError(f"{holds} tokens, n_ctx is {self.n_ctx}: raise --ctx")

    def _fingerprint(self) -> str:
        """What a session file must agree with: the model's shapes and tensor table."""
        tensors = [(t.name, t.shape, t.type.name) for t in self._engine.file.tensors.values()]
        text = json.dumps([repr(self._engine.hp), tensors])
        return hashlib.sha256(text.encode()).hexdigest()

    def _arrays(self) -> Iterator[np.ndarray]:
        self._fetch_kv()
        for layer in range(self._engine.hp.n_layer):
            yield from self._kv.read(layer, self.n_past)

    def _fetch_kv(self) -> None:
        """Show Python the keys and values of all layers."""
        for stage in self._stages:
            stage.backend.fetch(*stage.kv.arrays)

    def _send_kv(self) -> None:
        """Show kernels the keys and values of all layers."""
        for stage in self._stages:
            stage.backend.send(*stage.kv.arrays)

    def _wait(self) -> None:
        """Until nothing runs that was started: it may write keys and values."""
        for stage in self._stages:
            stage.backend.fetch()


def _sampled(sampler: Sampler, found: Best | np.ndarray) -> tuple[int, float]:
    """The next token and the logarithm of its probability."""
    if not isinstance(found, Best):
        token = sampler.sample(found)
        return token, sampler.logprob(found, token)
    row = sampler.sample_best(found.ids, found.logits)
    return int(found.ids[row]), float(found.logits[row]) - found.log_sum


def _checked_plans(
    engine: "Engine", n_ctx: int, n_ubatch: int, kv: KVOptions
) -> "dict[str, MemoryPlan]":
    """The plan of each device, where it fits. Raises MemoryError, ValueError."""
    types, tier, vram = kv
    ram = None if tier is None else tier.ram
    if vram is not None:
        _check_vram(engine, tier)
    plans = engine.memory_plans(n_ctx, n_ubatch, *types, kv_ram=ram, kv_vram=vram)
    gib = 1 << 30
    for device, plan in plans.items():
        if not plan.fits:
            gpu = f", with {plan.weights / gib:.1f} GiB of weights" if device != "cpu" else ""
            raise MemoryError(
                f"KV at {n_ctx} tokens is {plan.kv / gib:.1f} GiB and scratch "
                f"{plan.workspace / gib:.1f} GiB{described(device, engine.places)}, free: "
                f"{plan.available / gib:.1f} GiB{gpu}; lower --ctx, {_remedy(device, plan)}"
            )
    _check_home(engine, n_ctx, plans)
    if tier is None:
        return plans
    if "cpu" not in plans:
        raise ValueError(
            "this device keeps all keys and values in its memory: leave out kv_ram, or have them "
            "on the CPU with -nkvo (offload_kqv=False)"
        )
    if sum(place.kv_device == "cpu" and len(place.layers) > 0 for place in engine.places) > 1:
        raise ValueError(
            "with -nkvo (offload_kqv=False) kv_ram needs all layers on one device: leave out -ngl"
        )
    n_disk, free = sum(plan.disk for plan in plans.values()), shutil.disk_usage(tier.folder).free
    if n_disk > free:
        raise ValueError(
            f"KV at {n_ctx} tokens is {n_disk / gib:.1f} GiB, {tier.folder} has "
            f"{free / gib:.1f} GiB free: lower --ctx, or choose another --kv-dir"
        )
    return plans


def _check_vram(engine: "Engine", tier: Tier | None) -> None:
    """Raise ValueError where no GPU has keys and values, or their home may not be memory."""
    on = [place for place in engine.places if place.device != "cpu" and place.layers]
    if not on:
        raise ValueError(
            "kv_vram is memory of a GPU, and this model runs on the CPU: leave it out, or run "
            "layers on a GPU with --device cuda or -ngl"
        )
    if all(place.kv_device == "cpu" for place in on):
        raise ValueError(
            "with -nkvo (offload_kqv=False) keys and values are the CPU's: leave out kv_vram, or "
            "-nkvo"
        )
    if tier is not None:
        raise ValueError(
            "kv_vram keeps all keys and values of the GPU's layers in RAM, kv_ram limits it: leave "
            "out one of them"
        )


def _check_home(engine: "Engine", n_ctx: int, plans: "dict[str, MemoryPlan]") -> None:
    """Raise MemoryError where RAM has no room for the keys and values that a GPU has frames for."""
    n_home = sum(plan.host for plan in plans.values())
    if n_home == 0:
        return
    host = next(place.host for place in engine.places if place.host is not None)
    own = sum(plan.kv + plan.workspace for device, plan in plans.items() if device == "cpu")
    gib, free = 1 << 30, host.free_bytes() - own
    if n_home > free:
        raise MemoryError(
            f"KV at {n_ctx} tokens is {n_home / gib:.1f} GiB, which with kv_vram is in RAM, free: "
            f"{free / gib:.1f} GiB; lower --ctx, or leave out --kv-vram"
        )


def _remedy(device: str, plan: "MemoryPlan") -> str:
    if device == "cpu":
        return "or keep a part on disk with --kv-ram and --kv-dir"
    kept = ", or keys and values with -nkvo, or with --kv-vram most of them" if plan.kv else ""
    return "or keep layers on the CPU with -ngl" + kept
