"""Which TCP sockets of this process are gloo's, and its thread. Imports no jax.

The rule: gloo opens one listening socket when its collectives object is made. Every connection of gloo
has, at one end, such a listener: ours, or a peer's whose address the peer published. Any other socket is not gloo's
and is never touched.
"""

import contextlib
import dataclasses
import os
import socket
import stat
from collections.abc import Callable, Iterator
from typing import Final

Endpoint = tuple[str, int]
"""Address and port, as `socket.getsockname` gives them, IPv4-mapped addresses as IPv4."""
GlooConnection = tuple[Endpoint, Endpoint]
"""Our end and the other end of a connection."""
TCP_ESTABLISHED: Final = 1
"""The state of an open connection, the first byte of Linux's `struct tcp_info`."""

GLOO_THREAD_NICENESS: Final = 5
"""Added to the niceness of the thread with which gloo receives. As long as a peer's data has arrived for a collective
that this process has not come to, that thread spins, and takes half of the core on which the process computes what the
peers wait for. Tried with four hosts on two cores: a step took 8 % less, and the kernel's time of a small job halved.
Less priority still, of 10, 19 or SCHED_IDLE, delays what it receives on a busy machine."""


@contextlib.contextmanager
def lower_gloo_thread_priority() -> Iterator[None]:
    """Give the thread that gloo starts in this context a little less priority than those that compute."""
    before = set(os.listdir("/proc/self/task"))
    yield
    started = set(os.listdir("/proc/self/task")) - before
    if len(started) == 1:  # else others have started threads, too, and gloo's cannot be distinguished
        (thread,) = map(int, started)
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.setpriority(
                os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + GLOO_THREAD_NICENESS
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GlooSockets:
    """Distinguishes gloo's connections of one world from all other sockets of this process."""

    own_listeners: frozenset[Endpoint] = frozenset()
    """Our listeners."""
    peer_listeners: frozenset[Endpoint] = frozenset()
    """Listeners of the other processes of the world."""

    def includes(self, here: Endpoint | None, there: Endpoint | None) -> bool:
        """Return whether a connection with these ends is gloo's."""
        return here in self.own_listeners or there in self.own_listeners | self.peer_listeners


def list_listening_endpoints() -> frozenset[Endpoint]:
    """Return the TCP endpoints that this process listens on now."""
    endpoints = set()
    for descriptor in list_socket_descriptors():
        with DuplicateSocket(descriptor) as copy:
            if copy is not None and is_listener(copy):
                endpoint = get_local_endpoint(copy)
                if endpoint is not None:
                    endpoints.add(endpoint)
    return frozenset(endpoints)


def list_connections(gloo: GlooSockets) -> frozenset[GlooConnection]:
    """Return gloo's connections of this process."""
    return _list_connections(gloo, lambda copy: True)


def list_open_connections(gloo: GlooSockets) -> frozenset[GlooConnection]:
    """Return those of gloo's connections that neither side has closed: a process that dies closes its own."""
    return _list_connections(
        gloo, lambda copy: copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_ESTABLISHED
    )


def _list_connections(
    gloo: GlooSockets, is_wanted: Callable[[socket.socket], bool]
) -> frozenset[GlooConnection]:
    connections = set()
    for descriptor in list_socket_descriptors():
        with DuplicateSocket(descriptor) as copy:
            if copy is None or is_listener(copy):
                continue
            here, there = get_local_endpoint(copy), get_remote_endpoint(copy)
            if here is not None and there is not None and gloo.includes(here, there) and is_wanted(copy):
                connections.add((here, there))
    return frozenset(connections)


def list_sockets() -> frozenset[int]:
    """Return the inodes of this process's sockets: a tenth of the work of `list_connections`.

    A descriptor's number is used again once it is closed, the inode of a socket is not.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode):
            found.add(status.st_ino)
    return frozenset(found)


def list_socket_descriptors() -> Iterator[int]:
    """Yield this process's socket descriptors; some may be closed by the time they are used."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                yield int(name)
        except OSError:
            continue


class DuplicateSocket:
    """A context that gives a socket object on a duplicate of `descriptor`, or None if that is closed or no TCP socket.

    The duplicate pins the socket: other threads may close the descriptor itself, and open another file under its
    number, at any time.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._socket: socket.socket | None = None

    def __enter__(self) -> socket.socket | None:
        try:
            copy = os.dup(self._descriptor)
        except OSError:
            return None
        try:
            self._socket = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            return None
        is_tcp = self._socket.family in (socket.AF_INET, socket.AF_INET6)
        return self._socket if is_tcp and self._socket.type == socket.SOCK_STREAM else None

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()


def is_listener(endpoint: socket.socket) -> bool:
    """Return whether the socket accepts connections."""
    return bool(endpoint.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def get_local_endpoint(connection: socket.socket) -> Endpoint | None:
    """Return the socket's own end, None if it has none."""
    try:
        return normalize_endpoint(connection.getsockname())
    except OSError:
        return None


def get_remote_endpoint(connection: socket.socket) -> Endpoint | None:
    """Return the socket's other end, None if it is not connected."""
    try:
        return normalize_endpoint(connection.getpeername())
    except OSError:
        return None


def normalize_endpoint(name: tuple[str, int] | tuple[str, int, int, int]) -> Endpoint:
    """Return a socket name as an endpoint, without IPv6 flow and scope."""
    return name[0].removeprefix("::ffff:"), name[1]
