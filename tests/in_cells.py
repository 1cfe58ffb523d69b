"""The code of a notebook, run as the module `__main__` of a process that has all imports done."""

import os
import sys
import traceback
import types


def run(code, folder, said):
    """Run code in a folder, write an error to the file `said`, and exit with status 1 if there was one."""
    os.chdir(folder)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        exec(compile(code, "cells", "exec"), vars(main))
    except BaseException:
        status = 1
        with open(said, "w") as file:
            traceback.print_exc(file=file)
    os._exit(status)
