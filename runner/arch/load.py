"""A model from its file: the architecture found by name, all shapes checked, its graph tried."""

import importlib
import importlib.metadata
import pkgutil
from dataclasses import replace

import tamis.arch
from tamis.formats.gguf import GGUFFile
from tamis.graph.device_graph import measure
from tamis.model.arch import Arch
from tamis.model.hparams import HParams, RopeScaling
from tamis.model.model import Model
from tamis.model.rope import rope_frequencies
from tamis.model.weights import MissingTensor, load_weights

ENTRY_POINTS = "tamis.architectures"  # of other packages: a GGUF name, and the Arch of it
LANES = 16  # the widest vector of any CPU level: head_dim must be a multiple


class ArchError(ValueError):
    """The model's architecture is not supported; the message names it and those that are."""


def arch_of(name: str) -> Arch:
    """The record of a GGUF architecture name. Raises ArchError."""
    known = {m.name for m in pkgutil.iter_modules(tamis.arch.__path__)} - {"load"}
    if name in known:
        return importlib.import_module(f"tamis.arch.{name}").ARCH
    others = {e.name: e for e in importlib.metadata.entry_points(group=ENTRY_POINTS)}
    if name in others:
        return others[name].load()
    listed = ", ".join(sorted(known | others.keys()))
    raise ArchError(f"architecture {name!r} is not supported; supported: {listed}")


def load_model(file: GGUFFile, scaling: RopeScaling | None = None) -> Model:
    """Read and check everything but the vocabulary. Raises GGUFError or ArchError.

    scaling: of positions, instead of the file's; its n_ctx_orig 0 stands for the training context.
    """
    arch = arch_of(file.get("general.architecture", str))
    hp = HParams.from_gguf(file)
    if scaling is not None:
        n_ctx_orig = scaling.n_ctx_orig or hp.n_ctx_train
        hp = replace(hp, rope_scaling=replace(scaling, n_ctx_orig=n_ctx_orig))
    for name, n, unit in (("head_dim", hp.head_dim, LANES), ("n_embd", hp.n_embd, 32)):
        if n % unit:
            raise file.error(f"{name} is {n}, only multiples of {unit} are supported")
    if arch.recurrent is not None and not hp.recurrent:
        hp = replace(hp, recurrent=arch.recurrent(hp))
    weights = load_weights(file, hp, arch.tensors(hp) if arch.tensors else None)
    factors = weights.rope_freqs if arch.rope_factors else None
    ropes = [rope_frequencies(hp, base=hp.rope_base, scaling=hp.rope_scaling, factors=factors)]
    if arch.rope_base_window:
        ropes.append(rope_frequencies(hp, base=arch.rope_base_window, scaling=RopeScaling()))
    model = Model(hp, arch, weights, tuple(ropes))
    try:
        return replace(model, needs=measure(model))
    except MissingTensor as error:
        raise file.error("the tensor is missing", key=str(error)) from None
