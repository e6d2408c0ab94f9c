"""The process of a standby: `python -m resilient_jax.worker.standby_process`, which only an agent starts.

It makes no JAX backend, so it touches no device. When it is promoted it runs the script as `python SCRIPT` would: as
`__main__`, with the same arguments, search path and environment, and with tracebacks that begin in the script.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from resilient_jax.protocol.standby_messages import (
    STANDBY_CONNECTION_VARIABLE,
    STANDBY_ORDER_DECODER,
    PrepareStandby,
)
from resilient_jax.protocol.worker_messages import ImportsReported
from resilient_jax.worker.imported_modules import find_foreign_module, find_script_folder, import_again
from resilient_jax.worker.promotion import (
    UNFIT_EXIT_CODE,
    StandbyConnection,
    become_worker,
    hold_at_gate,
    refuse_promotion,
)


def main() -> None:
    """Get ready, wait, and run the script."""
    # Taken out of the environment: what the script starts must not take itself for a standby.
    connection = StandbyConnection(
        int(os.environ.pop(STANDBY_CONNECTION_VARIABLE)), STANDBY_ORDER_DECODER, send_timeout_s=None
    )
    try:
        (received,) = connection.receive()
    except EOFError:
        sys.exit(UNFIT_EXIT_CODE)
    order = received.message
    assert isinstance(order, PrepareStandby), "the agent's first"
    # In the place of the current folder, which `-m` puts there.
    sys.path[0] = find_script_folder(order.command[0])
    if order.imports is not None:
        _import_and_wait(connection, order.imports)
    else:
        hold_at_gate(connection)
    del connection, received
    run_script(order.command)


def _import_and_wait(connection: StandbyConnection, imports: ImportsReported) -> None:
    """Import what the worker has imported, then return when this process is the worker."""
    own_path = sys.path[:]
    sys.path[:] = imports.search_path
    num_failed = import_again(imports)
    if reason := find_foreign_module(imports, own_path[0]):
        refuse_promotion(connection, reason)
    sys.path[:] = own_path
    become_worker(connection, num_failed_imports=num_failed, replaces_environment=True)


def run_script(command: Sequence[str]) -> None:
    """Run a script with its arguments in this process, as `python SCRIPT ARGUMENTS...` would.

    Raises:
        SystemExit: the script ended with it, or with an error, which has been printed.
    """
    sys.argv[:] = command
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
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    else:
        return
    sys.exit(1)


def _load_script(script: str) -> tuple[CodeType, ModuleType]:
    """Return the code of a script, and the module `__main__` that it runs in, as Python's start makes it."""
    path = os.path.join(os.getcwd(), script)  # not normalized: Python does not, either
    code = compile(Path(script).read_bytes(), path, "exec", dont_inherit=True)
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


if __name__ == "__main__":
    main()
