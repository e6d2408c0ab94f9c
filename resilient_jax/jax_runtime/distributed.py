"""Join and leave worlds, any number of times in one OS process.

`jax.distributed.initialize` refuses a second call and aborts the process when a peer is missing, so `connect` does
the same without it: it makes a client of the coordination service and the CPU backend on gloo, and puts both into JAX's
global state; `disconnect` undoes it.
"""

import contextlib
import dataclasses
import gc
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import jax
import jax.extend
from jax._src import dispatch, util, xla_bridge
from jax._src import distributed as jax_distributed
from jax._src.interpreters import partial_eval, pxla
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

from resilient_jax.errors import InternalError
from resilient_jax.ids import Seat
from resilient_jax.jax_runtime import world_forming
from resilient_jax.jax_runtime.abandoned_threads import abandon_thread
from resilient_jax.jax_runtime.abort import abort_collectives
from resilient_jax.jax_runtime.backend_gate import BackendGate
from resilient_jax.jax_runtime.clique_interruption import CliqueInterrupter
from resilient_jax.jax_runtime.failures import FormingFailed, FormingInterrupted
from resilient_jax.jax_runtime.gloo import (
    Endpoint,
    GlooSockets,
    list_listening_endpoints,
    lower_gloo_thread_priority,
)
from resilient_jax.jax_runtime.jaxlib_types import (
    Backend,
    Collectives,
    JaxRuntimeError,
    RuntimeClient,
    jaxlib_runtime,
)
from resilient_jax.jax_runtime.live_processes import set_members
from resilient_jax.jax_runtime.world_forming import (
    FormingAttempt,
    FormingStage,
    WorldSeat,
    make_listener_key,
)

POLL_TIMEOUT_MS: Final = 200
"""How long an abandoned attempt continues to wait for a peer's endpoints."""
MAX_LISTENER_ATTEMPTS: Final = 5

ABORT_INTERVAL_S: Final = 0.02

OPERATIONS: Final[Any] = dispatch.xla_primitive_callable
KEPT_CACHES: Final[tuple[Any, ...]] = (partial_eval.trace_to_jaxpr, pxla._dce_jaxpr, OPERATIONS)
"""Caches of traces; of traces without the arguments that they do not use; and of operations that are called outside of
`jit`, each of which is a function to be traced."""

_gate: Final = BackendGate()
_clients: list[Callable[[], object]] = []
"""Weak references to the client of the present world; written where the world is joined and left."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorldConnection:
    """This process's place in a world. Holds no device, so that it can outlive the backend."""

    place: WorldSeat
    gloo: GlooSockets


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeakCounts:
    """The number of objects that `disconnect` could not free because there are references to them."""

    backends: int
    clients: int


def is_backend_initialized() -> bool:
    """Return whether JAX has made its devices; `connect` must be the first to do so."""
    return xla_bridge.backends_are_initialized()


def close_backend_gate() -> None:
    """Let threads that wait for JAX's devices continue: this process joins no other world."""
    _gate.close()


def connect(place: WorldSeat, *, timeout_s: float, bind_host: str | None) -> WorldConnection:
    """Join the world whose coordination service is reached at `place.address`; JAX then sees its devices.

    Args:
        place: what to join, and as what.
        timeout_s: time after which the attempt fails.
        bind_host: the address of this host that gloo binds; None takes what the host name resolves to.

    Raises:
        FormingInterrupted: `interrupt_forming` was called.
        FormingFailed: a peer or the service did not connect in time, or disconnected. After both errors
            this process is as before the call, and can connect again.
        InternalError: this process is connected already.
    """
    # Not `backends_are_initialized`: a thread at the gate owns the lock that it takes.
    if jax_distributed.global_state.client is not None or xla_bridge._backends:
        raise InternalError(
            "connect: found a JAX backend that is alive, expected none; call disconnect first, and use no "
            "device before the first connect"
        )
    if not _gate.is_installed:
        _gate.install()
    attempt = FormingAttempt(place, time.monotonic() + timeout_s)
    # Before its thread starts: an interruption from now on must find the attempt.
    world_forming.set_current_wait(attempt)
    connections: list[WorldConnection] = []
    thread = threading.Thread(
        target=_form, args=(attempt, bind_host, connections), name="resilient-jax-forming", daemon=True
    )
    thread.start()
    try:
        is_in_time = attempt.settled.wait(timeout_s)
        # `give_up` is false if the attempt has settled just now: then its result counts.
        if not is_in_time and attempt.give_up():
            world_forming.end_attempt(attempt)
            raise world_forming.make_forming_error(attempt, attempt.stage, None)
        if attempt.interrupted:
            raise FormingInterrupted(f"{attempt}: abandoned while {attempt.stage}")
        if attempt.error is not None:
            raise world_forming.make_forming_error(attempt, attempt.stage, attempt.error) from attempt.error
    except (FormingInterrupted, FormingFailed):
        world_forming.set_current_wait(None)
        abandon_thread(thread)  # it may wait in C++ for some seconds more
        raise
    (connection,) = connections
    client = jax_distributed.global_state.client
    host, _, port = place.address.rpartition(":")
    # The attempt is over: from now on what the guard has to end are waits for cliques.
    world_forming.set_current_wait(
        CliqueInterrupter(client, (host, int(port)), connection.gloo, attempt.listener_key)
    )
    if place.members:
        set_members(place.members)
    jax.devices()  # so that other platforms, too, are there when we return
    return connection


def read_peer_listeners(members: Sequence[Seat], own: Seat, timeout_s: float) -> frozenset[Endpoint]:
    """Return where gloo listens on the other members of the present world, some of which may have joined later.

    Raises:
        FormingFailed: a member has not published it, or the service does not answer.
    """
    client: RuntimeClient = jax_distributed.global_state.client
    try:
        return frozenset().union(
            *(
                _parse_listeners(
                    client.blocking_key_value_get(make_listener_key(seat), int(timeout_s * 1000))
                )
                for seat in members
                if seat != own
            )
        )
    except JaxRuntimeError as error:
        raise FormingFailed(
            f"seat {own}: where its peers listen cannot be read from the coordination service: {error}"
        ) from None


def disconnect(gloo: GlooSockets, *, is_backend_in_use: bool = False) -> LeakCounts:
    """Leave the world: its backend, client and programs are dropped, and `connect` works again.

    Traces are kept, if no device is in them: a function that was jitted once is compiled again for the
    new backend, not traced again. Every array, device, executable and caught exception (its traceback holds
    frames) that the caller still refers to keeps the old backend in memory, invisible to JAX; the returned
    counts report it. Arrays that are needed later must be copied to host memory first. Collectives in flight
    are aborted. Other threads that ask JAX for its devices wait until `connect` has joined the next world.

    The service is not notified: a world is left because it is broken, and a dead service would make
    `client.shutdown` wait.

    Args:
        gloo: tells the world's connections from other sockets.
        is_backend_in_use: whether another thread still compiles for the world's devices, and then drops them. That
            thread keeps the backend, so no traces are dropped to free it.
    """
    backends = [weakref.ref(backend) for backend in xla_bridge._backends.values()]
    clients = _clients.copy()
    _clients.clear()
    left = threading.Event()
    aborter = threading.Thread(target=_keep_aborting, args=(gloo, left), name="resilient-jax-leave")
    aborter.start()
    try:
        with keep_traces():
            _forget()
        gc.collect()
        if _alive(backends):
            clear_operations()
            gc.collect()  # the first pass frees functions; the second frees their traces and what these refer to
        if _alive(backends) and not is_backend_in_use:
            clear_traces()  # a constant in a trace may refer to the backend
            gc.collect()
    finally:
        left.set()
        aborter.join()
        world_forming.set_current_wait(None)
    return LeakCounts(backends=_alive(backends), clients=_alive(clients))


def _alive(references: Sequence[Callable[[], object]]) -> int:
    return sum(reference() is not None for reference in references)


def _keep_aborting(gloo: GlooSockets, left: threading.Event) -> None:
    """Abort collectives until the backend is destroyed, which waits for its collectives in flight on every device."""
    while True:
        abort_collectives(gloo)
        world_forming.interrupt_forming()
        if left.wait(ABORT_INTERVAL_S):
            return


def _forget() -> None:
    """Take everything out of JAX's global state."""
    try:
        jax.extend.backend.clear_backends()
    except JaxRuntimeError:
        # An effect (a debug print) of a program that died with a peer: its token raises when waited for.
        dispatch.runtime_tokens.clear()
        jax.extend.backend.clear_backends()
    state = jax_distributed.global_state
    state.client = None
    state.process_id, state.num_processes, state.coordinator_address = 0, 1, None
    set_members(None)


def _form(attempt: FormingAttempt, bind_host: str | None, connections: list[WorldConnection]) -> None:
    """Form the world, on a thread of its own, which may be abandoned at any line."""
    try:
        _join(attempt, bind_host, connections)
    except (JaxRuntimeError, RuntimeError, FormingInterrupted, ValueError, OSError) as error:
        # Without the traceback: its frames refer to the client, which must not outlive its world.
        attempt.settle(error.with_traceback(None))
    finally:
        attempt.client = None


def _join(attempt: FormingAttempt, bind_host: str | None, connections: list[WorldConnection]) -> None:
    client, reference = world_forming.new_client(
        attempt.place.address, attempt.place.seat, math.ceil(attempt.remaining_s())
    )
    with attempt.lock:
        attempt.raise_if_interrupted()
        attempt.client = client
    client.connect()
    # What ends the wait depends on the stage, so no wait begins before the stage is set.
    attempt.enter_stage(FormingStage.EXCHANGING_TOPOLOGY)
    # A single process uses XLA's own in-process collectives: no peer can die in them, and gloo between the devices of
    # one process has been seen to hang (two threads, one in waitSend and one in waitRecv) after some hundred steps.
    is_alone = attempt.place.is_alone
    collectives, own = (None, frozenset()) if is_alone else _make_collectives(client, bind_host)
    # Overwritten where a process returns under its old seat, as on a GPU.
    client.key_value_set(attempt.listener_key, json.dumps(sorted(own)), True)
    # After publishing our own, or all processes would wait for each other.
    peers = _wait_for_peer_listeners(attempt, client)
    backend = _make_cpu_backend(attempt, client, collectives)
    gloo = GlooSockets(own_listeners=own, peer_listeners=peers)
    # All under one lock: an interruption either comes before and nothing is installed, or is too late and all of it is.
    with attempt.lock:
        attempt.raise_if_interrupted()
        _install(attempt, client, backend)
        _clients.append(reference)
        connections.append(WorldConnection(place=attempt.place, gloo=gloo))
        attempt.stage = FormingStage.FORMED
        attempt.settled.set()


def _make_collectives(
    client: RuntimeClient, bind_host: str | None
) -> tuple[Collectives, frozenset[Endpoint]]:
    """Return gloo and its listener: the one endpoint that this process began to listen on meanwhile."""
    opened: frozenset[Endpoint] = frozenset()
    for _ in range(MAX_LISTENER_ATTEMPTS):
        before = list_listening_endpoints()
        with lower_gloo_thread_priority():
            collectives = jaxlib_runtime.make_gloo_tcp_collectives(
                distributed_client=client, hostname=bind_host
            )
        opened = list_listening_endpoints() - before
        if len(opened) == 1:
            return collectives, opened
        del collectives  # another thread opened one, too, and gloo's cannot be distinguished: try again
    raise RuntimeError(
        f"gloo's listener cannot be identified in {MAX_LISTENER_ATTEMPTS} tries; found {sorted(opened)}"
    )


def _wait_for_peer_listeners(attempt: FormingAttempt, client: RuntimeClient) -> frozenset[Endpoint]:
    """Wait until every peer has published, so that no process exchanges topology before all are there.

    A process that takes a spare seat is told its peers by the generation that it becomes a member of.
    """
    return frozenset().union(
        *(
            _parse_listeners(_wait_for(attempt, client, make_listener_key(seat)))
            for seat in attempt.place.members
            if seat != attempt.place.seat
        )
    )


def _parse_listeners(published: str) -> frozenset[Endpoint]:
    return frozenset((host, port) for host, port in json.loads(published))


def _wait_for(attempt: FormingAttempt, client: RuntimeClient, key: str) -> str:
    # In short waits, with a look in between: this wait is not one of those that an interruption ends in C++.
    while True:
        with attempt.lock:
            attempt.raise_if_interrupted()
        try:
            return client.blocking_key_value_get(key, POLL_TIMEOUT_MS)
        except JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise


def _make_cpu_backend(attempt: FormingAttempt, client: RuntimeClient, collectives: Collectives) -> Backend:
    """Return what `xla_bridge.make_cpu_client` returns, from arguments and not from JAX's global state."""
    minutes = max(1, math.ceil(attempt.remaining_s() / 60))
    count = xla_bridge.num_cpu_devices.value
    return xla_client.make_cpu_client(
        asynchronous=xla_bridge._CPU_ENABLE_ASYNC_DISPATCH.value,
        distributed_client=client,
        node_id=attempt.place.seat,
        num_nodes=attempt.place.num_seats,
        collectives=collectives,
        num_devices=count if count >= 0 else None,
        get_local_topology_timeout_minutes=minutes,
        get_global_topology_timeout_minutes=minutes + 1,
        transfer_server_factory=xla_bridge._make_transfer_server_factory(),
    )


def _install(attempt: FormingAttempt, client: RuntimeClient, backend: Backend) -> None:
    """Put client and backend where JAX looks for them."""
    state = jax_distributed.global_state
    state.client = client
    state.process_id, state.num_processes = attempt.place.seat, attempt.place.num_seats
    state.coordinator_address = attempt.place.address
    _gate.set_backend(backend)


@contextlib.contextmanager
def keep_traces() -> Iterator[None]:
    """A context in which `jax.extend.backend.clear_backends` clears every cache but those of traces.

    A traced function is a jaxpr: it refers to no device, unless the user closed over an array or a mesh. Tracing is
    half of the cost of the first step in a new world, all of it under Python's global lock. What JAX derives from a
    trace before it lowers it is kept, too, because `lowering_cache` finds a module by that.
    """
    names = [util._caches.pop(cache) for cache in KEPT_CACHES]
    try:
        yield
    finally:
        util._caches.update(zip(KEPT_CACHES, names, strict=True))


def clear_operations() -> None:
    """Drop operations that were called outside of `jit`: a parameter of one may be a sharding on devices."""
    OPERATIONS.cache_clear()


def clear_traces() -> None:
    """Drop all traces: if anything of JAX still refers to a device, a trace does."""
    for cache in KEPT_CACHES:
        cache.cache_clear()
