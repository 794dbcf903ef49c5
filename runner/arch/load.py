"""Loads a model's file: finds the architecture, checks all shapes, and records its graph once."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import tamis.arch
from tamis.formats.gguf import GGUFFile
from tamis.model.arch import Arch
from tamis.model.hparams import (
    CTX_ORIG,
    LAYER_NORM_EPS,
    ROT_SWA,
    HParams,
    LayerShape,
    RopeScaling,
    UnsupportedKey,
)
from tamis.model.model import Model, own_window
from tamis.model.rope import rope_frequencies
from tamis.model.weights import APART, MissingTensor, Tensors, is_after, is_one_of, load_weights

# the entry-point group of other packages: a GGUF name, and its Arch
ENTRY_POINTS = "tamis.architectures"
LANES = 16  # the widest vector of any CPU level: head widths of a KV cache are multiples of it


class ArchError(ValueError):
    """The model's architecture is not supported; the message names it and those that are."""


def known() -> dict[str, Callable[[], Arch]]:
    """Loaders of architectures by GGUF name: those here, and those of other packages."""
    from importlib.metadata import entry_points

    others = entry_points(group=ENTRY_POINTS)
    return {e.name: e.load for e in others} | _own()


def _own() -> dict[str, Callable[[], Arch]]:
    names = [m.name for m in pkgutil.iter_modules(tamis.arch.__path__) if m.name != "load"]
    return {name: partial(_record, f"tamis.arch.{name}") for name in names}


def _record(module: str) -> Arch:
    return importlib.import_module(module).ARCH


def arch_of(name: str) -> Arch:
    """The record of a GGUF architecture name. Raises ArchError."""
    found = _own()
    if name not in found:
        found = known()  # slower: reads the entry points of all packages
    if name not in found:
        listed = ", ".join(sorted(found))
        raise ArchError(f"architecture {name!r} is not supported; supported: {listed}")
    return found[name]()


def load_model(file: GGUFFile, scaling: RopeScaling | None = None) -> Model:
    """Read and check everything but the vocabulary. Raises GGUFError or ArchError.

    scaling: of positions, replaces the file's; its n_ctx_orig 0 stands for the training context.
    """
    arch = arch_of(file.get("general.architecture", str))
    keys = {*arch.keys, *[LAYER_NORM_EPS] * (arch.norm == "layer"), *[CTX_ORIG] * arch.long_factors}
    of_arch: dict[str, Any] = {"full_first": arch.full_first, "declares": arch.declares}
    hp = HParams.from_gguf(file, keys, arch.refused, arch.nonzero, **of_arch)
    if hp.n_expert and not hp.n_ff_expert:
        n_share = max(hp.n_expert_used, 1) if arch.shared_ff else 1
        hp = replace(hp, n_ff_expert=hp.n_ff // n_share)
    try:
        hp = replace(hp, **arch.derived(hp)) if arch.derived else hp
    except UnsupportedKey as error:
        raise file.error(error.what, key=f"{hp.arch}.{error.key}") from None
    arch = replace(arch, **arch.facts(hp)) if arch.facts else arch
    if ROT_SWA not in arch.keys:
        hp = _with_one_rotary_width(hp, arch)
    is_encoder = arch.is_encoder
    if not file.get(f"{hp.arch}.attention.causal", bool, True) and not is_encoder:
        arch = _reading_both_ways(file, hp, arch)
    if scaling is not None:
        n_ctx_orig = scaling.n_ctx_orig or hp.n_ctx_train
        hp = replace(hp, rope_scaling=replace(scaling, n_ctx_orig=n_ctx_orig))
    if hp.head_dim % LANES:
        hp = _with_padded_heads(file, hp)
    if arch.recurrent is not None and not hp.recurrent:
        hp = replace(hp, recurrent=arch.recurrent(hp))
    weights = load_weights(file, hp, arch.tensors, arch.unread, arch.block)
    factors = _factors(weights.top, hp, arch)
    frequencies = partial(rope_frequencies, hp, interleaved=arch.interleaved_sections)
    ropes = [frequencies(base=hp.rope_base, scaling=hp.rope_scaling, factors=factors[0])]
    if factors[1] is not None:
        long = frequencies(base=hp.rope_base, scaling=hp.rope_scaling, factors=factors[1])
        ropes = [ropes[0]._replace(n_ctx=hp.n_ctx_orig, beyond=long)]
    differs = hp.n_rot_swa not in (0, hp.n_rot)
    if base := hp.rope_base_swa or arch.rope_base_window or differs * hp.rope_base:
        rotary = hp.rope_scaling  # YaRN's factor of the cosines applies to scaled layers only
        unscaled = RopeScaling(attn_factor=1.0 if rotary.kind == "yarn" else rotary.attn_factor)
        scaling = hp.rope_scaling if arch.window_scaled else unscaled
        own = factors[0] if arch.chunked else None
        ropes.append(frequencies(base=base, scaling=scaling, factors=own, n_rot=hp.n_rot_swa))
    from tamis.model.heads import load_heads

    heads = load_heads(file, hp.n_embd, is_encoder=is_encoder)
    model = Model(hp, arch, weights, tuple(ropes), heads)
    # imported late: an error of the file is reported without loading the graph
    from tamis.graph.device_graph import measure

    try:
        model = replace(model, needs=measure(model))
    except MissingTensor as error:
        raise file.error("the tensor is missing", key=str(error)) from None
    except UnsupportedKey as error:
        raise file.error(error.what, key=f"{hp.arch}.{error.key}") from None
    _check_all_read(file, model)
    return model


def _with_one_rotary_width(hp: HParams, arch: Arch) -> HParams:
    """The hyperparameters, with the first layer's rotary width for all layers.

    It is for architectures without a width per layer, and llama.cpp does the same for a file with
    two widths.
    """
    n_rot = hp.n_rot_swa if own_window(hp, arch, 0) else 0
    return replace(hp, n_rot=n_rot or hp.n_rot, n_rot_swa=0)


def _with_padded_heads(file: GGUFFile, hp: HParams) -> HParams:
    """The hyperparameters with head widths of the KV cache padded to whole vectors.

    Raises GGUFError if layers have heads of different widths.
    """
    own = LayerShape(hp.n_head, hp.n_head_kv, hp.head_dim, hp.n_ff)
    layers = hp.layers or (own,) * hp.n_layer
    differ = any(layer.heads != own.heads for layer in layers)
    if (differ and not hp.one_cache) or hp.latent.n_latent:
        what = f"head_dim is {hp.head_dim}, of this architecture only multiples of {LANES} are"
        raise file.error(f"{what} supported")
    wide = -(-hp.head_dim // LANES) * LANES
    return replace(hp, layers=layers, head_dim=wide, attention_scale=hp.scale)


def _reading_both_ways(file: GGUFFile, hp: HParams, arch: Arch) -> Arch:
    """The architecture with attention in both directions.

    Raises GGUFError if that is not supported.
    """
    if hp.recurrent or arch.recurrent or hp.sliding_window:
        what = "is False, which is not supported with recurrent layers or a sliding window"
        raise file.error(what, key=f"{hp.arch}.attention.causal")
    return replace(arch, is_encoder=True)


def _factors(top: Tensors, hp: HParams, arch: Arch) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The divisors of rotary frequencies, up to hp.n_ctx_orig tokens and beyond.

    None: there are none.
    """
    if top.rope_freqs:
        if arch.rope_factors:
            return top.rope_freqs.vector(), None
        top.rope_freqs.leave()
        return None, None
    if arch.long_factors and top.rope_factors_long and top.rope_factors_short:
        return top.rope_factors_short.vector(), top.rope_factors_long.vector()
    return None, None


def _check_all_read(file: GGUFFile, model: Model) -> None:
    """Raise GGUFError if the graph leaves a tensor unread, as results would be wrong.

    Tensors that llama.cpp does not read either may stay unread, and so may heads for further
    tokens.
    """
    left = file.tensors.keys() - model.weights.read - APART
    left = {name for name in left if not name.endswith(".input_scale")}  # for other arithmetic
    unread = sorted(
        name
        for name in left
        if not is_one_of(name, model.arch.unread) and not is_after(name, model.hp.n_layer)
    )
    if unread:
        more = f", nor {len(unread) - 1} others" if len(unread) > 1 else ""
        raise file.error(
            f"the graph of this architecture does not read the tensor{more}", key=unread[0]
        )
