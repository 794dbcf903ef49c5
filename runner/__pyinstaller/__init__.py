"""What PyInstaller needs to know of this package: the entry point `pyinstaller40` names it.

A frozen program has tamis's modules, which are imported by name, and compiled kernels: those that
came with the package, or else those that were compiled on this machine so far.
"""

import os


def get_hook_dirs() -> list[str]:
    """The folders with hooks."""
    return [os.path.dirname(__file__)]
