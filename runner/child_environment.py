"""The environment of the processes that this package starts."""

import os
from collections.abc import Mapping


def child_environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child process: it imports nothing from the working directory.

    PYTHONPATH keeps its absolute folders only: an empty entry is the working directory. Such a
    process is started with -P.
    """
    # OpenBLAS, which nothing here calls, would map memory for a thread a core.
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", **own}
    folders = [p for p in env.pop("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(p)]
    return env | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})
