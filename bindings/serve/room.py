"""The memory of a model's process as one plan: slots, their drafters, the prompt cache."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tamis.engine.memory_plan import MemoryPlan

GIB = 1 << 30
CACHE_SHARE = 4  # the prompt cache takes one CACHE_SHARE-th of the free memory


class Slots(NamedTuple):
    """Equal sessions of a model: their number, and the plan of one of them by device."""

    n: int
    n_ctx: int
    plans: Mapping[str, MemoryPlan]
    loaded: bool = True  # whether the weights were already subtracted from the plans' `available`

    def bytes_on(self, device: str) -> int:
        """The bytes of that device's memory."""
        plan = self.plans.get(device)
        if plan is None:
            return 0
        return self.n * (plan.kv + plan.workspace) + (0 if self.loaded else plan.weights)

    @property
    def in_ram(self) -> int:
        """The bytes of RAM that back a GPU's memory."""
        return self.n * sum(plan.host for plan in self.plans.values())

    @property
    def on_disk(self) -> int:
        """The bytes of files."""
        return self.n * sum(plan.disk for plan in self.plans.values())


class Room(NamedTuple):
    """Free memory; ram: the name of the CPU among devices, and its bytes of RAM."""

    ram: tuple[str, int]
    disk: int | None = None  # bytes in the folder of the KV cache; None: there is none

    def left(self, slots: Sequence[Slots], n_cache: int = 0) -> int:
        """Free bytes of RAM beside all these slots and a prompt cache of n_cache bytes.

        Raises MemoryError if they exceed a device's memory, RAM or the disk.
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
