"""The memory that a session will take of each device, and whether it is free, before it is opened.

Errors name the parameters of `Engine.load` and `Engine.session` that change the plan.
"""

import shutil
from collections.abc import Mapping
from typing import NamedTuple

from tamis.engine.loaded import LoadedModel
from tamis.graph.workspace import workspace_bytes
from tamis.kv.recurrent import state_bytes
from tamis.kv.types import KVOptions, Tier, kv_bytes
from tamis.model.placement import described, devices

GIB = 1 << 30
# Tokens of a prompt's chunk, unless the caller names a number; and the larger default if a GPU has
# all layers, the KV cache, and room: it reads prompts 1.4 times faster then (docs/cuda.md).
N_UBATCH, N_UBATCH_GPU, MOST_UBATCH = 512, 2048, 4096


class MemoryPlan(NamedTuple):
    """Bytes that a session will take on a device."""

    weights: int  # of all sessions together; `available` is what is free beside them
    kv: int
    workspace: int
    available: int
    disk: int = 0  # of the KV cache's file, if memory has no room for all of it
    host: int = 0  # of RAM, for a KV cache that exceeds a GPU's memory

    @property
    def fits(self) -> bool:
        """Whether the memory that a session takes is free."""
        return self.kv + self.workspace <= self.available

    @property
    def whole(self) -> bool:
        """Whether memory where the KV cache is read has room for all of it."""
        return not self.disk and not self.host


def plans(
    loaded: LoadedModel,
    n_ctx: int,
    n_ubatch: int,
    kv: KVOptions,
    copies: Mapping[str, int] | None = None,
) -> dict[str, MemoryPlan]:
    """The plan of each device of the model's places, once the weights are copied.

    copies: bytes of keys that a method keeps, by device: see SelectorState.n_bytes.
    """
    places, weights, by_device = loaded.places, loaded.model.weights, {}
    elsewhere = sum(p.weight_bytes(weights) for p in places if not p.embedding)
    for device, backend in devices(places).items():
        # Tensors that no GPU has, such as the token embedding, are on the CPU.
        n_weight = sum(
            weights.n_bytes - elsewhere if p.embedding else p.weight_bytes(weights)
            for p in places
            if p.device == device
        )
        n_kv = sum(
            kv_bytes(hp, n_ctx, kv.types)
            for p in places
            if p.kv_device == device
            for hp, _ in p.kv_shapes(loaded.model)
        )
        tier_ram = None if kv.tier is None else kv.tier.ram
        most = tier_ram if backend.on_host else kv.vram
        n_rest = n_kv if most is not None and most < n_kv else 0
        by_device[device] = MemoryPlan(
            weights=n_weight,
            kv=most if most is not None and n_rest else n_kv,
            disk=n_rest if backend.on_host else 0,
            host=0 if backend.on_host else n_rest,
            workspace=workspace_bytes(loaded.model, n_ubatch, backend)
            + state_bytes(loaded.model.needs.states)
            + (copies or {}).get(device, 0),
            available=backend.free_bytes(n_weight),
        )
    return by_device


def total(by_device: Mapping[str, MemoryPlan]) -> MemoryPlan:
    """The sum for a model on two devices; it fits if each part does."""
    parts = list(by_device.values())
    if len(parts) == 1:
        return parts[0]
    weights, kv, workspace, _, disk, host = map(sum, zip(*parts, strict=True))
    fullest = min(plan.available / (plan.kv + plan.workspace) for plan in parts)
    return MemoryPlan(weights, kv, workspace, int(fullest * (kv + workspace)), disk, host)


def best_ubatch(loaded: LoadedModel, n_ctx: int, kv: KVOptions) -> int:
    """The tokens of a prompt's chunk, unless the caller names a number."""
    places = loaded.places
    if loaded.model.arch.is_encoder:  # it reads a whole text at once
        return min(max(N_UBATCH, n_ctx), MOST_UBATCH)
    if kv.vram is not None or any(p.kv_backend.on_host for p in places if p.layers):
        return N_UBATCH
    n_most = max(N_UBATCH, min(N_UBATCH_GPU, n_ctx))
    by_device = plans(loaded, n_ctx, n_most, KVOptions(kv.types, None))
    return n_most if all(plan.fits for plan in by_device.values()) else N_UBATCH


def checked_plans(
    loaded: LoadedModel, n_ctx: int, n_ubatch: int, kv: KVOptions, copies: Mapping[str, int]
) -> dict[str, MemoryPlan]:
    """The plan of each device, which fits. Raises MemoryError, ValueError."""
    if kv.vram is not None:
        _check_vram(loaded, kv.tier)
    by_device = plans(loaded, n_ctx, n_ubatch, kv, copies)
    for device, plan in by_device.items():
        if not plan.fits:
            on_host = devices(loaded.places)[device].on_host
            held = "" if on_host else f", with {plan.weights / GIB:.1f} GiB of weights"
            raise MemoryError(
                f"KV at {n_ctx} tokens is {plan.kv / GIB:.1f} GiB and scratch "
                f"{plan.workspace / GIB:.1f} GiB{described(device, loaded.places)}, free: "
                f"{plan.available / GIB:.1f} GiB{held}; lower n_ctx, {_remedy(plan, on_host)}"
            )
    _check_host(loaded, n_ctx, by_device)
    if kv.tier is not None:
        _check_disk(loaded, n_ctx, kv.tier, by_device)
    return by_device


def _check_disk(
    loaded: LoadedModel, n_ctx: int, tier: Tier, by_device: Mapping[str, MemoryPlan]
) -> None:
    """Raise ValueError if the KV cache cannot be in a file, or the disk has no room."""
    if not any(backend.on_host for backend in devices(loaded.places).values()):
        raise ValueError(
            "this device keeps the whole KV cache in its memory: leave out kv_ram, or have it "
            "on the CPU with offload_kqv=False"
        )
    if sum(place.kv_backend.on_host and len(place.layers) > 0 for place in loaded.places) > 1:
        raise ValueError(
            "with offload_kqv=False kv_ram needs all layers on one device: leave out n_gpu_layers"
        )
    n_disk, free = (
        sum(plan.disk for plan in by_device.values()),
        shutil.disk_usage(tier.folder).free,
    )
    if n_disk > free:
        raise ValueError(
            f"KV at {n_ctx} tokens is {n_disk / GIB:.1f} GiB, {tier.folder} has "
            f"{free / GIB:.1f} GiB free: lower n_ctx, or choose another kv_dir"
        )


def _check_vram(loaded: LoadedModel, tier: Tier | None) -> None:
    """Raise ValueError if no GPU has a KV cache, or RAM must not hold all of it."""
    on = [p for p in loaded.places if p.layers and not p.backend.sides[0].on_host]
    if not on:
        raise ValueError(
            "kv_vram is memory of a GPU, and this model runs on the CPU: leave it out, or run "
            "layers on a GPU with device='cuda' or n_gpu_layers"
        )
    if all(place.kv_backend.on_host for place in on):
        raise ValueError(
            "with offload_kqv=False the KV cache is the CPU's: leave out kv_vram, or "
            "offload_kqv=False"
        )
    if tier is not None:
        raise ValueError(
            "kv_vram keeps the KV cache of the GPU's layers in RAM, kv_ram limits it: leave "
            "out one of them"
        )


def _check_host(loaded: LoadedModel, n_ctx: int, by_device: Mapping[str, MemoryPlan]) -> None:
    """Raise MemoryError if RAM has no room for the KV cache that backs a GPU's frames."""
    n_host = sum(plan.host for plan in by_device.values())
    if n_host == 0:
        return
    host = next(place.host for place in loaded.places if place.host is not None)
    on_host = {device for device, backend in devices(loaded.places).items() if backend.on_host}
    planned = sum(
        plan.kv + plan.workspace for device, plan in by_device.items() if device in on_host
    )
    free = host.free_bytes() - planned
    if n_host > free:
        raise MemoryError(
            f"KV at {n_ctx} tokens is {n_host / GIB:.1f} GiB, which with kv_vram is in RAM, free: "
            f"{free / GIB:.1f} GiB; lower n_ctx, or leave out kv_vram"
        )


def _remedy(plan: MemoryPlan, on_host: bool) -> str:
    if on_host:
        return "or keep a part on disk with kv_ram and kv_dir"
    kept = ""
    if plan.kv:
        kept = ", or the KV cache with offload_kqv=False, or most of it with kv_vram"
    return "or keep layers on the CPU with n_gpu_layers" + kept
