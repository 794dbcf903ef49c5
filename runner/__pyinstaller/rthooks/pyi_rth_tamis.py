"""Child processes of tamis: a frozen program that is started as `-P -m tamis...` runs that module.

sys.executable is the program itself there; grammars and the server start processes by it.
"""

import sys

if sys.argv[1:3] == ["-P", "-m"] and sys.argv[3:] and sys.argv[3].startswith("tamis."):
    import runpy

    _module = sys.argv[3]
    sys.argv[:] = sys.argv[3:]
    runpy.run_module(_module, run_name="__main__", alter_sys=True)
    sys.exit()
