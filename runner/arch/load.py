"""A model from its file: the architecture found by name, all shapes checked, its graph tried."""

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import tamis.arch
from tamis.formats.gguf import GGUFFile
from tamis.graph.device_graph import measure
from tamis.model.arch import Arch
from tamis.model.hparams import HParams, RopeScaling
from tamis.model.model import Model
from tamis.model.rope import rope_frequencies
from tamis.model.weights import APART, MissingTensor, is_one_of, load_weights

ENTRY_POINTS = "tamis.architectures"  # of other packages: a GGUF name, and the Arch of it
LANES = 16  # the widest vector of any CPU level: head_dim must be a multiple


class ArchError(ValueError):
    """The model's architecture is not supported; the message names it and those that are."""


def known() -> dict[str, Callable[[], Arch]]:
    """What loads each architecture, by GGUF name: a file's here, or what a package brings."""
    others = importlib.metadata.entry_points(group=ENTRY_POINTS)
    found: dict[str, Callable[[], Arch]] = {e.name: e.load for e in others}
    for module in pkgutil.iter_modules(tamis.arch.__path__):
        if module.name != "load":
            path = f"tamis.arch.{module.name}"
            found[module.name] = partial(_record, path)
    return found


def _record(module: str) -> Arch:
    return importlib.import_module(module).ARCH


def arch_of(name: str) -> Arch:
    """The record of a GGUF architecture name. Raises ArchError."""
    found = known()
    if name not in found:
        listed = ", ".join(sorted(found))
        raise ArchError(f"architecture {name!r} is not supported; supported: {listed}")
    return found[name]()


def load_model(file: GGUFFile, scaling: RopeScaling | None = None) -> Model:
    """Read and check everything but the vocabulary. Raises GGUFError or ArchError.

    scaling: of positions, instead of the file's; its n_ctx_orig 0 stands for the training context.
    """
    arch = arch_of(file.get("general.architecture", str))
    hp = HParams.from_gguf(file, arch.keys, arch.refused)
    hp = replace(hp, **arch.derived(hp)) if arch.derived else hp
    if scaling is not None:
        n_ctx_orig = scaling.n_ctx_orig or hp.n_ctx_train
        hp = replace(hp, rope_scaling=replace(scaling, n_ctx_orig=n_ctx_orig))
    for name, n, unit in (("head_dim", hp.head_dim, LANES), ("n_embd", hp.n_embd, 32)):
        if n % unit:
            raise file.error(f"{name} is {n}, only multiples of {unit} are supported")
    if arch.recurrent is not None and not hp.recurrent:
        hp = replace(hp, recurrent=arch.recurrent(hp))
    weights = load_weights(file, hp, arch.tensors(hp) if arch.tensors else None, arch.unread)
    factors = weights.rope_freqs if arch.rope_factors else None
    ropes = [rope_frequencies(hp, base=hp.rope_base, scaling=hp.rope_scaling, factors=factors)]
    if base := hp.rope_base_swa or arch.rope_base_window:
        ropes.append(rope_frequencies(hp, base=base, scaling=RopeScaling()))
    model = Model(hp, arch, weights, tuple(ropes))
    try:
        model = replace(model, needs=measure(model))
    except MissingTensor as error:
        raise file.error("the tensor is missing", key=str(error)) from None
    _check_all_read(file, weights.read, arch.unread)
    return model


def _check_all_read(file: GGUFFile, read: set[str], known: tuple[str, ...]) -> None:
    """Raise GGUFError where the graph leaves a tensor unread: the model would be another one.

    known: those that llama.cpp does not read either, without their layers.
    """
    left = file.tensors.keys() - read - APART
    unread = sorted(name for name in left if not is_one_of(name, known))
    if unread:
        more = f", nor {len(unread) - 1} others" if len(unread) > 1 else ""
        raise file.error(
            f"the graph of this architecture does not read the tensor{more}", key=unread[0]
        )
