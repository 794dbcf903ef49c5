"""The memory of a model's process as one plan: slots, what drafts for them, the prompt cache."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tamis.engine.memory_plan import MemoryPlan

GIB = 1 << 30
CACHE_SHARE = 4  # the prompt cache has a part of the memory that is free, this small


class Slots(NamedTuple):
    """Sessions of a model that are alike: how many, and the plan of one of them by device."""

    n: int
    n_ctx: int
    plans: Mapping[str, MemoryPlan]
    loaded: bool = True  # whether the plans' `available` is without the weights already

    def bytes_on(self, device: str) -> int:
        """Bytes of that device's memory."""
        plan = self.plans.get(device)
        if plan is None:
            return 0
        return self.n * (plan.kv + plan.workspace) + (0 if self.loaded else plan.weights)

    @property
    def in_ram(self) -> int:
        """Bytes of RAM that stand behind a GPU's memory."""
        return self.n * sum(plan.host for plan in self.plans.values())

    @property
    def on_disk(self) -> int:
        """Bytes of files."""
        return self.n * sum(plan.disk for plan in self.plans.values())


class Room(NamedTuple):
    """What is free. ram: the name of the CPU among devices, and bytes of RAM."""

    ram: tuple[str, int]
    disk: int | None = None  # bytes in the folder of the KV cache; None: there is none

    def left(self, slots: Sequence[Slots], n_cache: int = 0) -> int:
        """Bytes of RAM that are free beside all these slots, and a prompt cache of n_cache bytes.

        Raises MemoryError where a device's memory, RAM or the disk is less than what they take.
        """
        first, (cpu, free) = slots[0], self.ram
        told = f"{first.n} contexts of {first.n_ctx} tokens"
        for device, plan in first.plans.items():
            needed = sum(each.bytes_on(device) for each in slots)
            if device != cpu and needed > plan.available:
                raise _lack(told, needed, plan.available, f" of {device}", "")
        needed = sum(each.bytes_on(cpu) + each.in_ram for each in slots)
        if needed + n_cache > free:
            cache = f" with a prompt cache of {n_cache / GIB:.1f} GiB" if n_cache else ""
            raise _lack(told + cache, needed + n_cache, free, "", ", --cache-ram" * bool(n_cache))
        needed_disk = sum(each.on_disk for each in slots)
        if self.disk is not None and needed_disk > self.disk:
            raise _lack(told, needed_disk, self.disk, " in --kv-dir", "")
        return free - needed - n_cache


def _lack(told: str, needed: int, free: int, where: str, flag: str) -> MemoryError:
    return MemoryError(
        f"{told} take {needed / GIB:.1f} GiB{where}, free: {free / GIB:.1f} GiB; lower --ctx"
        f"{flag} or --parallel"
    )
