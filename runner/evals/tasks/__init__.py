"""Tasks: one file for each family, found by its file name; base and words are shared."""

import importlib
import pkgutil

from tamis.evals.tasks.base import Task


def tasks() -> dict[str, Task]:
    """All tasks by name: the TASKS of every file in this folder."""
    files = sorted({m.name for m in pkgutil.iter_modules(__path__)} - {"base", "words"})
    families = (importlib.import_module(f"{__name__}.{name}").TASKS for name in files)
    return {task.name: task for family in families for task in family}
