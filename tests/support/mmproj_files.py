"""Tiny random mmproj files, one writer for each projector type."""

import hashlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np

SEED = 11
Array = np.ndarray[Any, Any]
SIZES = {"n_embd": 64, "n_head": 2, "n_ff": 96, "n_layer": 3, "patch": 14, "image": 56}


def _values(name: str, shape: tuple[int, ...]) -> Array:
    digest = hashlib.sha256(f"{SEED}:{name}".encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    x = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name or ".ln" in name or "_ln." in name:
        return 0.1 * x + (1 if name.endswith("weight") else 0)
    if len(shape) == 1:
        return 0.1 * x
    if "embd" in name and "patch" not in name:
        return 0.3 * x
    return x * np.float32(1.2 / np.sqrt(np.prod(shape[1:])))


def layers(s: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a vision transformer's layers, outer dimension first."""
    e, f, found = s["n_embd"], s["n_ff"], {}
    for il in range(s["n_layer"]):
        own: dict[str, tuple[int, ...]] = {f"attn_{x}": (e, e) for x in ("q", "k", "v", "out")}
        if s.get("fused"):
            for x in "qkv":
                del own[f"attn_{x}"]
            own["attn_qkv"] = (3 * e, e)
        own |= {"ffn_up": (f, e), "ffn_down": (e, f)}
        if s.get("gated"):
            own["ffn_gate"] = (f, e)
        own |= dict.fromkeys(("ln1", "ln2", *s.get("more", ())), (e,))
        for name, shape in own.items():
            found[f"v.blk.{il}.{name}.weight"] = shape
            if not s.get("no_bias") and not name.startswith("ls"):
                found[f"v.blk.{il}.{name}.bias"] = shape[:1]
        if s.get("rms"):
            for name in ("ln1", "ln2"):
                found.pop(f"v.blk.{il}.{name}.bias", None)
    return found


def write_mmproj(path: Path, projector: str, n_out: int, changed: Any = None) -> Path:
    """Write the file of a projector type for a text model with rows of n_out elements."""
    s = SIZES | {"n_out": n_out} | FAMILIES[projector](n_out) | (changed or {})
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", projector)
    writer.add_bool(f"clip.use_{s.get('act', 'gelu')}", True)
    numbers = {"embedding_length": "n_embd", "feed_forward_length": "n_ff", "patch_size": "patch"}
    numbers |= {"block_count": "n_layer", "attention.head_count": "n_head", "image_size": "image"}
    for key, name in (numbers | {"projection_dim": "n_out"}).items():
        writer.add_uint32(f"clip.vision.{key}", s[name])
    for key, value in s.get("keys", {}).items():
        writer.add_uint32(f"clip.{key}", value)
    for key, value in s.get("arrays", {}).items():
        writer.add_array(f"clip.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", [0.5, 0.45, 0.4])
    writer.add_array("clip.vision.image_std", [0.3, 0.25, 0.26])
    e, size = s["n_embd"], s["patch"]
    shapes = {"v.patch_embd.weight": (e, 3, size, size)} | layers(s) | s["tensors"](s)
    for name, shape in shapes.items():
        writer.add_tensor(name, _values(name, shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _both(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def _gemma3(n_out: int) -> dict[str, Any]:
    def tensors(s: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        e = s["n_embd"]
        found = {"v.patch_embd.bias": (e,), "v.position_embd.weight": (16, e)}
        found |= _both("v.post_ln", e)
        return found | {
            "mm.soft_emb_norm.weight": (e,),
            "mm.input_projection.weight": (e, s["n_out"]),
        }

    return {"tensors": tensors, "keys": {"vision.projector.scale_factor": 2}}


def _qwen2vl(n_out: int) -> dict[str, Any]:
    def tensors(s: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        e, size = s["n_embd"], s["patch"]
        found = {"v.patch_embd.weight.1": (e, 3, size, size)} | _both("v.post_ln", e)
        return found | _both("mm.0", 4 * e, 4 * e) | _both("mm.2", s["n_out"], 4 * e)

    return {"tensors": tensors, "act": "gelu_quick"}


def _qwen25vl(n_out: int) -> dict[str, Any]:
    def tensors(s: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        found = _qwen2vl(n_out)["tensors"](s)
        del found["v.post_ln.bias"]
        return found

    keys = {"vision.n_wa_pattern": 2}
    return {"tensors": tensors, "act": "silu", "gated": True, "rms": True, "keys": keys}


def _qwen3vl(n_out: int) -> dict[str, Any]:
    def tensors(s: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        e, found = s["n_embd"], _qwen2vl(n_out)["tensors"](s)
        found |= {"v.patch_embd.bias": (e,), "v.position_embd.weight": (16, e)}
        for il in s["deep"]:
            name = f"v.deepstack.{il}"
            found |= _both(f"{name}.norm", 4 * e) | _both(f"{name}.fc1", 4 * e, 4 * e)
            found |= _both(f"{name}.fc2", s["n_out"], 4 * e)
        return found

    return {"tensors": tensors, "act": "gelu", "fused": True, "deep": ()}


def _idefics3(n_out: int) -> dict[str, Any]:
    def tensors(s: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        e = s["n_embd"]
        found = {"v.patch_embd.bias": (e,), "v.position_embd.weight": (16, e)}
        found |= _both("v.post_ln", e)
        return found | {"mm.model.fc.weight": (s["n_out"], 4 * e)}

    keys = {"vision.projector.scale_factor": 2, "vision.preproc_image_size": 112}
    return {"tensors": tensors, "keys": keys}


def _internvl(n_out: int) -> dict[str, Any]:
    def tensors(s: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        e = s["n_embd"]
        found: dict[str, tuple[int, ...]] = {"v.class_embd": (e,), "v.patch_embd.bias": (e,)}
        found |= {"v.position_embd.weight": (17, e)} | _both("mm.model.mlp.0", 4 * e)
        return (
            found
            | _both("mm.model.mlp.1", s["n_out"], 4 * e)
            | _both("mm.model.mlp.3", s["n_out"], s["n_out"])
        )

    keys = {"vision.projector.scale_factor": 2}
    return {"tensors": tensors, "keys": keys, "more": ("ls1", "ls2")}


def _pixtral(n_out: int) -> dict[str, Any]:
    def tensors(s: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        e, n = s["n_embd"], s["n_out"]
        found: dict[str, tuple[int, ...]] = {"v.pre_ln.weight": (e,), "mm.input_norm.weight": (e,)}
        found |= {"mm.1.weight": (n, e), "mm.2.weight": (n, n)}
        return found | {"v.token_embd.img_break": (n,), "mm.patch_merger.weight": (e, 4 * e)}

    keys = {"vision.spatial_merge_size": 2}
    return {
        "tensors": tensors,
        "keys": keys,
        "act": "silu",
        "gated": True,
        "rms": True,
        "no_bias": True,
    }


FAMILIES = {
    "gemma3": _gemma3,
    "qwen2vl_merger": _qwen2vl,
    "qwen2.5vl_merger": _qwen25vl,
    "qwen3vl_merger": _qwen3vl,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "pixtral": _pixtral,
}
