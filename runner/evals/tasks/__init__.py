"""Tasks: one family a file, found by its file name; what they share is base and words."""

import importlib
import pkgutil

from tamis.evals.tasks.base import Task


def tasks() -> dict[str, Task]:
    """All tasks by name: what every file of this folder has in TASKS."""
    files = sorted({m.name for m in pkgutil.iter_modules(__path__)} - {"base", "words"})
    families = (importlib.import_module(f"{__name__}.{name}").TASKS for name in files)
    return {task.name: task for family in families for task in family}
