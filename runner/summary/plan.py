"""How a document is read: at once or in parts, in which context, with which KV cache.

Decided from its tokens, the model's training length and the memory that is free now.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tamis.engine.errors import ContextError
from tamis.sampling.chain import SamplerParams
from tamis.select.notation import prefill_for
from tamis.summary.prompts import Task

if TYPE_CHECKING:
    from tamis.engine.engine import Engine

PART_CTX = 8192  # of parts, where the caller names no context: more only makes attention dearer
SLACK = 16  # tokens that a text may have more inside the chat template than alone
HEADING = 8  # tokens of "Part 12:" and what is around it
MEMORY_SHARE = 0.9  # of the free memory
LEAST_IN_MEMORY = 4  # beside a file there is memory for a quarter of the KV cache


@dataclass(frozen=True, slots=True)
class Settings:
    """What the caller wants; None and "auto" leave it to `choose`.

    n_ctx: context in tokens. attn, prefill: methods as select.notation writes them. type_k, type_v:
    of the KV cache. kv_dir: the folder of a file for a KV cache that memory has no room
    for, None: there is none; kv_ram: bytes of memory beside it, None: what is free. kv_vram: of a
    GPU's, beside RAM. n_session: how many sessions will share the memory.
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


@dataclass(frozen=True, slots=True)
class Plan:
    """What was chosen. n_text: tokens of the document; n_room: of it that a prompt has room for."""

    n_text: int
    n_room: int
    n_ctx: int
    n_train: int
    prefill: str
    type_k: str
    type_v: str
    n_bytes: int  # of the KV cache at n_ctx
    kv_ram: int | None = None  # bytes of these that are in memory, None: all of them
    kv_vram: int | None = None  # and in a GPU's, the rest in RAM

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

    The whole document, where the context that was asked for or trained and the memory allow it:
    with an f16 KV cache, else with q8_0, else with f16 in a file, or of a GPU's in RAM;
    otherwise in parts. Raises ContextError where the context has no room for parts and the answers
    about them.
    """
    n_answer, n_train = settings.task.n_token, engine.hp.n_ctx_train
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
    # What is written about two parts must fit, or nothing would ever get shorter.
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


def _rounded(n: int) -> int:
    return -(-n // 256) * 256


def _types(engine: "Engine", settings: Settings) -> list[tuple[str, str]]:
    """The types to try. Only dense decoding is sure to read q8_0 wherever the backend does."""
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
    """What a session has of memory for a KV cache in a file or in RAM: kv_ram or kv_vram.

    None where they cannot be.
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
    """Bytes of the KV cache, and of the memory that one session can take for it."""
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
        n_train=engine.hp.n_ctx_train,
        prefill=prefill,
        type_k=types[0],
        type_v=types[1],
        n_bytes=engine.memory_plan(n_ctx, type_k=types[0], type_v=types[1]).kv,
        **(part or {}),
    )
