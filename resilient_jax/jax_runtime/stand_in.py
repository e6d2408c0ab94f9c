"""Tells a coordination service at once that the process of a seat is gone.

The service knows heartbeats, registering and shutdown, not connections: after SIGKILL it counts a process as connected
until a heartbeat is missed, which takes a day here (`HEARTBEAT_TIMEOUT_S`). Until then the others wait for the dead in
`get_live_nodes`, and XLA's GPU client does not abort a NCCL clique that it is in. So a stand-in registers under the
seat, which the service takes for a restart of the process (another incarnation), and then shuts down, which makes the
seat disconnected. Both are events that end these waits; together they take 4 to 8 ms.

The old process is fenced by that, but not ended, also if it was only stopped: it is its agent's to kill. A process that
registers under the seat afterwards is a member like any other. Imports no jax.
"""

from typing import Final

from resilient_jax.ids import Seat
from resilient_jax.jax_runtime.world_forming import new_client

TIMEOUT_S: Final = 10
"""Of registering: milliseconds in a world that has been formed; before, the others are waited for."""


def disconnect_seat(address: str, seat: Seat) -> None:
    """Make the service at `address` count the process of a seat as gone.

    Do not call it again for a seat that another process has taken since: it would be that process that is gone.

    Raises:
        JaxRuntimeError, RuntimeError: the service does not answer, or another process registered meanwhile.
    """
    client, _ = new_client(address, seat, TIMEOUT_S, tells_service=True)
    client.connect()
    client.shutdown()
