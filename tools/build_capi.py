"""Make libtamis and tamis.h: the flat API for C programs, run by an embedded Python.

usage: python -m tamis.tools.build_capi FOLDER

It needs a C compiler, a Python with a shared library, and the extra `capi` (cffi). The library is
for this machine and this environment: it finds tamis where this Python finds it.
"""

import argparse
import json
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from tamis.bindings import capi

_INIT = """\
import site, sys
sys.executable = {executable!r}
for folder in {folders!r}:
    site.addsitedir(folder)
from tamis_capi import ffi
from tamis.bindings.capi import define
define(ffi)
"""


# Set before Python starts: the paths of its library and packages, whatever PATH says.
_FIRST = """\
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
static void __attribute__((constructor)) tamis_program(void)
{{
    if (!Py_IsInitialized())
        Py_SetProgramName(L{executable});
}}
"""


def build(folder: Path) -> tuple[Path, Path]:
    """The library and the header, made in `folder`. Raises ImportError, RuntimeError."""
    try:
        from cffi import FFI
    except ImportError as e:
        raise ImportError("libtamis needs cffi: pip install 'tamis[capi]'") from e
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        raise RuntimeError(
            "this Python has no shared library (libpython): use one built with --enable-shared"
        )
    folders = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    ffi = FFI()
    ffi.embedding_api(capi.STRUCTS + capi.FUNCTIONS)
    lib = str(sysconfig.get_config_var("LIBDIR"))
    ffi.set_source(
        "tamis_capi",
        "#include <stdbool.h>\n#include <stddef.h>\n#include <stdint.h>\n"
        + _FIRST.format(executable=json.dumps(sys.executable))
        + capi.STRUCTS,
        extra_link_args=[f"-L{lib}", f"-Wl,-rpath,{lib}"],
    )
    ffi.embedding_init_code(_INIT.format(executable=sys.executable, folders=folders))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        made = ffi.compile(tmpdir=scratch, target="libtamis.*", verbose=False)
        library = folder / Path(made).name
        shutil.copy(made, library)
    header = folder / "tamis.h"
    header.write_text(capi.header(), encoding="utf-8")
    return library, header


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="where libtamis and tamis.h go")
    for path in build(parser.parse_args(argv).folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
