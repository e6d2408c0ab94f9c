"""Turns a hang on a connection into an exception, from another thread. Imports no jax."""

import socket
from collections.abc import Callable, Collection

from resilient_jax.jax_runtime.gloo import (
    DuplicateSocket,
    Endpoint,
    GlooConnection,
    GlooSockets,
    get_local_endpoint,
    get_remote_endpoint,
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
    # Found anew each time: gloo opens connections whenever a clique is formed, and tells nobody.
    return sum(_try_shut(descriptor, chosen) for descriptor in list_socket_descriptors())


def _try_shut(descriptor: int, chosen: Callable[[Endpoint | None, Endpoint | None], bool]) -> bool:
    with DuplicateSocket(descriptor) as copy:
        if (
            copy is None
            or is_listener(copy)
            or not chosen(get_local_endpoint(copy), get_remote_endpoint(copy))
        ):
            return False
        try:
            # Shut, not closed: the duplicate is the same connection, so this wakes the thread that waits in gloo. The
            # descriptor of gloo's own stays open: were it closed, gloo could next use another file under its number.
            copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # no longer connected: nothing left to interrupt
        return True
