"""Runs a script as `python SCRIPT` does, from the copy that the job has kept: as `__main__`, with the same arguments.

`cluster.worker_process` starts a process of it, with the search path that the script is to have; a standby and the fork
server run a script in the same way in processes of theirs. Imports no jax: the script may set variables before it does.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType

from resilient_jax.notices import catch_notices
from resilient_jax.worker.kept_imports import are_imports_kept, begin_kept_imports, read_script


def main() -> None:
    """Run the script of the command line."""
    program, *command = sys.argv[1:]
    begin_kept_imports(program)
    run_script(command)


def run_script(command: Sequence[str]) -> None:
    """Run a script with its arguments in this process, as `python SCRIPT ARGUMENTS...` would.

    Raises:
        SystemExit: the script raised `SystemExit`, or an error, which has been printed.
    """
    sys.argv[:] = command
    catch_notices()
    try:
        code, module = _load_script(command[0])
        exec(code, vars(module))
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        trace = error.__traceback__
        # Without the frames of this file: the traceback of a script begins in the script.
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        if are_imports_kept() and sys.excepthook is sys.__excepthook__:
            # Python's own hook shows the lines that are on disk now.
            traceback.print_exception(type(error), error.with_traceback(trace), trace)
        else:
            sys.excepthook(type(error), error.with_traceback(trace), trace)
    else:
        return
    sys.exit(1)


def _load_script(script: str) -> tuple[CodeType, ModuleType]:
    """Return the code of a script, and the module `__main__` that it runs in, as Python's start makes it."""
    path = os.path.join(os.getcwd(), script)  # not normalized: Python does not, either
    code = compile(read_script(path), path, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    vars(module).update(
        __file__=path,
        __loader__=SourceFileLoader("__main__", path),
        __builtins__=sys.modules["builtins"],
        __cached__=None,
    )
    if "__annotations__" in vars(sys.modules["__main__"]):  # not any more in newer Pythons
        module.__annotations__ = {}
    sys.modules["__main__"] = module  # where pickle and multiprocessing look for what the script defines
    return code, module
