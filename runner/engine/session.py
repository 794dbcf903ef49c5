"""One sequence: its tokens, its KV cache, its selector's state."""

import hashlib
import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from tamis.engine import session_file
from tamis.engine.checks import check_count, check_ids, typed
from tamis.engine.chunks import chunks, exact_rows, of_prompt
from tamis.engine.errors import ContextError
from tamis.engine.fingerprint import shape_text
from tamis.engine.generate import Generating, TokenProgress
from tamis.engine.loaded import LoadedModel
from tamis.engine.memory_plan import MemoryPlan, checked_plans
from tamis.engine.page_copies import page_bytes, read_pages, write_pages
from tamis.engine.selected import Selected, selected
from tamis.engine.session_file import SessionFile, SessionFileError
from tamis.graph.audit import Audit
from tamis.graph.device_graph import Own, Rows, Stage
from tamis.graph.forward import Forward
from tamis.graph.topk_logits import MOST, Best
from tamis.graph.workspace import HEAD_ROWS, workspaces
from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.contract.program import Program
from tamis.jit_kernels.contract.types import PAGE, kv_row
from tamis.kv.cache import KVCache, KVCounts
from tamis.kv.composite import CompositeKV
from tamis.kv.convert import all_finite, as_float32, as_rows
from tamis.kv.recurrent import RecurrentStates
from tamis.kv.rerotate import Pairs, close_up, move_together
from tamis.kv.types import KVOptions, KVTypes
from tamis.model.hparams import HParams
from tamis.model.key_basis import KeyBasis
from tamis.model.model import Model
from tamis.select.base import Selector, SelectorShape, SelectorState
from tamis.select.dense import Dense
from tamis.select.meter import Mass, mass_of
from tamis.text.tokenizer import Tokenizer
from tamis.vision.held import Run, whole_pictures

Progress = Callable[[str, int, int | None], None]
MAX_CTX = 1 << 24
BASIS = 1  # in session files: keys are in the bases of model/key_basis.py


class Session(Generating):
    """A sequence of up to n_ctx tokens. A call that fails or is interrupted changes nothing."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        n_ctx: int,
        n_ubatch: int,
        selector: Selector,
        kv: KVOptions,
        audit: int = 0,
        progress: Progress | None = None,
    ) -> None:
        hp, model = loaded.hp, loaded.model
        if not 1 <= n_ctx <= MAX_CTX:
            raise ValueError(f"n_ctx is {n_ctx}, expected 1 to {MAX_CTX}")
        if not 1 <= n_ubatch <= 4096:
            raise ValueError(f"n_ubatch is {n_ubatch}, expected 1 to 4096")
        _check_types(loaded, kv.types)
        _check_audited(loaded, audit)
        _check_positions(model, n_ctx, audit, is_dense=selector == Dense())
        # A chunk of one token would be decode's Program, so chunks have room for at least two.
        n_tok = max(2, n_ubatch)
        window, n_kv = tuple(map(model.window, range(hp.n_layer))), -(-n_ctx // PAGE) * PAGE
        shape = _selector_shape(hp, window, n_kv, n_tok)
        chosen, copies = _opened(loaded, selector, shape, kv.key_copy)
        plans = checked_plans(loaded, n_ctx, n_ubatch, kv, copies)
        self._loaded, self.n_ctx, self.selector = loaded, n_ctx, selector
        self._few = exact_rows(model)
        self.plans: Mapping[str, MemoryPlan] = plans  # by device, as they were before it was opened
        self.audit = Audit(audit, hp, window, n_kv, kv.types, loaded.n_threads)
        own_audit = self.audit if self.audited else None
        self._states = RecurrentStates(model.needs.states)
        self._bases = loaded.key_bases(kv.types.k)
        spaces = workspaces(model, n_tok, [place.backend for place in loaded.places])
        self._stages = [
            Stage(
                model,
                place,
                Own(
                    ws,
                    loaded.new_cache(place, n_ctx, n_tok, kv, whole=plans[place.kv_device].whole),
                    state,
                    self._states,
                    self._bases,
                ),
                own_audit,
            )
            for place, ws, state in zip(loaded.places, spaces, chosen, strict=True)
        ]
        self._meters = [(s, s.state.meter) for s in self._stages if s.state.meter is not None]
        if self._meters and model.has_score_mod:
            raise ValueError(
                "min_mass is not supported for models with capped scores or ALiBi: leave it out"
            )
        self._kv = _whole_cache(model, self._stages)
        report = None if progress is None else (lambda i, n: progress("compile", i, n))
        self._forward = Forward(model, self._stages, audit=own_audit, progress=report)
        self._tokens: list[int] = []
        # of pictures in a grid: the tokens up to its end, and its positions less its tokens
        self._grids: list[tuple[int, int]] = []
        self._closed = False

    def __repr__(self) -> str:
        closed = "closed" if self._closed else f"{self.n_past} of {self.n_ctx} tokens"
        return f"<Session of {Path(self._loaded.file.path).name}: {closed}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free its pages. Calls afterwards raise RuntimeError."""
        if not self._closed:
            self._closed = True
            if not self._loaded.closed.is_set():
                self.truncate(0)

    def _check_open(self) -> None:
        """Raise RuntimeError if the session or its engine was closed."""
        self._loaded.check_open()
        if self._closed:
            raise RuntimeError("the session is closed: open another with engine.session()")

    @property
    def tokens(self) -> list[int]:
        """A copy of the tokens in the KV cache."""
        return list(self._tokens)

    @property
    def n_past(self) -> int:
        """The number of tokens in the KV cache."""
        return len(self._tokens)

    @property
    def n_free(self) -> int:
        """The number of tokens that still fit."""
        return self.n_ctx - self.n_past

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loaded.tokenizer

    @property
    def kv_types(self) -> KVTypes:
        """The types of the KV cache."""
        return self._kv.types

    @property
    def loses_keys(self) -> bool:
        """Whether 4 bits do not hold its keys: some have a bias and are not stored in a basis.

        That is so on a GPU; see model/key_basis.py.
        """
        model = self._loaded.model
        plain = [model.weights.blk[layer] for layer in model.kv_layers if layer not in self._bases]
        biased = any(w.attn_k and w.attn_k.bias() is not None and not w.attn_k_norm for w in plain)
        return self.kv_types.k == "q4_0" and biased

    @property
    def kv_ram(self) -> int | None:
        """The bytes of memory for the KV cache; None: no limit."""
        return self._kv.kv_ram

    @property
    def kv_vram(self) -> int | None:
        """The bytes of a GPU's memory for the KV cache; None: no limit."""
        return self._kv.kv_vram

    @property
    def kv_counts(self) -> KVCounts | None:
        """Counters of the KV cache's disk or GPU tier; None without a tier."""
        for stage in self._stages:
            if stage.kv.counts is not None:
                stage.backend.fetch(*stage.kv.counters)
                return stage.kv.counts
        return None

    @property
    def audited(self) -> bool:
        """Whether some of its decode steps are audited: `audit` has what was found."""
        return self.audit.every > 0

    @property
    def mass(self) -> Mass | None:
        """The estimated mass that decode steps since the last prompt have retained; see `min_mass`.

        None if it is not measured, or no step has left a key out.
        """
        return mass_of([meter for _, meter in self._meters])

    @property
    def n_ubatch(self) -> int:
        """The tokens of a prompt that are computed at once."""
        return self._forward.n_ubatch

    @property
    def forward(self) -> Forward:
        """The recorded Programs, for profiles."""
        return self._forward

    def prefill(self, ids: Sequence[int], progress: TokenProgress | None = None) -> np.ndarray:
        """Append tokens; returns the logits f32 [n_vocab] of the last one.

        progress(done, total) is called in tokens, after each chunk. Raises ContextError,
        ValueError.
        """
        self._check_predicts()
        logits = None
        for chunk, last in self._append(ids, progress):
            if last:
                logits = self._forward.logits(len(chunk) - 1, 1)[0]
        assert logits is not None
        return logits

    def prefill_steps(self, ids: Sequence[int]) -> Generator[int, None, np.ndarray]:
        """Do what `prefill` does in steps of a chunk: yields the number of tokens done.

        Returns the logits.

        Other sessions may run between steps. If it is closed early, it has appended the tokens
        done; on an error nothing.
        """
        self._check_predicts()
        done, logits, steps = 0, None, self._append(ids, None)
        try:
            for chunk, last in steps:
                if last:
                    logits = self._forward.logits(len(chunk) - 1, 1)[0]
                done += len(chunk)
                yield done
        except GeneratorExit:
            # before pages shared with others are released
            self._tokens += list(map(int, ids[:done]))
            steps.close()
            raise
        assert logits is not None
        return logits

    def decode(self, token_id: int) -> np.ndarray:
        """Append one token; returns a new array of its logits, f32 [n_vocab].

        Raises ContextError, ValueError, AuditError, KVFileError.
        """
        self._decode(token_id, whole=True)
        return self._forward.logits_of_step()

    def decode_best(self, token_id: int, n: int | None) -> Best | np.ndarray:
        """Do what `decode` does, but return only the n best logits if that saves time.

        All logits are returned if one is not finite. On a GPU the others are not copied to the
        host. n None: all. Raises what `decode` raises, and ValueError or TypeError for another n.
        """
        check_count("n", n, least=1)
        if n is None or n > min(MOST, self._loaded.hp.n_vocab):
            return self.decode(token_id)
        self._decode(token_id, whole=False)
        best = self._forward.best(n)
        return best if math.isfinite(best.log_sum) else self._forward.logits_of_step()

    def _decode(self, token_id: int, *, whole: bool) -> None:
        self._check_predicts()
        ids = self._checked([token_id])
        self._kv.reserve(self.n_past, self.n_past + 1)
        self._states.begin()
        try:
            places = self._places(Run(self.n_past, self.n_past + 1))
            self._forward.decode(int(ids[0]), self.n_past, self.n_past, whole=whole, places=places)
        except BaseException:
            self._go_back()
            raise
        self.end_step(int(ids[0]))

    @property
    def model(self) -> Model:
        """The session's model; with adapters, another one than the engine's."""
        return self._loaded.model

    @property
    def evicts(self) -> bool:
        """Whether tokens that one decode step leaves out are never read again."""
        return any(stage.state.evicting for stage in self._stages)

    @property
    def batchable(self) -> bool:
        """Whether a Batch may run its steps together with others.

        It must have no audit, one device, and its KV cache in that device's memory.
        """
        alone = self.audited or len(self._stages) > 1 or bool(self._grids)
        return not alone and self._kv.resident and not self.calls_python

    @property
    def calls_python(self) -> bool:
        """Whether a decode step calls Python between its ops, as a NumpySelector has it do."""
        return self._stages[0].pauses

    @property
    def backend(self) -> Backend:
        """The backend of its last layers."""
        return self._stages[-1].backend

    @typed
    def selected(self, layer: int) -> Selected:
        """The positions that a layer's attention read in the last decode step.

        Dense layers have read all positions that they see. Raises ValueError if there is no such
        layer, or if the last call was not a decode step.
        """
        self._check_open()
        stage = next((stage for stage in self._stages if layer in stage.layers), None)
        if stage is None:
            raise ValueError(f"layer is {layer}, expected 0 to {self._loaded.hp.n_layer - 1}")
        pos, program = stage.decoded
        if pos != self.n_past - 1 or pos < 0:
            raise ValueError("no decode step came last: call decode, then selected")
        if layer not in program.selections:
            raise ValueError(f"layer {layer} is recurrent: it attends to nothing")
        sel = program.selections[layer]
        stage.backend.fetch(sel.indptr, sel.indices)
        return selected(sel, pos, self._loaded.model.window(layer))

    def begin_step(self, token_id: int) -> None:
        """Make room for one more token; called by a Batch. Raises ContextError, ValueError."""
        loaded, n_past = self._loaded, self.n_past
        if 0 <= token_id < loaded.hp.n_vocab and n_past < self.n_ctx:  # as nearly always
            self._check_predicts()
            self._check_open()
            loaded.file.check_unchanged()
        else:
            self._checked([token_id])
        self._kv.reserve(n_past, n_past + 1)
        self._states.begin()

    def own_step(self) -> Program:
        """The Program of the next token, after `begin_step`; called by a Batch."""
        return self._forward.own_step(self.n_past)

    def end_step(self, token_id: int) -> None:
        """Append the token whose K and V are in the cache; called by a Batch."""
        for stage, meter in self._meters:
            stage.backend.fetch(meter.report)
            meter.take()
            stage.backend.send(meter.report)
        self._tokens.append(token_id)
        self._states.end(self.n_past)
        if self.n_past % self.n_ubatch == 0:
            self._keep_states()

    def logits(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Append tokens; yields the logits of all, in slices f32 [n_row, n_vocab].

        The tokens are held once the iterator is exhausted; one that is closed early appends
        nothing.
        """
        self._check_predicts()
        for chunk, _ in self._append(ids, None):
            for row in range(0, len(chunk), HEAD_ROWS):
                yield self._forward.logits(row, min(HEAD_ROWS, len(chunk) - row))

    def hidden(self, ids: Sequence[int]) -> Iterator[np.ndarray]:
        """Append tokens; yields the output head's input for all, in slices f32 [n_row, n_embd].

        The tokens are held once the iterator is exhausted; one that is closed early appends
        nothing.
        """
        for chunk, _ in self._append(ids, None):
            yield self._forward.hidden(len(chunk))

    def embed(self, ids: Sequence[int], pooling: str | None = None) -> np.ndarray:
        """Replace the sequence by a text; returns its embedding, as `Heads.pooled` computes it.

        pooling: one of POOLINGS; None: the file's, or "mean" if it names none. With "rank" the
        result is the scores of the model's labels. Raises ValueError, ContextError.
        """
        heads = self._loaded.model.heads
        pooling = pooling or heads.pooling_or_mean
        heads.check(pooling)
        self.truncate(0)
        return heads.pooled(np.concatenate(list(self.hidden(ids))), pooling)

    @typed
    def truncate(self, n_tokens: int) -> None:
        """Drop all but the first n_tokens tokens. Raises ValueError if it holds fewer."""
        if not 0 <= n_tokens <= self.n_past:
            raise ValueError(f"cannot keep {n_tokens} tokens of {self.n_past}")
        del self._tokens[n_tokens:]
        self._grids = [grid for grid in self._grids if grid[0] <= n_tokens]
        self._kv.truncate(n_tokens)
        self._drop(n_tokens)
        self._go_back()

    def _keep_states(self) -> None:
        """Take a snapshot of the recurrent states."""
        if self._states.shapes:
            self._fetch_states()
            self._states.keep()

    def _go_back(self) -> None:
        """Restore the recurrent states after the tokens that are held.

        A state cannot be truncated: tokens since the newest usable snapshot are computed again.
        """
        if not self._states.shapes or self._states.n_tokens == self.n_past:
            return
        self._wait()
        first = self._states.go_back(self.n_past)
        self._send_states()
        if first < self.n_past:
            self._kv.reserve(first, self.n_past)  # copies pages that others hold, too
            self._drop(first)
        for run in self._pieces(self._tokens, first, self._again):
            self._states.begin()
            self._run(self._tokens, run, 0, range(first, self.n_past))
            self._states.end(run.stop)

    def _again(self, n: int) -> Iterator[range]:
        """The chunks of n tokens that are run again."""
        return chunks(0, n, self.n_ubatch, self._few)

    def _pieces(
        self, tokens: Sequence[int], first: int, cut: Callable[[int], Iterator[range]]
    ) -> Iterator[Run]:
        """The chunks of tokens[first:], of text or of one picture; cut: those of n text tokens.

        Raises ValueError for a picture that is not held, or has no room in a chunk.
        """
        for run in self._loaded.pictures.runs(tokens[first:]):
            start, n = first + run.start, run.stop - run.start
            if run.rows is None:
                for at in cut(n):
                    yield Run(start + at.start, start + at.stop)
                continue
            if not run.rows.causal:
                self._check_picture(run, n)
            for row in range(0, n, self.n_ubatch):
                stop = start + min(row + self.n_ubatch, n)
                yield Run(start + row, stop, run.rows, run.first + row)

    def _check_picture(self, run: Run, n: int) -> None:
        """Raise ValueError unless all rows of a picture that see each other are in one chunk."""
        assert run.rows is not None
        whole = len(run.rows.values)
        if n < whole:
            raise ValueError(
                f"the prompt has {n} of a picture's {whole} rows, which see each other: truncate "
                "the sequence to the tokens before the picture"
            )
        if whole > self.n_ubatch:
            raise ValueError(
                f"a picture has {whole} rows, which are computed at once, n_ubatch is "
                f"{self.n_ubatch}: raise n_ubatch to at least {whole}"
            )

    def _run(
        self, tokens: Sequence[int], run: Run, past: int, prompt: range, *, lasting: bool = True
    ) -> None:
        """Run a chunk of tokens, from position past + run.start on."""
        chunk = np.array(tokens[run.start : run.stop], np.int64)
        placed = run._replace(start=past + run.start, stop=past + run.stop)
        places, rows = self._places(placed), None
        if run.rows is not None:
            n = run.stop - run.start
            values = run.rows.values[run.first : run.first + n]
            rows = Rows(values, run.rows.causal)
        self._forward.prefill(
            np.maximum(chunk, 0).astype(np.int32),
            placed.start,
            prompt,
            lasting=lasting,
            rows=rows,
            places=places,
        )
        self._note_grid(placed)

    def _find_grids(self) -> None:
        """Note the grids of all pictures that it holds. Raises ValueError as _pieces does."""
        if self._loaded.model.hp.rope_sections and self._loaded.pictures.stand_in(self._tokens):
            for run in self._loaded.pictures.runs(self._tokens):
                self._note_grid(run)

    def _note_grid(self, run: Run) -> None:
        """Note the positions that a picture in a grid takes, once all its rows are there."""
        if run.rows is None or not any(run.rows.grid):
            return
        n = len(run.rows.values)
        if run.first + run.stop - run.start == n and (run.stop, 0) > self._last_grid():
            self._grids.append((run.stop, max(run.rows.grid) - n))

    def _last_grid(self) -> tuple[int, int]:
        return (self._grids[-1][0], 0) if self._grids else (-1, 0)

    def _places(self, run: Run) -> np.ndarray | None:
        """The positions of time, height and width of a run, int64 [n, 3]; None: as counted."""
        in_grid = run.rows is not None and any(run.rows.grid)
        if not self._grids and not in_grid:
            return None
        before = run.start - run.first if in_grid else run.start
        shift = sum(more for end, more in self._grids if end <= before)
        n = run.stop - run.start
        if run.rows is None or not in_grid:
            return np.tile(np.arange(run.start, run.stop)[:, None] + shift, (1, 3))
        columns, at = run.rows.grid[0], np.arange(run.first, run.first + n)
        grid = np.stack([np.zeros(n, np.int64), at // columns, at % columns], axis=1)
        return grid + before + shift

    def _send_states(self) -> None:
        """Copy the recurrent states to where kernels read them."""
        for stage in self._stages:
            stage.backend.send(*self._states.views(stage.layers))

    def _fetch_states(self) -> None:
        """Copy the recurrent states to where Python reads them."""
        for stage in self._stages:
            stage.backend.fetch(*self._states.views(stage.layers))

    @typed
    def remove(self, first: int, end: int) -> None:
        """Drop tokens first .. end - 1; later ones move down, and their keys are re-rotated.

        Later tokens keep what they have read of the dropped ones: this is llama.cpp's context
        shift, not the result of a prompt without those tokens. It needs as much additional memory
        as the KV cache from `first` on. Raises ValueError if there are no such tokens. A KV cache
        in a file has no such copy: a call that fails or is interrupted then leaves only whole pages
        of the tokens before `first`, and the error says so.
        """
        if not 0 <= first <= end <= self.n_past:
            raise ValueError(f"cannot remove tokens {first} to {end} of {self.n_past}")
        if first == end:
            return
        if self._states.shapes and end < self.n_past:
            raise ValueError(
                f"tokens {first} to {end} of {self.n_past} are part of the states of recurrent "
                "layers: truncate the sequence, and append what comes after them again"
            )
        if end == self.n_past:
            self.truncate(first)
            return
        before, model = self._tokens, self._loaded.model
        if self._grids:
            raise ValueError(
                "the sequence has a picture with positions in a grid, whose keys cannot move: "
                "truncate the sequence, and append what comes after the tokens again"
            )
        gone, neox = range(first, end), model.arch.neox
        self._kv.reserve(first, self.n_past)  # copies pages that others hold, too
        self._fetch_kv()
        kept = self._kv.pages_from(first) if self._kv.kv_ram is None else None
        try:
            for i, layer in enumerate(model.kv_layers):
                pairs = Pairs(model.frequencies(layer).inv_freq, neox, self._bases.get(layer))
                close_up(self._kv, i, len(before), gone, pairs)
            self._send_kv()
            self._tokens = before[:first] + before[end:]
            self._drop(first)
            self.recall()
        except BaseException as error:
            self._tokens = before
            if kept is None:
                self.truncate(first // PAGE * PAGE)
                error.add_note(f"the session holds its first {self.n_past} tokens only")
            else:
                self._kv.put_back(first, kept)
                self._drop(first)
            self._send_kv()
            raise
        self._kv.truncate(self.n_past)

    def check_compressible(self) -> None:
        """Raise ValueError if `compact` does not work for this model or session."""
        model, why = self._loaded.model, ""
        if model.has_score_mod or model.arch.is_encoder:
            why = "a model that caps or biases scores, or embeds texts"
        elif self.has_states or len(self._loaded.hp.kinds) > 1 or self._loaded.hp.latent.n_latent:
            why = "a model with recurrent layers, latent attention or heads of several shapes"
        elif self.kv_ram is not None or self.kv_vram is not None:
            why = "a KV cache in a file, or in RAM behind a GPU"
        elif any(stage.state.n_recall for stage in self._stages):
            why = "an attention method that learns from the last queries of a prompt"
        if why:
            raise ValueError(f"the KV cache cannot be compressed: this is {why}")

    def compact(self, kept: Sequence[np.ndarray | None], n_kept: int) -> None:
        """Keep n_kept positions of each KV head, moved together to the first positions.

        kept: int64 [n_head_kv, n_kept] of each layer with a KV cache, ascending; None: the last
        ones. Keys are re-rotated by as many positions as are gone: the distances to later tokens
        stay. `tokens` become the last ones; see `rename`. A call that fails changes nothing. Raises
        ValueError, MemoryError.
        """
        self.check_compressible()
        before, model = self._tokens, self._loaded.model
        n_token = len(before)
        self._kv.reserve(0, n_token)  # copies pages that others hold, too
        self._fetch_kv()
        undo = self._kv.pages_from(0)
        try:
            for i, layer in enumerate(model.kv_layers):
                inv_freq = model.frequencies(layer).inv_freq
                pairs = Pairs(inv_freq, model.arch.neox, self._bases.get(layer))
                move_together(self._kv, i, n_token, kept[i], n_kept, pairs)
            self._send_kv()
            self._tokens = before[n_token - n_kept :]
            self._drop(0)
        except BaseException:
            self._tokens = before
            self._kv.put_back(0, undo)
            self._send_kv()
            self._drop(0)
            raise
        self._kv.truncate(n_kept)

    def rename(self, tokens: Sequence[int]) -> None:
        """Call what it holds by other tokens, as many; numbers below 0 are those of no text."""
        assert len(tokens) == self.n_past
        self._tokens = list(tokens)

    def keys(self, layer: int, first: int, end: int) -> np.ndarray:
        """Keys of a layer as they are stored, f32 [end - first, n_head_kv, head_dim].

        layer: counted over those with a KV cache. With the queries of `noted_queries` they make
        the same scores as in attention.
        """
        self._fetch_kv()
        page = first // PAGE
        k, _ = self._kv.read(layer, end, page)
        return as_float32(k[first - page * PAGE :])

    def noted_queries(self, layer: int, first: int, end: int) -> np.ndarray:
        """The queries of positions first .. end - 1, which a LastPrompt method has noted.

        f32 [end - first, n_head, head_dim].
        """
        (stage,) = [stage for stage in self._stages if layer in stage.layers]
        noted = stage.state.noted_queries()
        assert noted is not None, "the session was opened with a method that notes no queries"
        fields = noted.of(layer)
        stage.backend.fetch(fields["past"], fields["past_pos"])
        at = np.arange(first, end) % fields["n_past"]
        assert (fields["past_pos"][at] == np.arange(first, end)).all(), "queries that are gone"
        return fields["past"][at]

    def _drop(self, n_tokens: int) -> None:
        """Make the methods drop their state of positions from n_tokens on."""
        for stage in self._stages:
            stage.backend.fetch(*stage.state.counters)
            stage.state.truncate(n_tokens)
            stage.backend.send(*stage.state.counters)

    @typed
    def copy(self, other: "Session", n_tokens: int | None = None) -> None:
        """Replace the sequence by another session's of the same engine, or its first n_tokens.

        If both have the same types in memory, they share its pages until one of them writes. Raises
        ContextError, ValueError if the other holds fewer.
        """
        self._check_open()
        other._check_open()
        n_tokens = other.n_past if n_tokens is None else n_tokens
        if not 0 <= n_tokens <= other.n_past:
            raise ValueError(f"cannot copy {n_tokens} tokens of {other.n_past}")
        self._check_room(f"what is copied is {n_tokens}", n_tokens)
        self.truncate(0)
        if not self._kv.share(other._kv, n_tokens):
            other._fetch_kv()
            for i, layer in enumerate(self._loaded.model.kv_layers):
                k, v = other._kv.read(i, n_tokens)
                self._kv.write(i, self._keys(layer, k, other._bases.get(layer)), v)
            self._send_kv()
        self._tokens = other.tokens[:n_tokens]
        self._grids = [grid for grid in other._grids if grid[0] <= n_tokens]
        other._fetch_states()
        self._states.copy(other._states, n_tokens)
        self._send_states()
        self._go_back()
        self.recall()

    @property
    def identity(self) -> bytes:
        """A digest of what the KV cache and states depend on beside tokens.

        These are weights, types, methods and devices. It is the same in every process that has
        opened the same file in the same way.
        """
        loaded = self._loaded
        where = [place.kv_device for place in loaded.places]
        where += ["keys in a basis"] if self._bases else []
        text = repr([self._fingerprint(), tuple(self.kv_types), repr(self.selector), *where])
        return hashlib.sha256(loaded.file.identity() + text.encode()).digest()

    @property
    def has_states(self) -> bool:
        """Whether some layers are recurrent: appended pages then need their state."""
        return bool(self._states.shapes)

    def pages(self, first: int, end: int) -> np.ndarray:
        """Copies of pages first .. end - 1 of the KV cache, uint8 [n_page, bytes of a page].

        They cover all layers; unused positions of the last page are 0. Raises KVFileError,
        MemoryError.
        """
        self._check_open()
        assert 0 <= first < end <= -(-self.n_past // PAGE), "pages that are not held"
        self._fetch_kv()
        return read_pages(self._kv, self._loaded, first, min(end * PAGE, self.n_past))

    def states(self) -> list[tuple[int, np.ndarray]]:
        """Copies of the recurrent states, each with its number of tokens.

        The current one is last.
        """
        self._check_open()
        self._fetch_states()
        states = [(n, values.copy()) for n, values in self._states.kept() if n < self.n_past]
        if self._states.n_tokens == self.n_past and self.has_states:
            states.append((self.n_past, self._states.live.copy()))
        return states

    def append_pages(
        self, ids: Sequence[int], pages: Sequence[np.ndarray], state: np.ndarray | None = None
    ) -> None:
        """Append tokens whose KV cache is known: rows that `pages` of such a session returned.

        The session must hold whole pages. state: of recurrent layers after the last token, if the
        model has some. The caller must ensure that the pages belong to these tokens; nothing checks
        it. Raises ValueError, ContextError, KVFileError, OutOfPagesError.
        """
        tokens, before = self._checked(ids, compressed=True).tolist(), self.n_past
        n = before + len(tokens)
        n_page, size = -(-len(tokens) // PAGE), page_bytes(self._loaded, self.kv_types)
        if before % PAGE:
            raise ValueError(f"the session holds {before} tokens, expected whole pages of {PAGE}")
        if (sizes := [page.nbytes for page in pages]) != [size] * n_page:
            raise ValueError(f"pages have {sizes} bytes, expected {n_page} of {size}")
        if (state is not None) != self.has_states or (
            state is not None and state.size != self._states.live.size
        ):
            raise ValueError("a state is needed where layers are recurrent, of their size")
        self._fetch_kv()
        try:
            self._kv.reserve(before, n)  # even if no layer has keys
            write_pages(self._kv, self._loaded, before // PAGE, n, pages)
            self._send_kv()
            self._tokens += tokens
            self._find_grids()
            if state is not None:
                self._states.load(state, n)
                self._send_states()
            self.recall()
        except BaseException:
            self._wait()
            self.truncate(before)
            raise

    def recall(self) -> None:
        """Run the last tokens again for a method that learns from queries; few methods need it.

        The KV cache is not changed: a file's may come from another method's prefill.
        """
        n = min(max(stage.state.n_recall for stage in self._stages), self.n_past)
        if n == 0:
            return
        first = whole_pictures(self._tokens, self.n_past - n)
        if min(self._tokens[first:]) < 0 and not self._loaded.pictures.hold(self._tokens[first:]):
            raise ValueError(
                "the method learns from the last tokens, which are compressed, or of a picture "
                "that is not held: take another method, or encode the picture again"
            )
        if self._states.shapes:
            first = self._states.go_back(first)
            self._send_states()
        self._kv.reserve(first, self.n_past)
        self._fetch_kv()
        pages = self._kv.pages_from(first)
        try:
            prompt = range(first, self.n_past)
            for run in self._pieces(self._tokens, first, self._again):
                self._states.begin()
                self._run(self._tokens, run, 0, prompt, lasting=False)
                self._states.end(run.stop)
        finally:
            self._wait()
            self._kv.put_back(first, pages)
            self._send_kv()

    def check_weights(self) -> None:
        """Raise GGUFError if weights have changed since they were loaded.

        A copy that was made of them is read whole and compared. Call it where logits are not
        finite, or text makes no sense.
        """
        self._loaded.file.check_unchanged(thorough=True)

    @typed
    def save(self, path: str | Path) -> None:
        """Write tokens and the KV cache to a file, whole or not at all.

        Of pictures it has the KV cache, as of all tokens, and not the rows: what reads them again
        needs the pictures themselves (see `Engine.picture_ids`).

        An existing session file is replaced. Raises OSError; SessionFileError if another kind of
        file has that name, which is not changed.
        """
        self._check_open()
        session_file.check_replaced(Path(path))
        header: dict[str, Any] = {"model": self._fingerprint(), "tokens": self._tokens}
        header |= {"kv": self.kv_types} | ({"basis": BASIS} if self._bases else {})
        if min(self._tokens, default=0) < 0:
            header["compressed"] = True  # or has pictures: tokens below 0
        if self._grids:
            header["grids"] = self._grids
        session_file.write(Path(path), header, self._arrays())

    @typed
    def load(self, path: str | Path) -> None:
        """Replace the sequence by a saved one.

        A KV cache of another type than this session's is converted. The session's content is copied
        first, and restored if loading fails or is interrupted; a KV cache in a file has no such
        copy, so that the session is then empty. Raises SessionFileError (damaged, other version or
        model), ContextError before anything has changed, OSError.
        """
        self._check_open()
        with SessionFile(Path(path)) as saved:
            tokens, types = self._saved(saved)
            grids = self._saved_grids(saved, len(tokens))
            bases = self._loaded.all_bases() if "basis" in saved.header else {}
            caches = [self._loaded.hp.of_cache(layer) for layer in self._loaded.model.kv_layers]
            rows = [
                ((len(tokens), hp.n_head_kv), kv_row(type, hp.head_dim))
                for hp in caches
                for type in types
            ]
            sizes = [math.prod(shape) * row.itemsize for shape, row in rows]
            states = [self._states.live.nbytes] if self._states.shapes else []
            arrays = saved.arrays(sizes + states)
            for shape, row in rows:
                if not all_finite(np.ndarray(shape, row, next(arrays))):
                    raise saved.error("has keys or values that are not numbers")
            for array in arrays:
                if not np.isfinite(array.view(np.float32)).all():
                    raise saved.error("has recurrent states that are not numbers")
            arrays = saved.arrays(sizes + states)
            with self._restoring():
                self._kv.reserve(0, len(tokens))  # even if no layer has keys
                for i, layer in enumerate(self._loaded.model.kv_layers):
                    k, v = (
                        np.ndarray(shape, row, next(arrays))
                        for shape, row in rows[2 * i : 2 * i + 2]
                    )
                    self._kv.write(i, self._keys(layer, k, bases.get(layer)), v)
                self._send_kv()
                for array in arrays:
                    self._states.load(array.view(np.float32), len(tokens))
                    self._send_states()
                self._tokens, self._grids = tokens, grids
                self.recall()

    def _saved_grids(self, saved: SessionFile, n: int) -> list[tuple[int, int]]:
        """The checked grids of a saved session of n tokens. Raises SessionFileError."""
        grids, given = list[tuple[int, int]](), saved.header.get("grids", [])
        last, gone = 0, 0
        entries: list[Any] = given if isinstance(given, list) else [given]
        for each in entries:
            whole = isinstance(each, list) and [type(x) for x in each] == [int, int]
            if not whole or not last < each[0] <= n or not -each[0] <= gone + each[1] <= gone:
                raise saved.error(f"has a picture's grid {each!r:.60}")
            grids.append((each[0], each[1]))
            last, gone = each[0], gone + each[1]
        if grids and not self._loaded.model.hp.rope_sections:
            raise saved.error("has pictures in grids, which this model does not have")
        return grids

    def _saved(self, saved: SessionFile) -> tuple[list[int], KVTypes]:
        """The checked tokens and types of a saved session.

        Raises SessionFileError, ContextError.
        """
        hp, header = self._loaded.hp, saved.header
        if header.get("model") != self._fingerprint():
            raise SessionFileError(f"{saved.path} was saved for another model: load it there")
        if header.get("basis", BASIS) != BASIS:
            raise saved.error(f"has keys in basis {header['basis']!r}, this program has {BASIS}")
        tokens, kv = header.get("tokens"), header.get("kv", KVTypes())
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise saved.error("has no list of token ids")
        self._check_room(f"{saved.path} holds {len(tokens)}", len(tokens))
        # Tokens below 0 are those of a compressed text (see engine/reuse/compressing.py) or stand
        # for rows of pictures.
        least = -1 << 31 if header.get("compressed") is True else 0
        if wrong := [token for token in tokens if not least <= token < hp.n_vocab]:
            raise saved.error(f"has token id {wrong[0]}, the vocabulary has {hp.n_vocab} tokens")
        # Files from before types could be chosen have none.
        if not isinstance(kv, list | KVTypes) or len(kv) != 2:
            raise saved.error(f"has a KV cache of the types {kv!r}")
        types = KVTypes(*kv)
        try:
            for shape in hp.kinds:
                types.check(shape.head_dim)
        except ValueError as error:
            raise saved.error(f"does not fit the model ({error})") from None
        return tokens, types

    def _keys(self, layer: int, k: np.ndarray, basis: KeyBasis | None) -> np.ndarray:
        """Keys of another session, stored in a basis or as they are, as this session stores them.

        If nothing differs but the type, `write` converts it.
        """
        target = self._bases.get(layer)
        if target is basis:
            return k
        x = as_float32(k) if basis is None else basis.original(as_float32(k))
        return as_rows(x if target is None else target.stored(x), self.kv_types.k)

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """A context in which an emptied sequence is replaced; it is restored if that fails."""
        before, grids, kept = self._tokens, self._grids, None
        self._fetch_kv()
        if self._kv.kv_ram is None:
            self._kv.reserve(0, len(before))  # copies pages that others hold, too
            kept = self._kv.pages_from(0)
        try:
            self._tokens = []  # a new list: the old one is restored if loading fails
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
                self._tokens, self._grids = before, grids
                self._go_back()
                self.recall()
            raise

    def _append(
        self, ids: Sequence[int], progress: TokenProgress | None
    ) -> Generator[tuple[np.ndarray, bool], None, None]:
        """Run the chunks of `ids`; yields the rows of each, and whether it is the last.

        The tokens are held once the generator ends; on any error their pages are released.
        """
        tokens, n_past = self._checked(ids), self.n_past
        for _, meter in self._meters:
            meter.reset()
        try:
            self._kv.reserve(n_past, n_past + len(tokens))
            prompt = range(n_past, n_past + len(tokens))
            self._keep_states()
            numbers = tokens.tolist()
            for run in self._pieces(numbers, 0, self._cut):
                self._loaded.file.check_unchanged()
                self._states.begin()
                self._run(numbers, run, n_past, prompt)
                self._states.end(n_past + run.stop)
                self._keep_states()
                if progress is not None:
                    progress(run.stop, len(tokens))
                yield tokens[run.start : run.stop], run.stop == len(tokens)
            self._tokens += numbers
        finally:
            self._grids = [grid for grid in self._grids if grid[0] <= self.n_past]
            self._kv.truncate(self.n_past)
            self._go_back()

    def _cut(self, n: int) -> Iterator[range]:
        """The chunks of n tokens of a prompt."""
        return of_prompt(n, self.n_ubatch, self._few)

    def _checked(self, ids: Sequence[int], *, compressed: bool = False) -> np.ndarray:
        """The ids as int32, all within the vocabulary and the context; checks the weights.

        Negative ones stand for rows of pictures that the engine holds; compressed: they may also
        be those of a compressed text.
        """
        self._check_open()
        check_ids(ids)
        self._loaded.file.check_unchanged()
        tokens = np.asarray(ids, np.int64)
        if tokens.ndim != 1 or len(tokens) == 0:
            raise ValueError("no tokens: expected a sequence of at least one token id")
        n_vocab = self._loaded.hp.n_vocab
        least = -1 << 31
        if not compressed and (len(tokens) == 1 or not self._loaded.pictures.has_any):
            least = 0
        wrong = tokens[(tokens < least) | (tokens >= n_vocab)]
        if len(wrong):
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary of {n_vocab} tokens")
        if self.n_past + len(tokens) > self.n_ctx:
            held = f" after {self.n_past} held" if self.n_past else ""
            raise ContextError(
                f"prompt is {len(tokens)} tokens{held}, n_ctx is {self.n_ctx}: raise n_ctx "
                f"to at least {self.n_past + len(tokens)} or shorten the prompt"
            )
        if self._loaded.model.arch.is_encoder:
            self._check_whole(len(tokens))
        return tokens.astype(np.int32)

    def _check_whole(self, n: int) -> None:
        """Raise an error if an encoder would not read the whole text at once."""
        if self.n_past:
            raise ContextError("this model embeds texts whole: truncate the session to 0 tokens")
        if n > self.n_ubatch:
            raise ContextError(
                f"the text is {n} tokens, n_ubatch is {self.n_ubatch}: this model reads a text at "
                f"once, raise n_ubatch to at least {n}"
            )

    def _check_predicts(self) -> None:
        if self._loaded.model.arch.is_encoder:
            raise ValueError("this model embeds texts, it has no logits: use hidden")

    def _check_room(self, holds: str, n_tokens: int) -> None:
        if n_tokens > self.n_ctx:
            raise ContextError(f"{holds} tokens, n_ctx is {self.n_ctx}: raise n_ctx")

    def _fingerprint(self) -> str:
        """The text that a session file must agree with: the model's shapes and tensor table."""
        tensors = [(t.name, t.shape, t.type.name) for t in self._loaded.file.tensors.values()]
        shape, *more = shape_text(self._loaded.hp)
        more += [self._loaded.model.adapters] if self._loaded.model.adapters else []
        text = json.dumps([shape, tensors, *more])
        return hashlib.sha256(text.encode()).hexdigest()

    def _arrays(self) -> Iterator[np.ndarray]:
        self._fetch_kv()
        for layer in range(len(self._loaded.model.kv_layers)):
            yield from self._kv.read(layer, self.n_past)
        if self._states.shapes:
            self._fetch_states()
            yield self._states.live

    def _fetch_kv(self) -> None:
        """Copy the KV cache of all layers to where Python reads it."""
        for stage in self._stages:
            stage.backend.fetch(*stage.kv.arrays)

    def _send_kv(self) -> None:
        """Copy the KV cache of all layers to where kernels read it."""
        for stage in self._stages:
            stage.backend.send(*stage.kv.arrays)

    def _wait(self) -> None:
        """Wait for all started work, which may write to the KV cache."""
        for stage in self._stages:
            stage.backend.fetch()


def _check_positions(model: Model, n_ctx: int, audit: int, *, is_dense: bool) -> None:
    """Raise ValueError if a model's positions do not allow these settings."""
    n_learned, n_most = model.hp.n_ctx_train, model.hp.most_ctx
    if 0 < n_most < n_ctx:
        raise ValueError(
            f"n_ctx is {n_ctx}, expected at most {n_most}: beyond, {model.hp.arch} attends in a "
            "way that is not supported"
        )
    if model.arch.positions and model.weights.top.position_embd and n_ctx > n_learned:
        raise ValueError(f"n_ctx is {n_ctx}, this model learned {n_learned} positions: lower n_ctx")
    if model.arch.is_encoder and not is_dense:
        raise ValueError("this model embeds texts: attn and prefill can only be dense")
    if audit and (model.has_score_mod or model.arch.is_encoder):
        raise ValueError("audit is not supported for models with capped scores or ALiBi")


def _check_audited(loaded: LoadedModel, audit: int) -> None:
    """Raise ValueError for an audit of several devices."""
    if audit and len(loaded.places) > 1:
        raise ValueError(
            "audit needs all layers on one device: leave out one of audit and n_gpu_layers"
        )


def _check_types(loaded: LoadedModel, types: KVTypes) -> None:
    """Raise ValueError for types that the device or the model's row widths do not support."""
    for shape in loaded.hp.kinds:
        types.check(shape.head_dim)
    if loaded.hp.latent.n_latent and types.k != types.v:
        raise ValueError(
            f"type_v is {types.v}, expected {types.k}: this model keeps one latent, which is key "
            "and value"
        )
    for type in types:
        if type not in loaded.backend.kv_types:
            raise ValueError(f"this device has no {type} KV cache: use f16")


def _opened(
    loaded: LoadedModel, selector: Selector, shape: SelectorShape, key_copy: int | None
) -> tuple[list[SelectorState], dict[str, int]]:
    """The method's state on each device, and the bytes of keys that they keep, by device."""
    chosen, copies = [], dict.fromkeys((place.kv_device for place in loaded.places), 0)
    for place in loaded.places:
        on_host = place.kv_backend.on_host
        bits = _copy_bits(key_copy, on_host=on_host)
        chosen.append(selector.open(replace(shape, on_gpu=not on_host, key_copy=bits)))
        copies[place.kv_device] += chosen[-1].n_bytes
    return chosen, copies


def _copy_bits(key_copy: int | None, *, on_host: bool) -> int:
    """The bits of a device's copy of keys. Raises ValueError for what it has no kernels for."""
    known = (0, 8) if on_host else (0, 4, 8)
    if key_copy is None:
        return 8 if on_host else 4
    if key_copy not in known:
        device = "a CPU" if on_host else "a GPU"
        choices = ", ".join("none" if bits == 0 else str(bits) for bits in known)
        raise ValueError(f"key_copy is {key_copy}, expected one of {choices} on {device}")
    return key_copy


def _whole_cache(model: Model, stages: Sequence[Stage]) -> KVCache:
    """One view of the KV caches of all stages, each of which has its own layers."""
    if len(stages) == 1:
        return stages[0].kv
    layers = model.kv_layers
    of_stages = [[i for i, layer in enumerate(layers) if layer in stage.layers] for stage in stages]
    return CompositeKV([(mine, stage.kv) for mine, stage in zip(of_stages, stages, strict=True)])


def _selector_shape(
    hp: HParams, window: tuple[int, ...], n_ctx: int, n_ubatch: int
) -> SelectorShape:
    return SelectorShape(
        n_layer=hp.n_layer,
        n_head=hp.n_head,
        n_head_kv=hp.n_head_kv,
        head_dim=hp.head_dim,
        n_ctx=n_ctx,
        n_ubatch=n_ubatch,
        window=window,
        attention_scale=hp.attention_scale,
    )
