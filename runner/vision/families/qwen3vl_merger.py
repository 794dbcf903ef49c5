"""Qwen3-VL: learned positions that are stretched to a picture's size, and rows of early layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tamis.graph.norm import record_layer_norm
from tamis.vision.families import qwen2vl_merger
from tamis.vision.family import Plan
from tamis.vision.layouts import stretched_positions
from tamis.vision.params import VisionParams
from tamis.vision.tower import Vision


def plan(p: VisionParams, weights: Any, nx: int, ny: int) -> Plan:
    """Qwen2-VL's plan with learned positions."""
    found = qwen2vl_merger.plan(p, weights, nx, ny)
    added = stretched_positions(weights, nx, ny)[found.order]
    return found._replace(added=added)


def after_layer(v: Vision, il: int) -> None:
    """Record the merger of a layer's rows, for an early layer of the text model."""
    name = f"v.deepstack.{il}"
    if not v.mm[f"{name}.fc1"]:
        return
    merged, x = v.grouped(v.g.x)
    w = v.mm[f"{name}.norm"]
    y = v.g.ws.rows(f"{name}.norm", v.n_group * v.params.n_embd)[: len(x)]
    record_layer_norm(merged, x, y, w.vector(), w.bias())
    v.deep.append(v.perceptron(merged, y, f"{name}.fc1", f"{name}.fc2", "gelu"))


def tensors(p: VisionParams) -> Mapping[str, tuple[int, ...]]:
    """Shapes of all mergers' tensors."""
    wide, found = p.n_embd * p.merge**2, dict(qwen2vl_merger.tensors(p))
    for il in range(p.n_layer):
        name = f"v.deepstack.{il}"
        found |= {f"{name}.norm": (wide,), f"{name}.fc1": (wide, wide)}
        found[f"{name}.fc2"] = (p.n_out, wide)
    return found


FAMILY = replace(qwen2vl_merger.FAMILY, plan=plan, tensors=tensors, after_layer=after_layer)
