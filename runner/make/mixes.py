"""Which type each tensor of a model gets: llama.cpp's mixtures, such as Q4_K_M, by its rules."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tamis.formats.ggml_types import GGMLType
from tamis.formats.gguf import GGUFFile
from tamis.jit_kernels.contract.ops.encode import ENCODED


class Mix(NamedTuple):
    """A mixture: the type of most tensors, and its number in `general.file_type`."""

    type: GGMLType
    number: int


_T = GGMLType
MIXES = {
    "F32": Mix(_T.F32, 0), "F16": Mix(_T.F16, 1), "BF16": Mix(_T.BF16, 32),
    "Q8_0": Mix(_T.Q8_0, 7), "Q6_K": Mix(_T.Q6_K, 18),
    "Q5_K_M": Mix(_T.Q5_K, 17), "Q5_K_S": Mix(_T.Q5_K, 16),
    "Q5_1": Mix(_T.Q5_1, 9), "Q5_0": Mix(_T.Q5_0, 8),
    "Q4_K_M": Mix(_T.Q4_K, 15), "Q4_K_S": Mix(_T.Q4_K, 14),
    "IQ4_NL": Mix(_T.IQ4_NL, 25), "IQ4_XS": Mix(_T.IQ4_XS, 30),
    "Q4_1": Mix(_T.Q4_1, 3), "Q4_0": Mix(_T.Q4_0, 2),
    "Q3_K_L": Mix(_T.Q3_K, 13), "Q3_K_M": Mix(_T.Q3_K, 12), "Q3_K_S": Mix(_T.Q3_K, 11),
    "Q2_K": Mix(_T.Q2_K, 10), "Q2_K_S": Mix(_T.Q2_K, 21),
}  # fmt: skip
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
WRITTEN = ("F32", "F16", "BF16", *ENCODED)  # the types of single tensors
# What a type becomes for rows that are no multiple of its 256 elements.
SMALLER = {
    _T.IQ4_XS: _T.IQ4_NL, _T.Q2_K: _T.Q4_0, _T.Q3_K: _T.Q4_0, _T.Q4_K: _T.Q5_0, _T.Q5_K: _T.Q5_1,
    _T.Q6_K: _T.Q8_0,
}  # fmt: skip
# Names of which tensors keep the type that they have: small, or read in another way.
_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|ffn_gate_tid2eid\.weight|altup|laurel"
    r"|per_layer_model_proj|^position_embd\.weight|^token_types\.weight|ssm_conv1d"
    r"|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight|attn_rel_b\.weight|\.position_embd"
    r"|time_mix_(first|w[012]|v[012]|a[012]|g[12]|decay_w[12]|lerp_fused)\.weight"
    r"|sam\.(pos_embd|neck\.|net_)|\.rel_pos|\.patch_(embd|merger)|a\.rvq\.codebook|mm\.a\.code_embd"
)
_KEPT_GLM5_NEXT = re.compile(
    r"hc_|indexer\.(attn_q_b|attn_k|proj)|indexer_compressor_(gate|ape)|ssm_[fg]_[ab]\.weight"
    r"|ssm_beta\.weight|attn_kv_a_mqa\.weight|attn_[kv]_b\.weight"
)
_LARGE_70B = {"llama": 80, "deci": 80, "qwen2": 80, "olmo": 80, "jais2": 68}  # layers


@dataclass(frozen=True, slots=True)
class Choice:
    """What a user asks for besides a mixture.

    tensors: pairs of a regular expression, searched in a tensor's name, and a type. pure: all
    tensors get the mixture's type.
    """

    pure: bool = False
    output: GGMLType | None = None
    embeddings: GGMLType | None = None
    leave_output: bool = False
    tensors: tuple[tuple[re.Pattern[str], GGMLType], ...] = ()


@dataclass(slots=True)
class _Model:
    """What the rules ask of a model, and how many tensors of a kind have been seen."""

    arch: str
    n_layer: int
    n_expert: int
    group: int  # query heads of a KV head
    is_70b: bool
    is_tied: bool
    has_importance: bool
    n_values: int  # tensors that make values
    i_values: int = 0
    i_down: int = 0


def types(
    file: GGUFFile, name: str, choice: Choice, *, has_importance: bool = False
) -> dict[str, GGMLType]:
    """The type of each tensor under the mixture of this name.

    has_importance: whether errors are weighted; some rules ask. Raises KeyError for no mixture.
    """
    mix = MIXES[name]
    found = {tensor: info.type for tensor, info in file.tensors.items()}
    model = _model(file, has_importance)
    for tensor in sorted(found, key=_place):  # rules count layers
        info = file.tensors[tensor]
        if _is_kept(model.arch, tensor, info.shape) or (
            choice.leave_output and tensor == "output.weight"
        ):
            continue
        found[tensor] = _type(model, name, mix.type, tensor, info.shape, choice)
    return found


def _model(file: GGUFFile, has_importance: bool) -> _Model:
    arch = file.architecture

    def number(key: str, default: int) -> int:
        value = file.metadata.get(f"{arch}.{key}", default)
        return max(value.tolist()) if hasattr(value, "tolist") else int(value)

    n_head, n_layer = number("attention.head_count", 1), number("block_count", 0)
    n_head_kv = number("attention.head_count_kv", n_head)
    is_70b = _LARGE_70B.get(arch) == n_layer and (arch != "llama" or n_head != n_head_kv)
    return _Model(
        arch=arch,
        n_layer=n_layer,
        n_expert=number("expert_count", 0),
        group=n_head // n_head_kv if n_head_kv else 0,
        is_70b=is_70b,
        is_tied="output.weight" not in file.tensors,
        has_importance=has_importance,
        n_values=sum(_makes_values(name) for name in file.tensors),
    )


def _place(name: str) -> tuple[int, str]:
    """The order in which rules see tensors: by layer, those of none first, then by name."""
    found = re.match(r"blk\.(\d+)\.", name)
    return (int(found[1]) if found else -1, name)


def nearest(types: Mapping[str, GGMLType]) -> str:
    """The name of the mixture whose type most tensors have, for `general.file_type`."""
    counts = {name: sum(t == mix.type for t in types.values()) for name, mix in MIXES.items()}
    return max(sorted(counts, key=lambda name: not name.endswith("_M")), key=counts.__getitem__)


def is_kept(file: GGUFFile, name: str, shape: Sequence[int]) -> bool:
    """Whether a tensor keeps its type under every mixture."""
    return _is_kept(file.architecture, name, shape)


def _is_kept(arch: str, name: str, shape: Sequence[int]) -> bool:
    n_dim = max((i + 1 for i, n in enumerate(shape) if n > 1), default=1)
    kept = n_dim < 2 or not name.endswith("weight") or _KEPT.search(name)
    return bool(kept or (arch == "glm5-next" and _KEPT_GLM5_NEXT.search(name)))


def _makes_values(name: str) -> bool:
    return any(part in name for part in ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight"))


def _is_embedding(name: str) -> bool:
    return name in ("token_embd.weight", "per_layer_token_embd.weight")


def _type(
    model: _Model, name: str, base: GGMLType, tensor: str, shape: Sequence[int], choice: Choice
) -> GGMLType:
    named = next((type for pattern, type in choice.tensors if pattern.search(tensor)), None)
    follows = tensor == "token_embd.weight" or (_is_embedding(tensor) and named is None)
    if choice.embeddings is not None and follows:
        return choice.embeddings
    if choice.output is not None and tensor == "output.weight":
        return choice.output
    if base.block_size == 1:
        return base
    if named is None and not choice.pure:
        base = _by_rule(model, name, base, tensor, shape, choice)
    return _fitting(named or base, shape[0])


def _fitting(type: GGMLType, n: int) -> GGMLType:
    """The type for rows of n elements: a smaller one, or F16, if its blocks do not fit."""
    if n % type.block_size == 0:
        return type
    smaller = SMALLER.get(type, type)
    return smaller if n % smaller.block_size == 0 else _T.F16


def _more_bits(i: int, n: int) -> bool:
    """Whether layer i of n is one of the first and last eighths, or a third of the others."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _by_rule(
    model: _Model, name: str, base: GGMLType, tensor: str, shape: Sequence[int], choice: Choice
) -> GGMLType:
    """The type by a mixture's rules; model counts the tensors seen."""
    at_least_q8 = ("attn_q_a", "attn_q_b", "nextn.eh_proj")
    if model.arch == "glm5-next" and any(part in tensor for part in at_least_q8):
        return _T.Q8_0
    if tensor == "output.weight" or (model.is_tied and _is_embedding(tensor)):
        if choice.output is not None:
            return choice.output
        if model.arch == "falcon" or shape[0] % base.block_size:
            return _T.Q8_0
        return base if base == _T.Q8_0 else _T.Q6_K
    if _is_embedding(tensor):
        return base
    if _makes_values(tensor):
        model.i_values += 1
        return _of_values(model, name, base, model.i_values - 1)
    if "attn_k.weight" in tensor:
        return _T.Q8_0 if model.n_expert == 8 else base
    if "attn_output.weight" in tensor:
        return _of_output(model, name, base)
    if "ffn_down" in tensor:
        i = _place(tensor)[0] if model.n_expert > 1 else model.i_down
        model.i_down += 1
        return _of_down(model, name, base, i)
    return base


def _of_values(model: _Model, name: str, base: GGMLType, i: int) -> GGMLType:
    """The i-th tensor that makes values: they are small, and errors in them weigh."""
    grouped = model.group >= 4
    type = base
    if name == "Q2_K":
        type = _T.Q4_K if grouped else _T.Q3_K
    elif name == "Q2_K_S" and grouped:
        type = _T.Q4_K
    elif name == "Q3_K_M":
        type = _T.Q5_K if i < 2 else _T.Q4_K
    elif name == "Q3_K_L" or (name in ("IQ4_NL", "IQ4_XS") and grouped):
        type = _T.Q5_K
    elif name in ("Q4_K_M", "Q5_K_M") and _more_bits(i, model.n_values):
        type = _T.Q6_K
    elif name == "Q4_K_S" and i < 4:
        type = _T.Q5_K
    if model.is_70b and type in (_T.Q3_K, _T.Q4_K):
        type = _T.Q5_K
    return _T.Q8_0 if model.n_expert == 8 else type


def _of_output(model: _Model, name: str, base: GGMLType) -> GGMLType:
    """The projection of attention's output."""
    if model.arch == "falcon":
        return _T.Q4_K if name == "Q3_K_L" else base
    if model.n_expert == 8:
        small = ("Q2_K", "Q3_K_S", "Q3_K_M", "IQ4_NL", "IQ4_XS", "Q4_K_S", "Q4_K_M")
        return _T.Q5_K if name in small else base
    return {"Q2_K": _T.Q3_K, "Q3_K_M": _T.Q4_K, "Q3_K_L": _T.Q5_K}.get(name, base)


def _of_down(model: _Model, name: str, base: GGMLType, i: int) -> GGMLType:
    """The down projection of layer i."""
    n, falcon = model.n_layer, model.arch == "falcon"
    first, more = i < n // 8, _more_bits(i, n)
    by_importance = {"Q4_0": _T.Q4_1, "Q5_0": _T.Q5_1}
    rules: Mapping[str, GGMLType] = {
        "Q2_K": _T.Q3_K,
        "Q2_K_S": _T.Q4_K if first else base,
        "Q3_K_M": _T.Q5_K if i < n // 16 else _T.Q4_K if more or not falcon else _T.Q3_K,
        "Q3_K_L": _T.Q4_K if falcon else _T.Q5_K,
        "Q4_K_S": _T.Q5_K if first and not falcon else base,
        "Q5_K_M": _T.Q6_K if more else base,
    }
    if name == "Q4_K_M":
        if falcon and i >= n // 16:
            return _T.Q5_K if more else _T.Q4_K
        return _T.Q6_K if more or falcon else base
    if name in ("IQ4_NL", "IQ4_XS"):
        return _T.Q5_K if first and not model.has_importance else base
    if name in by_importance:
        return by_importance[name] if first and model.has_importance else base
    return rules.get(name, base)
