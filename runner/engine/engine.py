"""A model on a backend: weights, vocabulary and template, shared by any number of sessions."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from tamis.arch.load import load_model
from tamis.engine.checks import typed
from tamis.engine.loaded import LoadedModel
from tamis.formats.gguf import GGUFFile
from tamis.formats.vocab import Vocab
from tamis.jit_kernels.backends import HOST, on_host
from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.backends.devices import open_gpu, open_host
from tamis.jit_kernels.compile.library import KernelLibrary
from tamis.kv.types import UNIT, UNITS, KVOptions, KVTypes, Tier
from tamis.model.hparams import HParams, RopeScaling
from tamis.model.model import Model
from tamis.model.placement import Place, on_one_device, on_two_devices
from tamis.model.prepared import MOST, default_folder
from tamis.model.repack import Filling, Preparing, repack
from tamis.platform.processes import usable_cpus
from tamis.text import picture_marks
from tamis.text.tokenizer import Tokenizer
from tamis.vision.book import Book

# Modules of sessions are imported when one is opened: an error in a file is reported before.
if TYPE_CHECKING:
    from tamis.engine.adapters import Adapters
    from tamis.engine.memory_plan import MemoryPlan
    from tamis.engine.session import Progress, Session
    from tamis.select.base import Selector
    from tamis.text.chat_template import ChatTemplate
    from tamis.vision.families.load import Embedded, Encoder

MOST_ADAPTED = 8  # the most sets of adapters that are kept
PRECISIONS = FAST, EXACT = "fast", "exact"  # of a prompt's activations: see Engine.load
DEFAULT_CTX = 8192  # the default context if the model was trained on more


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
        self.loaded = LoadedModel.of(file, model, vocab, places)
        self._filling = filling
        self._template: ChatTemplate | None = None
        self._encoder: Encoder | None = None
        self._book = Book()

    @staticmethod
    @typed
    def load(
        path: str | Path,
        *,
        n_threads: int | None = None,
        library: KernelLibrary | None = None,
        device: str = HOST,
        n_gpu_layers: int = -1,
        offload_kqv: bool = True,
        rope: RopeScaling | None = None,
        prepare: bool | str | Path = True,
        prepare_max: int = MOST,
        precision: str = FAST,
        mmproj: str | Path | None = None,
        progress: "Progress | None" = None,
    ) -> "Engine":
        """Open a GGUF file. Weights are mapped, not read.

        path: of the file, or the name of a model that `tamis.pull` has fetched: "smollm2".
        n_threads: None = one for each processor that this process may use, and never more: each op
        would wait for threads that wait for a processor. library: of kernels, by default the
        process's own; KernelLibrary(level="avx2") forces a level. device: "cpu" or "cuda".
        n_gpu_layers: the number of last layers on a GPU, the others and the output being on the
        CPU; more than there are, or -1: all, and the output. offload_kqv: False keeps the KV cache
        and attention on the CPU wherever the layers are.

        rope: the scaling of positions, in place of the file's; n_ctx_orig 0: its training context.
        prepare: False keeps no copy of the weights on disk; a folder keeps it there, in place of
        the user's cache. prepare_max: bytes of all such copies; the least recently used ones are
        removed. precision: of a prompt's activations on the CPU, "fast" (8 bits with outliers as
        floats) or "exact" (14 bits at half the speed). mmproj: the
        file of an encoder of pictures for this model. progress(stage, done, total). Raises
        FileNotFoundError, GGUFError, ArchError, TokenizerError, ValueError, CudaError, and
        ModelError for a name without a file, with the remedy.
        """
        report = progress or (lambda stage, done, total: None)
        path = _file_of(path)
        n_cpu = usable_cpus()
        if n_threads is not None and not 1 <= n_threads <= 1024:
            raise ValueError(f"n_threads is {n_threads}, expected 1 to 1024")
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}, expected one of {', '.join(PRECISIONS)}")
        gpu = None if on_host(device) or not n_gpu_layers else open_gpu()
        report("load", 0, 3)
        file = GGUFFile(path)
        model = load_model(file, rope)
        report("load", 1, 3)
        cpu = open_host(min(n_threads or n_cpu, n_cpu), library)
        places = on_one_device(cpu, model.hp.n_layer)
        if gpu is not None:
            places = on_two_devices(cpu, gpu, model.hp.n_layer, n_gpu_layers)
        if len(places) > 1 and model.arch.one_device:
            raise ValueError(
                f"layers of {model.hp.arch} read more than what the one before them adds: "
                "they cannot be on two devices, leave out n_gpu_layers"
            )
        preparing = None
        if prepare is not False:
            folder = default_folder() if prepare is True else Path(prepare)
            preparing = Preparing(folder, prepare_max)
        model, copies = repack(model, places[0], file, preparing, exact=precision == EXACT)
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
            engine._encoder = None if mmproj is None else engine._open_encoder(mmproj)
        except BaseException:
            filling.stop()
            raise
        report("load", 3, 3)
        return engine if offload_kqv else engine.with_kv_on_host()

    @property
    def model(self) -> Model:
        """Shapes, architecture and weights."""
        return self.loaded.model

    @property
    def hp(self) -> HParams:
        """The model's shapes."""
        return self.loaded.hp

    @property
    def vocab(self) -> Vocab:
        """The file's vocabulary."""
        return self.loaded.vocab

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the vocabulary."""
        return self.loaded.tokenizer

    @property
    def places(self) -> tuple[Place, ...]:
        """The devices and the layers that each runs."""
        return self.loaded.places

    @property
    def n_threads(self) -> int:
        """The number of threads that share an op's work on the backend of the first layers."""
        return self.loaded.n_threads

    @property
    def backend(self) -> Backend:
        """The backend of the last layers."""
        return self.loaded.backend

    @property
    def path(self) -> Path:
        """The file that was opened."""
        return Path(self.file.path)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The file's metadata."""
        return self.file.metadata

    @property
    def file(self) -> GGUFFile:
        """The open file, for its tensor table."""
        return self.loaded.file

    @property
    def chat_template(self) -> "ChatTemplate":
        """The file's chat template, or the usual one for its tokens. Raises PromptError."""
        from tamis.text.chat_template import ChatTemplate, default_template

        if self._template is None:
            source = self.vocab.chat_template or default_template(self.vocab.tokens)
            bos, eos = (
                "" if i is None else self.vocab.tokens[i]
                for i in (self.tokenizer.bos, self.tokenizer.eos)
            )
            self._template = ChatTemplate(source, bos=bos, eos=eos)
        return self._template

    @typed
    def encode(self, text: str) -> list[int]:
        """Token ids of a text, after BOS where the model expects it. Control tokens stay text."""
        return self.tokenizer.encode(text)

    @typed
    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Special tokens are recognised in the template's text only, never in a message. If the model
        expects a leading BOS and the template does not write it, it is added. Raises PromptError.
        """
        from tamis.text.chat_template import encode_chat

        ids_of = self.ids_of_mark if self._encoder is not None else None
        return encode_chat(self.tokenizer, self.chat_template, messages, ids_of=ids_of)

    @typed
    def picture_mark(self, picture: bytes | str | Path) -> str:
        """A text that stands for a picture where it is part of a message's content.

        picture and errors: as for `embed_image`.
        """
        data = _bytes_of(picture)
        self._embedded(data)  # an unusable one is an error now
        return picture_marks.mark(self._book.add(data))

    def encode_marked(self, text: str) -> list[int]:
        """Token ids of a text that may have marks of pictures, after BOS where it is expected."""
        parts = [(text, False)]
        if self._encoder is None or not picture_marks.numbers(text):
            return self.encode(text)
        ids = picture_marks.encode(self.tokenizer.encode_parts, parts, self.ids_of_mark)
        bos = self.tokenizer.bos
        return [bos, *ids] if self.tokenizer.add_bos and bos is not None else ids

    def ids_of_mark(self, number: int) -> list[int]:
        """Ids of the picture of a mark of `picture_mark`, by its number. Raises ValueError."""
        return self.picture_ids(self._book.get(number))

    @typed
    def encode_pair(self, query: str, document: str) -> list[int]:
        """Token ids of a query and a document, for `Session.embed` with the pooling "rank"."""
        from tamis.text.pair import encode_pair

        return encode_pair(self.vocab, self.tokenizer, query, document)

    @typed
    def memory_plan(
        self,
        n_ctx: int | None = None,
        n_ubatch: int | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        *,
        kv_ram: int | None = None,
        kv_vram: int | None = None,
    ) -> "MemoryPlan":
        """The memory that a session of n_ctx tokens takes, and what is free beside the weights.

        For a model on two devices it is the sum, which fits if each part does; see `memory_plans`.
        """
        from tamis.engine import memory_plan

        limits = {"kv_ram": kv_ram, "kv_vram": kv_vram}
        return memory_plan.total(self.memory_plans(n_ctx, n_ubatch, type_k, type_v, **limits))

    @typed
    def memory_plans(
        self,
        n_ctx: int | None = None,
        n_ubatch: int | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        *,
        kv_ram: int | None = None,
        kv_vram: int | None = None,
    ) -> "dict[str, MemoryPlan]":
        """The plan of each device of `places`.

        n_ubatch: None: as `session` chooses it. kv_ram: of the CPU's memory; kv_vram: of a GPU's.
        """
        from tamis.engine import memory_plan

        tier = None if kv_ram is None else Tier(kv_ram, Path(), UNIT)
        kv, n_ctx = KVOptions(KVTypes(type_k, type_v), tier, kv_vram), self.context(n_ctx)
        self._filling.finish()
        if n_ubatch is None:
            n_ubatch = memory_plan.best_ubatch(self.loaded, n_ctx, kv)
        return memory_plan.plans(self.loaded, n_ctx, n_ubatch, kv)

    def _open_encoder(self, path: str | Path) -> "Encoder":
        """An encoder whose rows fit the model. Raises FileNotFoundError, GGUFError."""
        from tamis.vision.families.load import Encoder

        encoder = Encoder(path, self.backend)
        if encoder.n_embd != self.hp.n_embd:
            raise encoder.file.error(
                f"is {encoder.n_embd}, this model's rows have {self.hp.n_embd} elements: the file "
                "belongs to another model",
                key="clip.vision.projection_dim",
            )
        return encoder

    @property
    def encoder(self) -> "Encoder | None":
        """The encoder of pictures, if the engine was loaded with one."""
        return self._encoder

    @typed
    def embed_image(self, picture: bytes | str | Path) -> np.ndarray:
        """The rows that stand for a picture in a sequence, f32 [n, n_embd].

        picture: a file's bytes, or its path. A picture that is cut into tiles has the rows of all
        of them; models with rows for several layers have wider rows. Raises ValueError without an
        encoder (see `load`: mmproj), PictureError, OSError, ImportError without Pillow.
        """
        rows = [part.values[:] for part in self._embedded(picture) if not isinstance(part, str)]
        return np.concatenate(rows)

    @typed
    def picture_ids(self, picture: bytes | str | Path) -> list[int]:
        """Ids that stand for a picture in a prompt: its marks' tokens, and numbers of its rows.

        These numbers are negative; the engine holds the rows of the pictures used last. picture and
        errors: as for `embed_image`.
        """
        ids: list[int] = []
        for part in self._embedded(picture):
            if isinstance(part, str):
                ids += self.tokenizer.encode_parts([(part, True)])
            else:
                ids += self.loaded.pictures.add(part)
        return ids

    def _embedded(self, picture: bytes | str | Path) -> "Embedded":
        if self._encoder is None:
            raise ValueError(
                "this model was loaded without an encoder of pictures: give its mmproj file to "
                "Engine.load"
            )
        return self._encoder.embed(_bytes_of(picture))

    def finish_repacking(self) -> None:
        """Wait until the weights have the layout that kernels read; sessions do so themselves."""
        self._filling.finish()

    def prepared(self) -> bool:
        """Whether a copy of the weights will be on disk for later loads; waits until it is written.

        False for a model that loads as fast without a copy, and without room for it.
        """
        return self._filling.written()

    def with_kv_on_host(self) -> "Engine":
        """An engine of the same weights whose KV cache and attention are on the CPU."""
        engine = copy.copy(self)
        engine.loaded = self.loaded.with_kv_on_host()
        return engine

    def context(self, n_ctx: int | None) -> int:
        """The context in tokens of a session that asks for n_ctx (None or 0: the default)."""
        return n_ctx or min(self.hp.n_ctx_train, DEFAULT_CTX)

    def auto_stays_dense(self) -> str:
        """The reason why sessions with attn="auto" are dense here; "" if they are not."""
        model = self.model
        if model.has_score_mod:
            return "this model caps scores or adds to them"
        if model.arch.is_encoder or model.hp.indexer.top_k or model.hp.latent.n_latent:
            return "this model attends in a way of its own"
        return ""

    def auto_least(self, kv_vram: int | None = None) -> int:
        """Positions up to which sessions with attn="auto" are dense, unless it names a limit.

        kv_vram: as for `session`: a KV cache in RAM is slow to read, by any method.
        """
        from tamis.select.auto import LEAST_ON_GPU, Auto

        on_gpu = not all(place.kv_backend.on_host for place in self.places)
        return LEAST_ON_GPU if on_gpu and kv_vram is None else Auto.least

    def _suited(self, attn: "str | Selector", kv_vram: int | None) -> "str | Selector":
        """The method, or dense attention in place of an `auto` that this model does not support."""
        from tamis.select.auto import Auto
        from tamis.select.notation import DENSE, parse_method

        named = isinstance(attn, str) and attn.startswith("auto")
        method = parse_method(attn) if isinstance(attn, str) and named else attn
        if not isinstance(method, Auto):
            return attn
        if self.auto_stays_dense():
            return DENSE
        least = self.auto_least(kv_vram)
        return replace(method, least=least) if method.least == Auto.least else attn

    @typed
    def session(
        self,
        n_ctx: int | None = None,
        n_ubatch: int | None = None,
        attn: "str | Selector" = "dense",
        prefill: "str | Selector" = "dense",
        audit: int = 0,
        min_mass: float | None = None,
        type_k: str = "f16",
        type_v: str = "f16",
        kv_ram: int | None = None,
        kv_dir: str | Path | None = None,
        kv_unit: int = UNIT,
        kv_vram: int | None = None,
        key_copy: int | None = None,
        adapters: "Adapters | None" = None,
        progress: "Progress | None" = None,
    ) -> "Session":
        """A new, empty sequence. Missing kernels are compiled now.

        n_ubatch: tokens of a prompt that are computed at once, 1 to 4096. None: 512; if a GPU has
        all layers and their KV cache, up to 2048 if they fit. attn, prefill: the methods of decode
        steps and of prompts, as select.notation writes them, or as a Selector. audit: each audit-th
        decode step is compared with dense attention, 0 = none.

        min_mass: the share of attention that each head of a decode step is to retain, 0 to 1, by an
        estimate from sampled keys (see select/metered.py): if attn selected too little, more is
        read. 0 only measures; `Session.mass` has the result. None: no estimate.

        type_k, type_v: types of the KV cache, "f16", "q8_0" or "q4_0". kv_ram: bytes of memory for
        the KV cache; that of longer contexts is in a file of the folder kv_dir, which is read in
        units of kv_unit tokens of a KV head (1, 16 or 64). Decoding then raises KVFileError if the
        disk fails. kv_vram: bytes of a GPU's memory for the KV cache; that of longer contexts is in
        RAM, from which the GPU fetches the pages that it reads. key_copy: bits of the copy of keys
        by which topk and cpe score them, 4 or 8 on a GPU, 8 on a CPU; 0: they read the keys. None:
        4 on a GPU, 8 on a CPU. adapters: LoRA adapters and control vectors of this sequence's
        model.

        Raises ValueError for sizes out of range, types that do not fit and adapters of another
        model, MethodError for an unknown method or one that cannot read such keys, MemoryError if
        the plan does not fit, CompileError.
        """
        from tamis.engine import memory_plan
        from tamis.engine.session import Session
        from tamis.select.notation import parse_methods

        self.loaded.check_open()
        report = progress or (lambda stage, done, total: None)
        self._filling.finish(lambda done, total: report("repack", done, total))
        kv = KVOptions(KVTypes(type_k, type_v), _tier(kv_ram, kv_dir, kv_unit), kv_vram, key_copy)
        n_ctx = self.context(n_ctx)
        if n_ubatch is None:
            n_ubatch = memory_plan.best_ubatch(self.loaded, n_ctx, kv)
        return Session(
            self._adapted(adapters),
            n_ctx=n_ctx,
            n_ubatch=n_ubatch,
            selector=parse_methods(self._suited(attn, kv_vram), prefill, min_mass),
            kv=kv,
            audit=audit,
            progress=progress,
        )

    def _adapted(self, adapters: "Adapters | None") -> LoadedModel:
        """The loaded model with adapters, one per distinct set of them. Raises AdapterError."""
        if adapters is None or not adapters.key:
            return self.loaded
        from tamis.engine.adapters import adapted

        known = self.loaded.adapted
        if adapters.key not in known:
            while len(known) >= MOST_ADAPTED:
                del known[next(iter(known))]
            model = adapted(self.model, adapters)
            known[adapters.key] = adapters, replace(self.loaded, model=model)
        return known[adapters.key][1]

    def __repr__(self) -> str:
        hp = self.hp
        return (
            f"<Engine {self.path.name}: {hp.arch}, {hp.n_layer} layers, {hp.n_ctx_train} tokens of "
            f"trained context, on {' and '.join(place.device for place in self.places)}>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads, or free the device. Its sessions then raise RuntimeError. Idempotent."""
        if self.loaded.closed.is_set():
            return
        self.loaded.closed.set()
        self._filling.stop()
        for place in self.places:
            place.backend.close()
            if place.host is not None:
                place.host.close()


def _file_of(path: str | Path) -> Path:
    """The path of a model's file, which may be named as `tamis pull` does. Raises ModelError."""
    file = Path(path)
    if file.exists() or not isinstance(path, str) or path.endswith(".gguf"):
        return file
    if "/" in path and not path.startswith("hf:"):
        return file
    from tamis.fetch.registry import resolve

    return resolve(path)


def _tier(kv_ram: int | None, kv_dir: str | Path | None, kv_unit: int) -> Tier | None:
    """The memory limit and the folder of a session's KV cache. Raises ValueError."""
    if (kv_ram is None) != (kv_dir is None):
        raise ValueError("kv_ram and kv_dir go together: how much memory, and where the rest is")
    if kv_ram is None or kv_dir is None:
        return None
    if not Path(kv_dir).is_dir():
        raise ValueError(f"kv_dir is {str(kv_dir)!r}, which is no folder: make it first")
    if kv_unit not in UNITS:
        raise ValueError(f"kv_unit is {kv_unit!r}, expected one of {', '.join(map(str, UNITS))}")
    return Tier(kv_ram, Path(kv_dir), kv_unit)


def _bytes_of(picture: bytes | str | Path) -> bytes:
    """The bytes of a picture's file. Raises OSError."""
    return picture if isinstance(picture, bytes) else Path(picture).read_bytes()
