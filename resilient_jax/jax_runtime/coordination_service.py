"""The coordination service of one world, as a process of its own: it survives every worker.

Protocol, in lines: it prints `ready` once jaxlib is loaded (0.4 s; so one is kept warm), reads
`<bind address> <members> <seats>` from stdin, prints `serving <address>` or `failed <reason>`, and ends when stdin
does. Port 0 takes a free port. It also dies with its parent (PR_SET_PDEATHSIG).

While it serves it takes orders `lost <seat>`: the process of that seat was given up, so the others must not wait for it
(see `_disconnect_seat`). It answers `lost <seat> <seconds>`, or `not lost <seat> <reason>`, in any order.

A world has seats 0 to `seats` - 1. The first `members` of them are taken by the processes that form it, each other
one by a process that comes later (see `spare_seats`).

Run: python -m resilient_jax.jax_runtime.coordination_service
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from typing import Final

from resilient_jax.ids import Seat
from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError, RuntimeService, jaxlib_runtime
from resilient_jax.jax_runtime.spare_seats import SpareSeats
from resilient_jax.jax_runtime.worker_environment import PROXY_VARIABLES
from resilient_jax.jax_runtime.world_forming import new_client

HEARTBEAT_TIMEOUT_S: Final = 86400
"""A day: JAX's own failure detector kills every client when it fires, so the agents' detector decides instead."""
SHUTDOWN_TIMEOUT_S: Final = 1
PR_SET_PDEATHSIG: Final = 1
STAND_IN_TIMEOUT_S: Final = 10
"""Time to register: milliseconds in a world that has been formed; before, the stand-in waits for the others."""

_printing = threading.Lock()  # guards standard output: orders are executed on threads


def main() -> None:
    """Serve one world until stdin ends; never return."""
    # Its owner may die at any line, and must not leave a service behind that nobody ends.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for name in PROXY_VARIABLES:  # spare seats and stand-ins are clients of this process itself
        os.environ.pop(name, None)
    _print_line("ready")
    order = sys.stdin.readline()
    if not order.strip():
        os._exit(0)
    try:
        address, num_members, num_seats = _parse(order)
        address = _free_address(address)
        service = _start(address, num_seats)
    except (ValueError, OSError, RuntimeError) as error:
        _print_line(f"failed {' '.join(str(error).split())}")
        os._exit(1)
    # Before the address is told: forming the world waits for these seats, too.
    SpareSeats(address, range(num_members, num_seats)).register()
    _print_line(f"serving {address}")
    while order := sys.stdin.readline():
        # On a thread: in a world that is still being formed a stand-in waits for the others.
        threading.Thread(target=_give_up_seat, args=(address, order.split(), num_seats), daemon=True).start()
    # No orderly end: `service.shutdown()` would abort clients that are still connected directly.
    del service
    os._exit(0)


def _parse(order: str) -> tuple[str, int, int]:
    words = order.split()
    if (
        len(words) != 3
        or ":" not in words[0]
        or not (words[1].isdigit() and words[2].isdigit())
        or not 1 <= int(words[1]) <= int(words[2])
    ):
        raise ValueError(
            f"found {order.strip()!r}, expected '<host:port> <members> <seats>' with at least one member, and a seat "
            "for each"
        )
    return words[0], int(words[1]), int(words[2])


def _give_up_seat(address: str, words: list[str], num_seats: int) -> None:
    """Execute an order `lost <seat>`."""
    if len(words) != 2 or words[0] != "lost" or not words[1].isdigit() or int(words[1]) >= num_seats:
        _print_line(
            f"not lost - found {' '.join(words)!r}, expected lost <seat> with a seat below {num_seats}"
        )
        return
    began_s = time.monotonic()
    try:
        _disconnect_seat(address, Seat(int(words[1])))
    except (JaxRuntimeError, RuntimeError) as error:
        _print_line(f"not lost {words[1]} {' '.join(str(error).split())}")
    else:
        _print_line(f"lost {words[1]} {time.monotonic() - began_s:.4f}")


def _free_address(address: str) -> str:
    """Return `address` with a real port; raise OSError if another process listens there.

    gRPC binds with SO_REUSEPORT: two services on one port would share its clients without an error.
    """
    host, _, port = address.rpartition(":")
    name = host.strip("[]")
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((name, int(port)))
            probe.listen(1)
        except OSError as error:
            raise OSError(f"cannot bind {address}: {error.strerror}") from error
        return f"{host}:{probe.getsockname()[1]}"


def _start(address: str, num_seats: int) -> RuntimeService:
    return jaxlib_runtime.get_distributed_runtime_service(
        address,
        num_seats,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        recoverable=True,
    )


def _print_line(line: str) -> None:
    with _printing:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _disconnect_seat(address: str, seat: Seat) -> None:
    """Make the service at `address` count the process of a seat as gone, by a stand-in.

    The service knows heartbeats, registering and shutdown, not connections: after SIGKILL it counts a process as
    connected until a heartbeat is missed, which takes a day here (`HEARTBEAT_TIMEOUT_S`). Until then the others wait
    for the dead in `get_live_nodes`, and XLA's GPU client does not abort a NCCL clique that it is in. So a stand-in
    registers under the seat, which the service takes for a restart of the process (another incarnation), and then shuts
    down, which makes the seat disconnected. Both are events that end these waits; together they take 4 to 8 ms.

    The old process is fenced by that, but not ended, also if it was only stopped: it is its agent's to kill. A process
    that registers under the seat afterwards is a member like any other.

    Do not call it again for a seat that another process has taken since: it would be that process that is gone.

    Raises:
        JaxRuntimeError, RuntimeError: the service does not answer, or another process registered meanwhile.
    """
    client, _ = new_client(address, seat, STAND_IN_TIMEOUT_S, tells_service=True)
    client.connect()
    client.shutdown()


if __name__ == "__main__":
    main()
