"""A loaded model: what all sessions of a file share, its devices, and its page stores."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tamis.formats.gguf import GGUFFile
from tamis.formats.vocab import Vocab
from tamis.jit_kernels.backends.base import Backend
from tamis.jit_kernels.contract.types import PAGE
from tamis.kv.types import KVOptions, KVTypes, kv_bytes
from tamis.model.hparams import HParams
from tamis.model.model import Model
from tamis.model.placement import Place
from tamis.text.tokenizer import Tokenizer, tokenizer_for
from tamis.vision.held import Pictures

if TYPE_CHECKING:
    from tamis.engine.adapters import Adapters
    from tamis.kv.cache import KVCache
    from tamis.kv.page_store import PageStore
    from tamis.model.key_basis import KeyBasis


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """What an Engine has loaded and its sessions use."""

    file: GGUFFile
    model: Model
    vocab: Vocab
    tokenizer: Tokenizer
    places: tuple[Place, ...]
    # The page stores that sessions share, by the shape of a page of all layers, and KV types.
    _stores: dict[tuple[int, int, int, KVTypes], "PageStore"] = field(default_factory=dict)
    # Sets of adapters and the model with them, by the adapters' keys.
    adapted: dict[str, "tuple[Adapters, LoadedModel]"] = field(default_factory=dict)
    # The bases of quantised keys, by the name of the layer's tensor.
    _bases: dict[str, "KeyBasis"] = field(default_factory=dict)
    pictures: Pictures = field(default_factory=Pictures)
    closed: threading.Event = field(default_factory=threading.Event)

    @staticmethod
    def of(file: GGUFFile, model: Model, vocab: Vocab, places: Sequence[Place]) -> "LoadedModel":
        """A loaded model with the tokenizer of its vocabulary. Raises TokenizerError."""
        return LoadedModel(file, model, vocab, tokenizer_for(vocab), tuple(places))

    def check_open(self) -> None:
        """Raise RuntimeError once the engine is closed."""
        if self.closed.is_set():
            raise RuntimeError("the engine is closed: load the model again")

    @property
    def hp(self) -> HParams:
        """The model's shapes."""
        return self.model.hp

    @property
    def n_threads(self) -> int:
        """The number of threads that share an op's work on the backend of the first layers."""
        return self.places[0].backend.n_thread

    @property
    def backend(self) -> Backend:
        """The backend of the last layers."""
        return self.places[-1].backend

    def with_kv_on_host(self) -> "LoadedModel":
        """A loaded model of the same weights whose KV cache and attention are on the CPU."""
        return replace(self, places=tuple(place.with_kv_on_host() for place in self.places))

    def key_bases(self, type_k: str) -> "dict[int, KeyBasis]":
        """The bases of the layers whose keys are stored in one, for keys of a type."""
        if type_k == "f16":
            return {}
        on_host = [place.layers for place in self.places if place.kv_backend.on_host]
        return {
            layer: basis
            for layer, basis in self.all_bases().items()
            if any(layer in layers for layers in on_host)
        }

    def all_bases(self) -> "dict[int, KeyBasis]":
        """The bases of all layers that have one, whatever the type and the device of their keys."""
        from tamis.model.key_basis import has_basis

        layers = self.model.kv_layers
        return {layer: self.key_basis(layer) for layer in layers if has_basis(self.model, layer)}

    def key_basis(self, layer: int) -> "KeyBasis":
        """The basis of a layer's quantised keys, if it has one."""
        from tamis.model.key_basis import key_basis

        name = self.model.weights.blk[layer].attn_k.name
        if name not in self._bases:
            self._bases[name] = key_basis(self.file, self.model, layer)
        return self._bases[name]

    def new_cache(
        self, place: Place, n_ctx: int, n_tok: int, kv: KVOptions, *, whole: bool
    ) -> "KVCache":
        """A KV cache for a place's layers, for chunks of up to n_tok tokens.

        There is one for all layers with equal heads. whole: whether memory has room for all of it.
        """
        from tamis.kv.composite import CompositeKV, divided

        shapes = place.kv_shapes(self.model)
        sizes = [max(1, kv_bytes(hp, n_ctx, kv.types)) for hp, _ in shapes]
        rams = divided(kv.tier.ram, sizes) if kv.tier else [0] * len(sizes)
        vrams = divided(kv.vram, sizes) if kv.vram else [kv.vram] * len(sizes)
        parts: list[tuple[list[int], KVCache]] = []
        for (hp, layers), ram, vram in zip(shapes, rams, vrams, strict=True):
            share = kv._replace(tier=kv.tier and kv.tier._replace(ram=ram), vram=vram)
            try:
                parts.append((layers, self._cache(place, hp, n_ctx, n_tok, share, whole=whole)))
            except ValueError as error:
                if len(sizes) > 1:
                    error.add_note(f"of {len(layers)} layers; others have the rest of the memory")
                raise
        return parts[0][1] if len(parts) == 1 else CompositeKV(parts)

    def _cache(
        self, place: Place, hp: HParams, n_ctx: int, n_tok: int, kv: KVOptions, *, whole: bool
    ) -> "KVCache":
        """A KV cache of layers with equal heads, whose shape hp has."""
        if not whole and hp.n_layer:
            if kv.vram is not None and not place.kv_backend.on_host:
                from tamis.kv.gpu_page_cache import GpuPageCache

                mapped = place.backend.mapped
                return GpuPageCache(hp, n_ctx, kv.types, kv.vram, n_tok, mapped)
            if kv.tier is not None and place.kv_backend.on_host:
                from tamis.kv.disk_tier import DiskTier

                return DiskTier(hp, n_ctx, kv.types, kv.tier, n_tok)
        from tamis.kv.paged import PagedKV

        return PagedKV(hp, n_ctx, self._page_store(place, hp, kv.types, -(-n_ctx // PAGE)))

    def kv_bytes(self, n_ctx: int, types: KVTypes) -> int:
        """The bytes of the KV cache at n_ctx tokens, on all devices."""
        shapes = [hp for place in self.places for hp, _ in place.kv_shapes(self.model)]
        return sum(kv_bytes(hp, n_ctx, types) for hp in shapes)

    def _page_store(self, place: Place, hp: HParams, types: KVTypes, n_page: int) -> "PageStore":
        """The page store that all sessions of these types share, or one session's own.

        It is the session's own on a device that copies whole arrays, and if address space is
        limited.
        """
        from tamis.kv.page_store import PageStore, most_slots

        if not place.kv_backend.on_host or not hp.n_layer:
            return PageStore(hp, types, n_page)
        key = hp.n_layer, hp.n_head_kv, hp.head_dim, types
        if key not in self._stores:
            try:
                n_slot = max(n_page, most_slots(hp, types))
                self._stores[key] = PageStore(hp, types, n_slot)
            except OSError:
                return PageStore(hp, types, n_page)
        return self._stores[key]
