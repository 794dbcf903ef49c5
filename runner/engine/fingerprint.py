"""The text that identifies a model in session files: its shapes.

The lists say which hyperparameters count, and in which order. Files are compared by this text, so a
name keeps its position, and a new one goes to the end of LATER. tests/engine/test_fingerprint.py
checks that every hyperparameter is listed.
"""

from dataclasses import fields
from typing import Any

from tamis.model.hparams import HParams
from tamis.model.keys import declared

# Of every model.
ALWAYS = (
    "arch",
    "n_ctx_train",
    "n_embd",
    "n_layer",
    "n_head",
    "n_head_kv",
    "head_dim",
    "n_ff",
    "n_vocab",
    "n_rot",
    "rms_eps",
    "rope_base",
    "rope_scaling",
    "n_expert",
    "n_expert_used",
    "n_ff_expert",
    "sliding_window",
)
# Included if the file, or the architecture, sets them.
LATER = (
    "n_ff_shared",
    "recurrent",
    "ssm",
    "routing",
    "latent",
    "index_eps",
    "indexer",
    "index_last",
    "hyper",
    "compressed",
    "ngrams",
    "clamp_experts",
    "clamp_shared",
    "attention_scale",
    "rope_base_swa",
    "full_every",
    "temperature",
    "most_ctx",
    "swa_layers",
    "rope_sections",
    "residual_scale",
    "embedding_scale",
    "logit_scale",
    "logit_softcap",
    "n_ctx_orig",
    "attention_softcap",
    "max_alibi_bias",
    "layers",
    "one_cache",
    "nope_layers",
    "n_token_type",
    "n_rot_swa",
    "n_layer_kv",
    "n_embd_layer",
    "clamp_qkv",
    "gate_least",
    "yarn_log",
    "n_hash",
    "parallel",
    "activation",
)


def shape_text(hp: HParams) -> list[Any]:
    """The hyperparameters that tell models apart, as a list that JSON can hold.

    It has a text of ALWAYS; then, if any are set, a record of those of LATER; then one of the keys
    that the architecture declares and the file sets. Values are written in Python's notation.
    """
    always = ", ".join(f"{name}={getattr(hp, name)!r}" for name in ALWAYS)
    usual = {f.name: f.default for f in fields(HParams)}
    later = {name: repr(value) for name in LATER if (value := getattr(hp, name)) != usual[name]}
    stated = {}
    for f, key in declared(type(hp.declared)) if hp.declared else ():
        if (value := getattr(hp.declared, f.name)) != key.default:
            stated[key.name] = repr(value)
    return [f"HParams({always})", *([later] if later else []), *([stated] if stated else [])]
