"""A loaded model as the forward pass needs it: shape, architecture, weights, rotary frequencies."""

from dataclasses import dataclass, replace

from tamis.arch.base import Arch, arch_of
from tamis.formats.gguf import GGUFFile
from tamis.model.hparams import HParams, RopeScaling
from tamis.model.rope import RopeFrequencies, rope_frequencies
from tamis.model.weights import Weights, load_weights

LANES = 16  # the widest vector of any CPU level: head_dim must be a multiple


@dataclass(frozen=True, slots=True)
class Model:
    """Fixed and loaded data of a model, shared by all sessions."""

    hp: HParams
    arch: Arch
    weights: Weights
    rope: RopeFrequencies  # of full layers
    rope_window: RopeFrequencies  # of sliding-window layers

    def window(self, layer: int) -> int:
        """The layer's own sliding window in tokens, 0 = full attention."""
        if self.hp.sliding_window and (layer + 1) % self.arch.full_attention_every:
            return self.hp.sliding_window
        return 0

    def frequencies(self, layer: int) -> RopeFrequencies:
        """What a layer's queries and keys are turned by."""
        return self.rope_window if self.window(layer) else self.rope


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
    weights = load_weights(file, hp)
    rope = rope_frequencies(
        hp, base=hp.rope_base, scaling=hp.rope_scaling, factors=weights.rope_freqs
    )
    rope_window = rope
    if arch.rope_base_window:
        rope_window = rope_frequencies(hp, base=arch.rope_base_window, scaling=RopeScaling())
    return Model(hp, arch, weights, rope, rope_window)
