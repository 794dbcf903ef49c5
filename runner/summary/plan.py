"""The way to read a document: at once or in parts, in which context, with which KV cache.

It is determined by the document's tokens, the model's training length and free memory.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tamis.engine.errors import ContextError
from tamis.model.hparams import RopeScaling
from tamis.sampling.chain import SamplerParams
from tamis.select.kvzip import KVzip
from tamis.select.notation import prefill_for
from tamis.summary.prompts import Task

if TYPE_CHECKING:
    from tamis.engine.engine import Engine

PART_CTX = 8192  # the context of parts, if the caller names none: more only makes attention slower
SLACK = 16  # tokens by which a text may grow inside the chat template
HEADING = 8  # tokens of "Part 12:" and its surroundings
MEMORY_SHARE = 0.9  # of the free memory
LEAST_IN_MEMORY = 4  # with a file, at least a LEAST_IN_MEMORY-th of the KV cache is in memory


@dataclass(frozen=True, slots=True)
class Settings:
    """The caller's choices; None and "auto" leave them to `choose`.

    n_ctx: context in tokens. attn, prefill: methods as in select.notation. type_k, type_v: of the
    KV cache. kv_dir: the folder of a file for a KV cache that exceeds memory, None: there is none;
    kv_ram: bytes of memory beside it, None: what is free. kv_vram: of a GPU's memory, beside RAM.
    n_session: the number of sessions that share the memory. cite: summaries have sources. audit:
    the sources of an answer have the attention of its tokens to them. rope: the engine's
    scaling of positions if it is not the model's own, by whose factor the trained context grows.
    zip: how the KV cache that is kept of a text is compressed; None: it is not.
    """

    task: Task = field(default_factory=Task)
    params: SamplerParams = field(default_factory=lambda: SamplerParams(temp=0))
    n_ctx: int | None = None
    attn: str = "auto"
    min_mass: float | None = None
    prefill: str = "auto"
    type_k: str | None = None
    type_v: str | None = None
    kv_ram: int | None = None
    kv_dir: Path | None = None
    kv_vram: int | None = None
    n_session: int = 1
    cite: bool = False
    audit: bool = False
    rope: RopeScaling | None = None
    zip: KVzip | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The choices made. n_text: tokens of the document; n_room: how many of them fit a prompt."""

    n_text: int
    n_room: int
    n_ctx: int
    n_train: int
    prefill: str
    type_k: str
    type_v: str
    n_bytes: int  # of the KV cache at n_ctx
    kv_ram: int | None = None  # bytes of it that are in memory, None: all
    kv_vram: int | None = None  # bytes of it in a GPU's memory, the rest in RAM

    @property
    def whole(self) -> bool:
        """Whether the document is read at once."""
        return self.n_text <= self.n_room

    def __str__(self) -> str:
        how = "whole" if self.whole else f"in parts of at most {self.n_room}"
        types = self.type_k if self.type_k == self.type_v else f"{self.type_k}/{self.type_v}"
        beyond = f", trained on {self.n_train}" if self.n_ctx > self.n_train else ""
        where = f"in memory ({self.n_bytes / 1e6:.0f} MB)"
        if self.kv_ram is not None:
            where = f"on disk ({self.n_bytes / 1e6:.0f} MB, {self.kv_ram / 1e6:.0f} MB in memory)"
        if self.kv_vram is not None:
            where = f"in RAM ({self.n_bytes / 1e6:.0f} MB, {self.kv_vram / 1e6:.0f} MB on the GPU)"
        return (
            f"{self.n_text} tokens, read {how}; context {self.n_ctx}{beyond}, "
            f"KV cache {types} {where}, prefill {self.prefill}"
        )


def choose(engine: "Engine", settings: Settings, n_text: int, n_frame: int) -> Plan:
    """The plan for a document of n_text tokens, in prompts with n_frame more around it.

    The whole document is read at once if the asked or trained context and the memory allow it: with
    an f16 KV cache, else with q8_0, else with f16 in a file, or for a GPU in RAM; otherwise it is
    read in parts. Raises ContextError if the context has no room for parts and the answers about
    them.
    """
    n_answer = settings.task.n_token
    n_train = _trained(engine, settings)
    n_around = n_frame + n_answer + SLACK
    n_whole = _rounded(n_text + n_around)
    if n_whole <= (settings.n_ctx or n_train):
        for types in _types(engine, settings):
            if _fits(engine, settings, n_whole, types):
                return _plan(engine, settings, n_text, n_whole, n_around, types)
        types = _types(engine, settings)[0]
        if (part := _part(engine, settings, n_whole, types)) is not None:
            return _plan(engine, settings, n_text, n_whole, n_around, types, part)
    types = _types(engine, settings)[0]
    n_ctx = settings.n_ctx or min(n_train, PART_CTX)
    # The answers about two parts must fit a prompt, otherwise joining would never end.
    n_least = n_around + 2 * (n_answer + HEADING)
    while settings.n_ctx is None and n_ctx // 2 >= n_least:
        if _fits(engine, settings, n_ctx, types):
            break
        n_ctx //= 2
    if n_ctx < n_least:
        raise ContextError(
            f"n_ctx is {n_ctx}, a text of {n_text} tokens read in parts, with answers of "
            f"{settings.task.n_words} words, needs at least {n_least}: raise n_ctx or lower "
            "n_words"
        )
    return _plan(engine, settings, n_text, n_ctx, n_around, types)


def _trained(engine: "Engine", settings: Settings) -> int:
    """The trained context in tokens, with stretched positions."""
    return int(engine.hp.n_ctx_train * (settings.rope.factor if settings.rope else 1))


def _rounded(n: int) -> int:
    return -(-n // 256) * 256


def _types(engine: "Engine", settings: Settings) -> list[tuple[str, str]]:
    """The types to try. Only dense decoding is certain to read q8_0 wherever the backend does."""
    k, v = settings.type_k, settings.type_v
    small = settings.attn in ("dense", "auto") and engine.hp.head_dim % 32 == 0
    types = ["f16", "q8_0"] if small and "q8_0" in engine.backend.kv_types else ["f16"]
    return list(dict.fromkeys((k or type, v or type) for type in types))


def _fits(engine: "Engine", settings: Settings, n_ctx: int, types: tuple[str, str]) -> bool:
    n_kv, free = _needed(engine, settings, n_ctx, types)
    limits = [most for most in (settings.kv_ram, settings.kv_vram) if most is not None]
    return n_kv <= min([free, *limits])


def _part(
    engine: "Engine", settings: Settings, n_ctx: int, types: tuple[str, str]
) -> dict[str, int] | None:
    """The memory limit of a session whose KV cache is in a file or in RAM: kv_ram or kv_vram.

    None if that is impossible.
    """
    n_kv, free = _needed(engine, settings, n_ctx, types)
    host = next((place.host for place in engine.places if not place.kv_backend.on_host), None)
    if host is not None:
        name, asked, room = "kv_vram", settings.kv_vram, host.free_bytes()
    elif settings.kv_dir is not None:
        name, asked, room = "kv_ram", settings.kv_ram, shutil.disk_usage(settings.kv_dir).free
    else:
        return None
    most = free if asked is None else asked
    fits = n_kv <= room * MEMORY_SHARE / settings.n_session
    return {name: most} if fits and most >= n_kv // LEAST_IN_MEMORY else None


def _needed(
    engine: "Engine", settings: Settings, n_ctx: int, types: tuple[str, str]
) -> tuple[int, int]:
    """Bytes of the KV cache, and of the memory that one session may use for it."""
    plan = engine.memory_plan(n_ctx, type_k=types[0], type_v=types[1])
    return plan.kv, int(plan.available * MEMORY_SHARE / settings.n_session) - plan.workspace


def _plan(
    engine: "Engine",
    settings: Settings,
    n_text: int,
    n_ctx: int,
    n_around: int,
    types: tuple[str, str],
    part: dict[str, int] | None = None,
) -> Plan:
    n_room = n_ctx - n_around
    prefill = settings.prefill
    if prefill == "auto":
        prefill = prefill_for(min(n_text, n_room))
    return Plan(
        n_text=n_text,
        n_room=n_room,
        n_ctx=n_ctx,
        n_train=_trained(engine, settings),
        prefill=prefill,
        type_k=types[0],
        type_v=types[1],
        n_bytes=engine.memory_plan(n_ctx, type_k=types[0], type_v=types[1]).kv,
        **(part or {}),
    )
