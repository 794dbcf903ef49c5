"""The quick tier's cases of a test that has many: those that differ most."""

from collections.abc import Mapping, Sequence


def quick_cases(cases: Sequence[Mapping[str, object]], most: int) -> set[int]:
    """The numbers of at most `most` cases, by their parameters, that have as many values as can be.

    A fault falls where a parameter has the value that shows it. Each case chosen adds the most
    values that none before it has; among equals those come first that lie evenly spaced.
    """
    n = len(cases)
    spread = [i * n // most for i in range(min(n, most))]
    order = [*spread, *(i for i in range(n) if i not in spread)]
    values = [{(name, _said(value)) for name, value in case.items()} for case in cases]
    chosen, seen = list[int](), set[tuple[str, str]]()
    while len(chosen) < min(n, most):
        best = max((i for i in order if i not in chosen), key=lambda i: len(values[i] - seen))
        chosen.append(best)
        seen |= values[best]
    return set(chosen)


def _said(value: object) -> str:
    """A value as text, without the address that its type may show."""
    return getattr(value, "__name__", None) or repr(value).partition(" at 0x")[0]
