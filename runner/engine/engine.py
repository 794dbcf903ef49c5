"""A model on a backend: weights, vocabulary and template, shared by any number of sessions."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tamis.arch.load import load_model
from tamis.formats.gguf import GGUFFile
from tamis.formats.vocab import Vocab
from tamis.graph.workspace import workspace_bytes
from tamis.jit_kernels.backends import HOST, on_host
from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.backends.devices import open_gpu, open_host
from tamis.jit_kernels.compile.library import KernelLibrary
from tamis.kv.disk_tier import UNIT
from tamis.kv.page_store import PageStore, most_slots
from tamis.kv.types import KVOptions, KVTypes, Tier, kv_bytes
from tamis.model.hparams import HParams, RopeScaling
from tamis.model.model import Model
from tamis.model.placement import Place, devices, one_place, two_places
from tamis.model.repack import Filling, arrange
from tamis.select.base import Selector
from tamis.select.notation import parse_methods
from tamis.text.chat_template import ChatTemplate, default_template, encode_chat
from tamis.text.tokenizer import Tokenizer, tokenizer_for

if TYPE_CHECKING:
    from tamis.engine.session import Session

Progress = Callable[[str, int, int | None], None]
DEFAULT_CTX = 8192  # where the caller names none and the model was trained on more
# Tokens of a prompt that are computed at once where the caller names no number; and where a GPU has
# all layers, keys and values, and room: it reads prompts 1.4 times faster then.
N_UBATCH, N_UBATCH_GPU = 512, 2048


class MemoryPlan(NamedTuple):
    """Bytes a session will take. Weights, all sessions' together, are not among the available."""

    weights: int
    kv: int
    workspace: int
    available: int
    disk: int = 0  # of the file of keys and values that memory has no room for
    host: int = 0  # of RAM, for the keys and values that a GPU's memory has no room for

    @property
    def fits(self) -> bool:
        """Whether what a session takes is free."""
        return self.kv + self.workspace <= self.available


class Engine:
    """A loaded model. Immutable; sessions share its weights and its thread team."""

    def __init__(
        self,
        file: GGUFFile,
        model: Model,
        vocab: Vocab,
        places: Sequence[Place],
        filling: Filling,
    ) -> None:
        self._file, self.model, self.vocab, self._filling = file, model, vocab, filling
        self.places = tuple(places)
        self.tokenizer: Tokenizer = tokenizer_for(vocab)
        self._template: ChatTemplate | None = None
        self._stores: dict[tuple[int, KVTypes], PageStore] = {}  # also by their layers

    @staticmethod
    def load(
        path: str | Path,
        *,
        n_threads: int | None = None,
        library: KernelLibrary | None = None,
        device: str = HOST,
        n_gpu_layers: int = -1,
        offload_kqv: bool = True,
        rope: RopeScaling | None = None,
        progress: Progress | None = None,
    ) -> "Engine":
        """Open a GGUF file. Weights are mapped, not read.

        n_threads: None = one a core this process may use. library: of kernels, the process's own by
        default; KernelLibrary(level="avx2") forces a level. device: "cpu" or "cuda". n_gpu_layers:
        how many of the last layers are on the latter, the others and the output on the CPU; more
        than there are, or -1: all, and the output. offload_kqv: False leaves keys, values and
        attention to the CPU wherever the layers are. rope: how positions are stretched, instead of
        what the file says; n_ctx_orig 0: its training context. progress(stage, done, total).
        Raises FileNotFoundError, GGUFError, ArchError, TokenizerError, ValueError, CudaError.
        """
        report = progress or (lambda stage, done, total: None)
        n_threads = n_threads if n_threads is not None else len(os.sched_getaffinity(0))
        if not 1 <= n_threads <= 1024:
            raise ValueError(f"n_threads is {n_threads}, expected 1 to 1024")
        gpu = None if on_host(device) or not n_gpu_layers else open_gpu()
        report("load", 0, 3)
        file = GGUFFile(path)
        model = load_model(file, rope)
        report("load", 1, 3)
        cpu = open_host(n_threads, library)
        places = one_place(cpu, model.hp.n_layer)
        if gpu is not None:
            places = two_places(cpu, gpu, model.hp.n_layer, n_gpu_layers)
        model, copies = arrange(model, places[0])
        filling = Filling(places[0].backend, copies, file.release_pages)
        try:
            vocab = Vocab.from_gguf(file)
            if len(vocab.tokens) != model.hp.n_vocab:
                raise file.error(
                    f"{len(vocab.tokens)} tokens, but token_embd.weight has {model.hp.n_vocab} "
                    "rows",
                    key="tokenizer.ggml.tokens",
                )
            report("load", 2, 3)
            engine = Engine(file, model, vocab, places, filling)
        except BaseException:
            filling.stop()
            raise
        report("load", 3, 3)
        return engine if offload_kqv else engine.with_kv_on_host()

    @property
    def hp(self) -> HParams:
        """The model's shapes."""
        return self.model.hp

    @property
    def n_threads(self) -> int:
        """That an op's work is shared by where the first layers run."""
        return self.places[0].backend.n_thread

    @property
    def backend(self) -> Backend:
        """Where the last layers run."""
        return self.places[-1].backend

    @property
    def path(self) -> Path:
        """The file that was opened."""
        return Path(self._file.path)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's metadata."""
        return self._file.metadata

    @property
    def file(self) -> GGUFFile:
        """The open file, for its tensor table."""
        return self._file

    @property
    def chat_template(self) -> ChatTemplate:
        """The file's chat template, or the usual one for its tokens. Raises PromptError."""
        if self._template is None:
            source = self.vocab.chat_template or default_template(self.vocab.tokens)
            bos, eos = (
                "" if i is None else self.vocab.tokens[i]
                for i in (self.tokenizer.bos, self.tokenizer.eos)
            )
            self._template = ChatTemplate(source, bos=bos, eos=eos)
        return self._template

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Special tokens are recognised in the template's text only, never in a message. A leading
        BOS that the template itself does not write is added where the model wants one. Raises
        PromptError.
        """
        return encode_chat(self.tokenizer, self.chat_template, messages)

    def memory_plan(
        self,
        n_ctx: int | None = None,
        n_ubatch: int | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        *,
        kv_ram: int | None = None,
        kv_vram: int | None = None,
    ) -> MemoryPlan:
        """What a session of n_ctx tokens takes, and what is free once the weights are copied.

        Of a model on two devices: all of it, which fits if each part does; see `memory_plans`.
        """
        limits = {"kv_ram": kv_ram, "kv_vram": kv_vram}
        plans = list(self.memory_plans(n_ctx, n_ubatch, type_k, type_v, **limits).values())
        if len(plans) == 1:
            return plans[0]
        weights, kv, workspace, _, disk, host = map(sum, zip(*plans, strict=True))
        fullest = min(plan.available / (plan.kv + plan.workspace) for plan in plans)
        return MemoryPlan(weights, kv, workspace, int(fullest * (kv + workspace)), disk, host)

    def memory_plans(
        self,
        n_ctx: int | None = None,
        n_ubatch: int | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        *,
        kv_ram: int | None = None,
        kv_vram: int | None = None,
    ) -> dict[str, MemoryPlan]:
        """The plan of each device that `places` are on.

        n_ubatch: as `session` chooses it where it is None. kv_ram is of the CPU's memory, kv_vram
        of a GPU's.
        """
        if n_ubatch is None:
            n_ubatch = self._n_ubatch(n_ctx, type_k, type_v, kv_vram)
        self._filling.finish()
        places, types = self.places, KVTypes(type_k, type_v)
        weights, plans = self.model.weights, {}
        elsewhere = sum(p.weight_bytes(weights) for p in places if not p.embedding)
        for device, runner in devices(places).items():
            # What no GPU has, such as the token embedding, is on the CPU.
            n_weight = sum(
                weights.n_bytes - elsewhere if p.embedding else p.weight_bytes(weights)
                for p in places
                if p.device == device
            )
            kv = sum(
                kv_bytes(p.share(self.hp), self.context(n_ctx), types)
                for p in places
                if p.kv_device == device
            )
            most = kv_ram if runner.on_host else kv_vram
            elsewhere_kv = kv if most is not None and most < kv else 0
            plans[device] = MemoryPlan(
                weights=n_weight,
                kv=most if most is not None and elsewhere_kv else kv,
                disk=elsewhere_kv if runner.on_host else 0,
                host=0 if runner.on_host else elsewhere_kv,
                workspace=workspace_bytes(self.model, n_ubatch, runner),
                available=runner.free_bytes(n_weight),
            )
        return plans

    def _n_ubatch(self, n_ctx: int | None, type_k: str, type_v: str, kv_vram: int | None) -> int:
        """Tokens of a prompt that are computed at once where the caller names no number."""
        if kv_vram is not None or any(p.kv_backend.on_host for p in self.places if p.layers):
            return N_UBATCH
        n_most = max(N_UBATCH, min(N_UBATCH_GPU, self.context(n_ctx)))
        plans = self.memory_plans(n_ctx, n_most, type_k, type_v)
        return n_most if all(plan.fits for plan in plans.values()) else N_UBATCH

    def with_kv_on_host(self) -> "Engine":
        """The same weights, for sessions whose keys, values and attention are on the CPU."""
        found = copy.copy(self)
        found.places = tuple(place.with_kv_on_host() for place in self.places)
        return found

    def page_store(self, place: Place, types: KVTypes, n_page: int) -> PageStore:
        """The pages that all sessions of these types share, or room of its own for one session.

        The latter on a device that copies whole arrays, and where address space is limited.
        """
        hp = place.share(self.hp)
        if not place.kv_backend.on_host or not place.layers:
            return PageStore(hp, types, n_page)
        key = hp.n_layer, types
        if key not in self._stores:
            try:
                n_slot = max(n_page, most_slots(hp, types))
                self._stores[key] = PageStore(hp, types, n_slot)
            except OSError:
                return PageStore(hp, types, n_page)
        return self._stores[key]

    def context(self, n_ctx: int | None) -> int:
        """The context in tokens that a session gets when asked for n_ctx (None or 0 = default)."""
        return n_ctx or min(self.hp.n_ctx_train, DEFAULT_CTX)

    def session(
        self,
        n_ctx: int | None = None,
        n_ubatch: int | None = None,
        attn: str | Selector = "dense",
        prefill: str = "dense",
        audit: int = 0,
        type_k: str = "f16",
        type_v: str = "f16",
        kv_ram: int | None = None,
        kv_dir: str | Path | None = None,
        kv_unit: int = UNIT,
        kv_vram: int | None = None,
        progress: Progress | None = None,
    ) -> "Session":
        """A new, empty sequence. Kernels that are missing are compiled now.

        n_ubatch: tokens of a prompt that are computed at once, 1 to 4096. None: 512; where a GPU
        has all layers, keys and values, up to 2048 if they fit.
        attn, prefill: the methods of decode steps and of prompts, as select.notation writes them,
        or the first as a Selector.
        audit: every how manyth decode step is checked against dense attention, 0 = none.
        type_k, type_v: what keys and values are kept as, "f16", "q8_0" or "q4_0".
        kv_ram: bytes of memory for keys and values; those of longer contexts are in a file of the
        folder kv_dir, which is read kv_unit tokens of a KV head at a time (1, 16 or 64). Decoding
        then raises KVFileError where the disk fails.
        kv_vram: bytes of a GPU's memory for keys and values; those of longer contexts are in RAM,
        from where the GPU brings the pages that it reads.
        Raises ValueError for sizes out of range and types that do not fit, MethodError for a method
        (or for one that does not read such keys), MemoryError where the plan does not fit,
        CompileError.
        """
        from tamis.engine.session import Session

        report = progress or (lambda stage, done, total: None)
        self._filling.finish(lambda done, total: report("arrange", done, total))
        if n_ubatch is None:
            n_ubatch = self._n_ubatch(n_ctx, type_k, type_v, kv_vram)
        return Session(
            self,
            n_ctx=self.context(n_ctx),
            n_ubatch=n_ubatch,
            selector=parse_methods(attn, prefill),
            kv=KVOptions(KVTypes(type_k, type_v), _tier(kv_ram, kv_dir, kv_unit), kv_vram),
            audit=audit,
            progress=progress,
        )

    def close(self) -> None:
        """End the threads, or free the device. Sessions must not be used afterwards."""
        self._filling.stop()
        for place in self.places:
            place.backend.close()
            if place.host is not None:
                place.host.close()


def _tier(kv_ram: int | None, kv_dir: str | Path | None, kv_unit: int) -> Tier | None:
    """The memory and the folder of a session's keys and values. Raises ValueError."""
    if (kv_ram is None) != (kv_dir is None):
        raise ValueError("kv_ram and kv_dir go together: how much memory, and where the rest is")
    if kv_ram is None or kv_dir is None:
        return None
    if not Path(kv_dir).is_dir():
        raise ValueError(f"kv_dir is {str(kv_dir)!r}, which is no folder: make it first")
    return Tier(kv_ram, Path(kv_dir), kv_unit)
