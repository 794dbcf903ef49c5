"""Modules, the server's page and compiled kernels of a frozen program."""

from pathlib import Path

from PyInstaller.config import CONF
from PyInstaller.utils.hooks import collect_data_files, collect_submodules, logger

from tamis.__pyinstaller.kernels import write_kernels

_APART = ("tamis.tools", "tamis.__pyinstaller")

hiddenimports = collect_submodules(
    "tamis", filter=lambda name: not name.startswith(_APART), on_error="ignore"
)
excludedimports = ["numba", "llvmlite", "numba_cuda"]  # a frozen program compiles nothing
datas = collect_data_files("tamis", includes=["**/page.html"])
kernels = [
    (str(path), "tamis/jit_kernels/compile/kernels")
    for path in write_kernels(Path(CONF["workpath"]))
]
datas += kernels
if not kernels:
    logger.warning(
        "tamis: no kernels are compiled here: run the program once, then freeze it; "
        "the frozen program has the kernels of what it ran"
    )
