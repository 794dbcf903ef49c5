"""GPU architectures that PTX is compiled for."""

from typing import NamedTuple


class Target(NamedTuple):
    """A GPU architecture. PTX of a plain one runs on all later GPUs, that of one with "a" on none.

    ptx: the version of the PTX ISA, that of the oldest driver with all the instructions used.
    """

    name: str
    capability: tuple[int, int]
    ptx: str = "8.0"

    @property
    def has_warpgroups(self) -> bool:
        """Whether four warps together multiply tiles in shared memory (wgmma)."""
        return self.name == "sm_90a"

    @property
    def overlaps(self) -> bool:
        """Whether a kernel may be launched before the one before it ends, and wait for it."""
        return self.capability >= (9, 0)

    @property
    def has_clusters(self) -> bool:
        """Whether blocks that run at the same time can wait for each other."""
        return self.capability >= (9, 0)


TARGETS = {target.name: target for target in (Target("sm_80", (8, 0)), Target("sm_90a", (9, 0)))}


def target_of(capability: tuple[int, int]) -> Target | None:
    """The best target of a GPU of this compute capability; None if there is none."""
    if capability == (9, 0):
        return TARGETS["sm_90a"]
    return TARGETS["sm_80"] if capability >= (8, 0) else None


_chosen = TARGETS["sm_80"]


def use(target: Target) -> None:
    """Build kernels for this target from now on."""
    global _chosen
    _chosen = target


def current() -> Target:
    """The target that kernels are built for."""
    return _chosen
