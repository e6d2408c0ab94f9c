"""The process of a standby: `python -m resilient_jax.worker.standby_process`, which only an agent starts.

It makes no JAX backend, so it touches no device. When it is promoted it runs the script as `python SCRIPT` would: as
`__main__`, with the same arguments, search path and environment, and with tracebacks that begin in the script.
"""

import os
import sys

from resilient_jax.protocol.standby_messages import (
    STANDBY_CONNECTION_VARIABLE,
    STANDBY_ORDER_DECODER,
    PrepareStandby,
)
from resilient_jax.protocol.worker_messages import ImportsReported
from resilient_jax.worker.imported_modules import find_foreign_module, find_script_folder, import_again
from resilient_jax.worker.kept_imports import begin_kept_imports
from resilient_jax.worker.promotion import (
    UNFIT_EXIT_CODE,
    StandbyConnection,
    become_worker,
    refuse_promotion,
)
from resilient_jax.worker.script_process import run_script


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
    begin_kept_imports(order.program)
    _import_and_wait(connection, order.imports)
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
    become_worker(connection, num_failed)


if __name__ == "__main__":
    main()
