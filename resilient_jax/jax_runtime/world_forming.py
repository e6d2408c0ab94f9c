"""An attempt to form a world, and how to end it from another thread.

Forming waits in C++ for other processes, in two places that no Python signal reaches:

- *registering*: `client.connect()` is a barrier of all processes of the world;
- *exchanging topology*: process 0 waits for the devices of all processes, the others for process 0's answer.

A process that takes a spare seat of a world that has been formed waits for no other in either place.

So both happen on a thread of their own, and the thread that called `connect` waits in Python. An interruption
releases the latter at once, and then ends the C++ wait so that the abandoned thread ends, too: a second client that
registers under our own index makes the service refuse the first; an unreadable answer under the topology key ends the
exchange. If the service is dead the abandoned thread ends when its own timeout does, and does no harm meanwhile,
provided that its connection stays open: a relay must keep a client's side open, because a client whose connection ends
aborts its process.

A third wait, for the peers in a clique's first collective, is on the main thread itself: see `clique_interruption`.
"""

import dataclasses
import enum
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final, assert_never

from resilient_jax.ids import Seat
from resilient_jax.jax_runtime.clique_interruption import (
    UNREADABLE_VALUE,
    CliqueInterrupter,
    is_service_alive,
)
from resilient_jax.jax_runtime.failures import FormingFailed, FormingInterrupted
from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError, RuntimeClient, jaxlib_runtime

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_S: Final = 86400
"""A day: JAX's own failure detector kills the process when it fires, so the agents' detector decides instead."""
SHUTDOWN_TIMEOUT_S: Final = 5
STAND_IN_TIMEOUT_S: Final = 1
"""Time to register for the client that replaces ours; it ends 5 s later than this (the coordination agent's grace)."""
CPU_GLOBAL_TOPOLOGY_KEY: Final = "cpu:global_topology/cpu"
CPU_LOCAL_TOPOLOGY_KEY: Final = "cpu:local_topology/cpu"
GLOO_LISTENERS_KEY: Final = "resilient_jax/gloo"


def make_listener_key(seat: Seat) -> str:
    """Return the key under which the process of a seat publishes its gloo listener."""
    return f"{GLOO_LISTENERS_KEY}/{seat}"


class FormingStage(enum.StrEnum):
    """The stage that the forming of a world has reached."""

    REGISTERING = "registering"
    EXCHANGING_TOPOLOGY = "exchanging_topology"
    FORMED = "formed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorldSeat:
    """The seat that a process takes in a world.

    Attributes:
        address: where the coordination service is reached, or the relay in front of it.
        seat: number of this process in the world, from 0.
        num_seats: all that the world has; the service was started with the same number.
        members: the seats of the processes that form the world together with this one. Empty: the world has been
            formed, and this process takes a spare seat.
    """

    address: str
    seat: Seat
    num_seats: int
    members: tuple[Seat, ...]

    @property
    def is_alone(self) -> bool:
        """Whether no other process can be in the world."""
        return self.num_seats == 1


class FormingAttempt:
    """One attempt to join a world; shared by the caller, the forming thread and the guard."""

    def __init__(self, place: WorldSeat, deadline_s: float) -> None:
        self.place = place
        self.deadline_s = deadline_s
        """On `time.monotonic`."""
        self.client: RuntimeClient | None = None
        self.lock = threading.Lock()
        """Guards `stage`, `error`, `interrupted`, `client`, and all that is done only if not interrupted."""
        self.stage = FormingStage.REGISTERING
        self.error: BaseException | None = None
        self.interrupted = False
        self.settled = threading.Event()

    @property
    def listener_key(self) -> str:
        """The key under which this process publishes its gloo listener before it waits for anything."""
        return make_listener_key(self.place.seat)

    def remaining_s(self) -> float:
        """Return the time until the deadline, 0 if it has passed."""
        return max(0.0, self.deadline_s - time.monotonic())

    def enter_stage(self, stage: FormingStage) -> None:
        """Enter a stage; raise FormingInterrupted if the attempt was abandoned."""
        with self.lock:
            self.raise_if_interrupted()
            self.stage = stage

    def raise_if_interrupted(self) -> None:
        """Raise FormingInterrupted if the attempt was abandoned; the caller owns the lock."""
        if self.interrupted:
            raise FormingInterrupted(f"{self}: abandoned while {self.stage}")

    def give_up(self) -> bool:
        """Release the caller of `connect`; return False if it has been released already."""
        # Under the lock an attempt either settles or is abandoned. One that was abandoned installs nothing afterwards,
        # since the forming thread looks under the same lock: see `distributed._join`.
        with self.lock:
            if self.settled.is_set():
                return False
            self.interrupted = True
            self.settled.set()
            return True

    def settle(self, error: BaseException | None) -> None:
        """End the attempt with success (None) or `error`, unless it was abandoned."""
        with self.lock:
            if not self.settled.is_set():
                self.error = error
                self.settled.set()

    def __str__(self) -> str:
        return f"seat {self.place.seat} of {self.place.num_seats} at {self.place.address}"


_current: FormingAttempt | CliqueInterrupter | None = None
_current_lock = threading.Lock()  # guards _current, also while the waits for cliques are being ended


def set_current_wait(current_wait: FormingAttempt | CliqueInterrupter | None) -> None:
    """Set what `interrupt_forming` ends: an attempt, or the waits for cliques of a world."""
    global _current
    with _current_lock:
        _current = current_wait


def interrupt_forming() -> bool:
    """Make a thread of this process raise that waits for a world or a clique to be complete.

    For the guard thread, every 20 ms until the main thread has unwound, together with `abort_collectives`. A
    `connect` that waits raises FormingInterrupted within milliseconds, and the process can connect to another
    service right away. A first collective that waits for its clique raises JaxRuntimeError 0.05 to 0.2 s
    after the first call. Blocks for 0.1 s at most. A call before `connect` has begun has no effect: the
    caller of `connect` checks its own orders first.

    A clique that was incomplete is broken for all processes of the world, so no process may begin the world's next
    generation before all have stopped calling this.

    Returns:
        Whether anything was interrupted.
    """
    with _current_lock:
        current = _current
        if isinstance(current, CliqueInterrupter):
            return current.interrupt(time.monotonic()) > 0
    if current is None or not current.give_up():
        return False
    end_attempt(current)
    return True


def limit_interruption(is_current: Callable[[frozenset[Seat]], bool]) -> None:
    """Have `interrupt_forming` leave alone cliques of the present world of which `is_current(seats)` is false."""
    with _current_lock:
        if isinstance(_current, CliqueInterrupter):
            _current.is_current = is_current


def is_detached() -> bool:
    """Return whether an interruption found the service dead: only a new world can follow."""
    with _current_lock:
        return isinstance(_current, CliqueInterrupter) and _current.is_detached


def end_attempt(attempt: FormingAttempt) -> None:
    """End the C++ wait of an abandoned attempt as far as possible, without blocking."""
    # On a thread: what ends the wait asks the service, which may be dead.
    threading.Thread(target=_release, args=(attempt,), name="resilient-jax-end-forming", daemon=True).start()


def _release(attempt: FormingAttempt) -> None:
    with attempt.lock:
        stage = attempt.stage
    try:
        match stage:
            case FormingStage.REGISTERING:
                # The service takes this for a restart of our process, and refuses the first client.
                stand_in, _ = new_client(attempt.place.address, attempt.place.seat, STAND_IN_TIMEOUT_S)
                stand_in.connect()
            case FormingStage.EXCHANGING_TOPOLOGY:
                _break_topology_exchange(attempt)
            case FormingStage.FORMED:
                pass
            case _:
                assert_never(stage)
    except (JaxRuntimeError, RuntimeError) as error:
        logger.debug("ending %s: %s", attempt, error)


def _break_topology_exchange(attempt: FormingAttempt) -> None:
    client = attempt.client
    # Of a world that has been formed the topology is there: nothing waits for it, and later processes read it.
    if client is None or not attempt.place.members or not is_service_alive(client, attempt.listener_key):
        return
    # For this key all processes but 0 wait, for those below process 0; True overwrites what a peer has published.
    client.key_value_set_bytes(CPU_GLOBAL_TOPOLOGY_KEY, UNREADABLE_VALUE, True)
    for seat in range(attempt.place.num_seats):
        client.key_value_set_bytes(f"{CPU_LOCAL_TOPOLOGY_KEY}/{seat}", UNREADABLE_VALUE, True)


def new_client(
    address: str, seat: Seat, init_timeout_s: int, *, tells_service: bool = False
) -> tuple[RuntimeClient, Callable[[], object]]:
    """Return an unconnected client whose failed `connect` raises instead of ending the process.

    The second value returns None once the client is freed in C++, too (the client itself takes no weak
    reference, but it owns its callback, which does).

    Without a callback a failure to register is LOG(FATAL). With a Python one jaxlib cannot translate the
    status, which throws std::bad_cast: in `connect` that arrives as a RuntimeError. (On jaxlib's own
    polling thread nothing catches it: losing the service stays fatal either way.)

    Args:
        address: where the coordination service is reached, or the relay in front of it.
        seat: the one to register under.
        init_timeout_s: time after which the client's `connect` fails.
        tells_service: whether `shutdown` tells the service that the process of this seat is gone.
    """

    def never_called(*_: object) -> None:
        """Take the place of jaxlib's own callback, which ends the process."""

    client = jaxlib_runtime.get_distributed_runtime_client(
        address,
        seat,
        init_timeout=init_timeout_s,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
        missed_heartbeat_callback=never_called,
        shutdown_on_destruction=tells_service,
        use_compression=True,
    )
    reference = weakref.ref(never_called)
    return client, reference


def make_forming_error(
    attempt: FormingAttempt, stage: FormingStage, error: BaseException | None
) -> FormingFailed:
    """Return the error for an attempt that failed."""
    reason = "not all processes came in time" if error is None else f"{type(error).__name__}: {error}"
    return FormingFailed(
        f"{attempt}: {reason} (while {stage}); expected all {len(attempt.place.members) or 'other'} processes of this "
        "world before the deadline. Join the next world."
    )
