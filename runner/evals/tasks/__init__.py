"""Tasks: one file for each family, found by its file name; base and words are shared."""

import importlib
import pkgutil
from collections.abc import Sequence

from tamis.evals.tasks.base import Task

TEXT = "text"  # the task that predicts a text, which has no prompts


def tasks() -> dict[str, Task]:
    """All tasks by name: the TASKS of every file in this folder."""
    files = sorted({m.name for m in pkgutil.iter_modules(__path__)} - {"base", "words"})
    families = (importlib.import_module(f"{__name__}.{name}").TASKS for name in files)
    return {task.name: task for family in families for task in family}


def chosen(words: Sequence[str]) -> tuple[str, ...]:
    """The names of tasks in a list of names and groups, each once. Raises ValueError."""
    groups: dict[str, list[str]] = {}
    for name, task in tasks().items():
        groups.setdefault(task.group, []).append(name)
    groups |= {TEXT: [TEXT], "all": [*tasks(), TEXT]}
    found: dict[str, None] = {}
    for word in ",".join(words).split(","):
        if word not in groups and word not in tasks():
            known = ", ".join(dict.fromkeys([*groups, *tasks()]))
            raise ValueError(f"there is no task {word!r}, expected some of {known}")
        found |= dict.fromkeys(groups.get(word, [word]))
    return tuple(found)
