"""The seats of a world that no process has yet, so that one can join while the world's members train.

To form a world is to wait for every seat twice: all register with the coordination service, and each publishes its
devices. Stand-ins in the service's own process do both for the spare seats, and then go. Their clients stop polling,
and the service, which is recoverable, takes a process that registers under such a seat later for a restart of the
stand-in. That process waits for no other: the devices of all seats are in the service's store.

A seat is for one process. XLA keeps a clique (the connections of some devices) as long as its backend lives, under the
ids of these devices, and a clique with a dead process is broken for good. So a process that comes back takes a seat,
and with it device ids, that no process had. Imports no jax.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Final

from resilient_jax.ids import Seat
from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError, RuntimeClient
from resilient_jax.jax_runtime.local_topology import copy_local_topology
from resilient_jax.jax_runtime.world_forming import CPU_LOCAL_TOPOLOGY_KEY, new_client

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 3600
"""Time that stand-ins wait: longer than any world takes to form; an abandoned service is ended before."""


class SpareSeats:
    """Stand-ins for seats of the service at `address`.

    Args:
        address: where the service, which runs in this process, is reached.
        seats: the ones that no process takes when the world is formed.
    """

    def __init__(self, address: str, seats: Sequence[int]) -> None:
        self._address = address
        self._seats = [Seat(seat) for seat in seats]

    def register(self) -> None:
        """Register the seats and publish their devices, on threads, as soon as the members have come."""
        if self._seats:
            threading.Thread(target=self._run, name="resilient-jax-spare-seats", daemon=True).start()

    def _run(self) -> None:
        clients = [new_client(self._address, seat, TIMEOUT_S)[0] for seat in self._seats]
        # Registering is a barrier of all seats: each stand-in waits there for all others.
        threads = [threading.Thread(target=_connect, args=(client,), daemon=True) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            # Seat 0 is taken by one of the processes that form the world.
            topology = clients[0].blocking_key_value_get_bytes(
                f"{CPU_LOCAL_TOPOLOGY_KEY}/0", TIMEOUT_S * 1000
            )
            for seat in self._seats:
                clients[0].key_value_set_bytes(
                    f"{CPU_LOCAL_TOPOLOGY_KEY}/{seat}", copy_local_topology(topology, seat), True
                )
        except (JaxRuntimeError, ValueError) as error:
            # The forming was given up: its members have made the topology unreadable, and will not wait for it.
            logger.debug("spare seats of %s: %s", self._address, error)


def _connect(client: RuntimeClient) -> None:
    try:
        client.connect()
    except (JaxRuntimeError, RuntimeError) as error:
        logger.debug("a stand-in did not register: %s", error)
