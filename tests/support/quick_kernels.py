"""The kernels that the chosen cases of op tests can need: those of values that they have."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tamis.jit_kernels.contract.program import KernelSpec


def texts(value: object) -> Iterator[str]:
    """The texts in a parameter, which may be a row of them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | list | set | frozenset):
        for part in value:
            yield from texts(part)


def constants_of(test: Callable[..., Any]) -> list[object]:
    """The constants of a test's code, or of the function that it wraps."""
    return list(getattr(test, "__wrapped__", test).__code__.co_consts)


def needed(
    listed: Iterable[KernelSpec], chosen: Iterable[object], there: Iterable[object]
) -> set[KernelSpec]:
    """The kernels without those of a type that only cases have which are not chosen.

    chosen, there: what a module's chosen cases have as parameters and constants, and all cases. A
    type that begins as one of a chosen case does, such as Q4_Kx16 beside Q4_K, is chosen with it.
    A kernel that is left out and needed all the same is compiled where it is linked: one more start
    of the compilers.
    """
    kept = {text for value in chosen for text in texts(value)}
    left_out = {
        text
        for value in there
        for text in texts(value)
        if not any(text.startswith(one) or one.startswith(text) for one in kept if one)
    }
    return {spec for spec in listed if not left_out & set(spec.constants)}
