"""Selectors of other packages, which name themselves in the entry points `tamis.selectors`.

In such a package's pyproject.toml: `[project.entry-points."tamis.selectors"]` and below it `name =
"package.module:Class"`, a frozen dataclass as described in `select/base`.
"""

import dataclasses
from importlib.metadata import EntryPoint, entry_points
from typing import Any

GROUP = "tamis.selectors"


class PluginError(ValueError):
    """A package's selector cannot be used; the message names the package and says why."""


def installed() -> dict[str, EntryPoint]:
    """The entry point of each selector, by name; none is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}


def imported(point: EntryPoint) -> Any:
    """The class that an entry point names. Raises PluginError."""
    of = "" if point.dist is None else f" of package {point.dist.name}"
    try:
        method = point.load()
    except Exception as error:
        raise PluginError(
            f"selector {point.name!r}{of} cannot be imported from {point.value}: "
            f"{type(error).__name__}: {error}; repair or remove the package"
        ) from error
    lacks = [name for name in ("open", "roles") if not hasattr(method, name)]
    if not isinstance(method, type) or not dataclasses.is_dataclass(method) or lacks:
        raise PluginError(
            f"selector {point.name!r}{of} is {point.value}, expected a dataclass with open and "
            "roles: see tamis.select.base.Selector"
        )
    return method
