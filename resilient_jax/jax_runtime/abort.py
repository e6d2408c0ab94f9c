"""Turns a hang on a connection into an exception, from another thread. Imports no jax."""

import socket
from collections.abc import Callable, Collection

from resilient_jax.jax_runtime.gloo import (
    DuplicateSocket,
    Endpoint,
    GlooConnection,
    GlooSockets,
    find_local_endpoint,
    find_remote_endpoint,
    is_listener,
    list_socket_descriptors,
)


def abort_collectives(gloo: GlooSockets) -> int:
    """Shut all of gloo's connections down, so that a thread that waits in a collective gets an exception at once.

    For the guard thread: JAX does not hold the interpreter lock while it waits. Idempotent; repeat it (every 20 ms)
    until the main thread has unwound, because a collective that begins after the first call opens or finds
    other connections. Listeners are not touched (gloo terminates the process when one fails), nor is any
    socket that is not gloo's. Afterwards the cliques of these connections are broken permanently; arrays and
    compiled programs stay valid.

    Returns:
        The number of connections that were shut; 0 on GPU, where NCCL's sockets are not ours to touch.
    """

    return _shut_connections(gloo.includes)


def shut_connections(connections: Collection[GlooConnection]) -> int:
    """Shut these connections, of cliques that nobody uses; return how many there were."""
    return _shut_connections(lambda here, there: (here, there) in connections) if connections else 0


def shut_connections_to(endpoint: Endpoint) -> int:
    """Shut this process's connections to `endpoint`; return how many."""
    return _shut_connections(lambda _, there: there == endpoint)


def _shut_connections(chosen: Callable[[Endpoint | None, Endpoint | None], bool]) -> int:
    return sum(_try_shut(descriptor, chosen) for descriptor in list_socket_descriptors())


def _try_shut(descriptor: int, chosen: Callable[[Endpoint | None, Endpoint | None], bool]) -> bool:
    with DuplicateSocket(descriptor) as copy:
        if (
            copy is None
            or is_listener(copy)
            or not chosen(find_local_endpoint(copy), find_remote_endpoint(copy))
        ):
            return False
        try:
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # no longer connected: nothing left to interrupt
        return True
