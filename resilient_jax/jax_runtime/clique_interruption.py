"""Ends the wait for a clique that will never be complete: the third wait of forming a world.

A clique is formed by the first program that has a collective over its devices, on the thread that runs that
program, so unlike in `world_forming` the thread cannot be abandoned: the wait itself must end. Per process and clique,
gloo
1. publishes under `cpu:gloo/<device ids>/<rank>` its listener and one number per pair,
2. waits for the same of all others: a peer that died before step 1 is waited for 30 minutes,
3. connects every pair; one side opens the connection to the other's listener and writes the number,
   the other waits for it: a peer that died after step 1 is waited for 30 s.

Step 2 ends when we publish an unreadable value for the peers that have not published. Step 3 ends when we
connect to our own listener under the number that the pair waits for, and close the connection. (A pair that opens the
connection itself gets one, or a refusal, from the kernel; `abort_collectives` shuts the former.)
All this is harmless to a complete clique. It breaks an incomplete one permanently, on all processes: so it must
have ended on every process before the next generation begins in the same world.

When the service is dead nothing can be published, not by gloo either, which waits for that, too. Then our own
client shuts down: that needs no answer, cancels the waits for keys, and from then on its connection may be shut
without harm, which ends the other waits. This world forms no clique any more; without its service it could not anyway.
"""

import logging
import math
import socket
import struct
import threading
from collections.abc import Callable
from typing import Final

from resilient_jax.ids import DEVICE_IDS_PER_SEAT, Seat
from resilient_jax.jax_runtime.abort import shut_connections_to
from resilient_jax.jax_runtime.gloo import Endpoint, GlooSockets
from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError, RuntimeClient

logger = logging.getLogger(__name__)

GLOO_KEY_DIRECTORY: Final = "cpu:gloo"
UNREADABLE_VALUE: Final = b"\xff" * 8 + b" resilient_jax: this world was given up"
"""To gloo this is a host name of 2**64 - 1 bytes, to protobuf an endless number: both refuse it cleanly."""
PROBE_TIMEOUT_MS: Final = 100
"""Timeout of the one request that can have one; without an answer no other is made."""
PUBLISH_DELAY_S: Final = 0.04
"""Shutting connections is enough for complete cliques; only a thread that still waits after that needs more."""
SILENCE_LIMIT_S: Final = 0.25
"""A service that has not answered for so long is dead: on a busy machine one that lives takes longer than a probe."""
HANG_UP_DELAY_S: Final = 0.12
SERIES_GAP_S: Final = 1.0
"""Calls that are further apart belong to different interruptions."""
ANSWER_LIMIT_S: Final = 0.5
CONNECT_TIMEOUT_S: Final = 0.2
"""Our own listener is on this host: it answers at once or not at all."""
_WORD: Final = struct.Struct("<Q")

Published = dict[str, dict[int, bytes]]
"""What gloo has published, by clique (its device ids with commas) and rank."""


class CliqueInterrupter:
    """Ends the waits for one world's cliques, with stronger means at each repeated call.

    Args:
        client: this process's client of the world's coordination service.
        service: the service's address as the client reaches it: the relay's.
        gloo: the world's sockets.
        known_key: a key that is in the service's store: it can be read if the service is alive.

    Attributes:
        is_detached: whether the service was found dead: this world forms no clique any more.
        is_current: tells whether the wait for a clique of these seats may be ended; others are complete, or given up.
    """

    def __init__(self, client: RuntimeClient, service: Endpoint, gloo: GlooSockets, known_key: str) -> None:
        self._client = client
        self._service = service
        self._gloo = gloo
        self._known_key = known_key
        self._began_s = -math.inf
        self._last_s = -math.inf
        self.is_detached = False
        self._releasing: threading.Thread | None = None
        self._called: set[int] = set()
        self.is_current: Callable[[frozenset[Seat]], bool] = lambda _: True

    def interrupt(self, now_s: float) -> int:
        """End the waits of this process for cliques that are being formed.

        Repeat it, as `abort_collectives`, until the waiting thread has unwound. Does nothing at first, then
        publishes, then connects and closes. Blocks for 0.1 s, some times, when the service is dead.

        Returns:
            The number of waits that it may have ended.
        """
        # Another interruption than before: it begins with the weakest means again.
        if now_s - self._last_s > SERIES_GAP_S:
            self._began_s = now_s
        self._last_s = now_s
        since_s = now_s - self._began_s
        if since_s < PUBLISH_DELAY_S:
            return 0
        if not self.is_detached and not is_service_alive(self._client, self._known_key):
            if since_s < SILENCE_LIMIT_S:
                return 0
            self.is_detached = True
            self._client.shutdown()  # 0.5 ms, measured with a stopped service
        # Only after the shutdown: to lose the connection ends the process of a client that is in use.
        if self.is_detached:
            return shut_connections_to(self._service)
        return self._release_in_time(may_hang_up=since_s >= HANG_UP_DELAY_S)

    def _release_in_time(self, *, may_hang_up: bool) -> int:
        """Publish, connect and close; return 0 if the service does not answer that within `ANSWER_LIMIT_S`.

        Its calls have no deadline, and it may have died since it was found alive: they never return then, and neither
        would the guard thread, which says that this process lives.
        """
        if self._releasing is not None and self._releasing.is_alive():
            return 0
        released: list[int] = []
        self._releasing = threading.Thread(
            target=lambda: released.append(self._release(may_hang_up=may_hang_up)),
            name="resilient-jax-release-cliques",
            daemon=True,
        )
        self._releasing.start()
        self._releasing.join(ANSWER_LIMIT_S)
        return sum(released)

    def _release(self, *, may_hang_up: bool) -> int:
        try:
            cliques = _read_published(self._client)
        except JaxRuntimeError as error:
            logger.debug("the service does not say which cliques are being formed: %s", error)
            return 0
        published = {
            clique: by_rank for clique, by_rank in cliques.items() if self.is_current(_parse_seats(clique))
        }
        released = sum(_try_publish(self._client, key) for key in find_missing_keys(published))
        return released + (self._hang_up(published) if may_hang_up else 0)

    def _hang_up(self, published: Published) -> int:
        """Connect to our own listener in the place of each missing peer, once, and close.

        Once is enough: gloo keeps a connection that no pair waits for yet.
        """
        calls = 0
        for value in (value for by_rank in published.values() for value in by_rank.values()):
            parsed = parse_rank(value)
            # Only what this process waits for at its own listener: peers end their waits themselves.
            if parsed is None or parsed[0] not in self._gloo.own_listeners:
                continue
            for number in set(parsed[1]) - self._called:
                self._called.add(number)
                calls += _try_call(parsed[0], number)
        return calls


def is_service_alive(client: RuntimeClient, known_key: str) -> bool:
    """Return whether the service is alive. Blocks for `PROBE_TIMEOUT_MS` at most, unlike all other requests."""
    try:
        client.blocking_key_value_get(known_key, PROBE_TIMEOUT_MS)
    except JaxRuntimeError:
        return False
    return True


def find_missing_keys(published: Published) -> list[str]:
    """Return the keys that are waited for: of the ranks of each clique, those that have not published."""
    return [
        f"{GLOO_KEY_DIRECTORY}/{clique}/{rank}"
        for clique, by_rank in published.items()
        for rank in range(clique.count(",") + 1)
        if rank not in by_rank
    ]


def parse_rank(value: bytes) -> tuple[Endpoint, tuple[int, ...]] | None:
    """Return listener and pair numbers from what gloo published, None if the layout is not the expected one.

    Layout (gloo `tcp::Rank`, 64-bit little endian): length of host name, host name, length of address (136),
    `sockaddr_storage` (128), a sequence number, then one number per pair.
    """
    try:
        (name_length,) = _WORD.unpack_from(value, 0)
        at = 8 + name_length
        (address_length,) = _WORD.unpack_from(value, at)
        at += 8
        address, numbers = value[at : at + address_length], value[at + address_length :]
        (family,) = struct.unpack_from("=H", address, 0)
        (port,) = struct.unpack_from("!H", address, 2)
        if family == socket.AF_INET:
            host = socket.inet_ntop(socket.AF_INET, address[4:8])
        elif family == socket.AF_INET6:
            host = socket.inet_ntop(socket.AF_INET6, address[8:24])
        else:
            return None
        return (host, port), tuple(number for (number,) in _WORD.iter_unpack(numbers))
    except (struct.error, ValueError, OverflowError):
        return None


def _parse_seats(clique: str) -> frozenset[Seat]:
    return frozenset(Seat(int(device) // DEVICE_IDS_PER_SEAT) for device in clique.split(","))


def _read_published(client: RuntimeClient) -> Published:
    published: Published = {}
    for key, value in client.key_value_dir_get_bytes(GLOO_KEY_DIRECTORY):
        _, clique, rank = key.rsplit("/", 2)
        published.setdefault(clique, {})[int(rank)] = value
    return published


def _try_publish(client: RuntimeClient, key: str) -> bool:
    try:
        # False: what a peer has published in the meantime is not overwritten.
        client.key_value_set_bytes(key, UNREADABLE_VALUE, False)
    except JaxRuntimeError:
        return False  # the peer has published meanwhile
    return True


def _try_call(endpoint: Endpoint, number: int) -> bool:
    try:
        with socket.create_connection(endpoint, timeout=CONNECT_TIMEOUT_S) as call:
            call.sendall(_WORD.pack(number))
    except OSError as error:
        logger.debug("gloo's listener at %s does not answer: %s", endpoint, error)
        return False
    return True
