"""The barrier in which the members of a generation meet before their first collective, and how to leave it.

XLA's GPU client writes the incarnations of the processes into the key of a NCCL clique, and aborts the clique when the
coordination service reports that one of them is gone: but only incarnations that it knows, and it learns them in
`get_live_nodes` alone. Without that call no clique is ever aborted, and survivors wait forever. So every member calls
it in every generation. (XLA: `xla/pjrt/distributed/coordination/coordination_service_agent.cc`, GetAliveTasks.)

It is a barrier of those of the given processes that the service counts as connected, in C++, where no signal reaches
it. So it runs on a thread of its own, and the main thread waits in Python. A member that dies in it is waited for
until a stand-in disconnects its seat (`coordination_service`), which the owner of the service orders. The service keeps
a barrier for each set of members: a call that was left waits on if others are members by now, and ends with the world's
client.
"""

import threading
import time
from collections.abc import Sequence
from typing import Final

from jax._src import distributed as jax_distributed

from resilient_jax.ids import Seat
from resilient_jax.jax_runtime.abandoned_threads import abandon_thread
from resilient_jax.jax_runtime.abort import shut_connections_to
from resilient_jax.jax_runtime.failures import FormingFailed, FormingInterrupted
from resilient_jax.jax_runtime.jaxlib_types import JaxRuntimeError, RuntimeClient
from resilient_jax.jax_runtime.world_forming import WorldSeat

END_TIMEOUT_S: Final = 5.0
"""Time after which threads that still wait are left to themselves. Measured: they end within 20 ms."""
SHUT_INTERVAL_S: Final = 0.02


class _Meeting:
    """One call of `get_live_nodes`; shared by the caller, its thread and the guard."""

    def __init__(self) -> None:
        self.settled = threading.Event()
        self.is_interrupted = False
        self.live: frozenset[int] = frozenset()
        self.error = ""

    def run(self, client: RuntimeClient, members: Sequence[Seat]) -> None:
        """Wait in C++ until all members that are connected have called."""
        try:
            self.live = frozenset(client.get_live_nodes(list(members)))
        except (JaxRuntimeError, RuntimeError) as error:
            self.error = f"{type(error).__name__}: {error}"
        self.settled.set()


_lock: Final = threading.Lock()  # guards what follows
_current: _Meeting | None = None
_waiting: list[threading.Thread] = []
"""Threads of calls that were left."""


def meet_members(place: WorldSeat, members: Sequence[Seat], timeout_s: float) -> None:
    """Wait until all members are there, so that XLA knows their incarnations; for the main thread.

    Costs 1 to 4 ms once the last one calls.

    Args:
        place: where this process is in the world that it is connected to.
        members: the seats of the generation; all of their processes make the same call.
        timeout_s: time after which the call fails.

    Raises:
        FormingInterrupted: `interrupt_meeting` was called.
        FormingFailed: a member is gone or did not come in time, or the service does not answer.
    """
    global _current
    meeting = _Meeting()
    client: RuntimeClient = jax_distributed.global_state.client
    thread = threading.Thread(
        target=meeting.run, args=(client, members), name="resilient-jax-live-nodes", daemon=True
    )
    # Before the thread starts: an interruption from now on must find the meeting.
    with _lock:
        _current = meeting
    thread.start()
    is_settled = meeting.settled.wait(timeout_s)
    with _lock:
        _current = None
        # It may wait in C++ as long as this world lives: `end_waiting_threads` ends it before the world is left.
        if thread.is_alive():
            _waiting[:] = [*(t for t in _waiting if t.is_alive()), thread]
            abandon_thread(thread)
    if meeting.is_interrupted:
        raise FormingInterrupted(f"seat {place.seat}: abandoned while it met seats {tuple(members)}")
    if not is_settled:
        raise FormingFailed(
            f"seat {place.seat}: not all of seats {tuple(members)} came within {timeout_s:g} s"
        )
    if meeting.error:
        raise FormingFailed(f"seat {place.seat}: could not meet seats {tuple(members)}: {meeting.error}")
    if gone := sorted(set(members) - meeting.live):
        raise FormingFailed(f"seat {place.seat}: seats {gone} are gone, of {tuple(members)} that are members")


def interrupt_meeting() -> bool:
    """Make the main thread raise if it waits in `meet_members`; for the guard thread. Idempotent, never blocks."""
    with _lock:
        if _current is None or _current.settled.is_set():
            return False
        _current.is_interrupted = True
        _current.settled.set()
        return True


def count_waiting_threads() -> int:
    """Return how many threads wait in calls that were left."""
    with _lock:
        _waiting[:] = [thread for thread in _waiting if thread.is_alive()]
        return len(_waiting)


def end_waiting_threads(place: WorldSeat) -> None:
    """End the threads of calls that were left, before this process leaves its world.

    They refer to the world's client, which must not outlive it. The client shuts down, which needs no answer; then its
    connection may be shut without harm, and the calls fail. Returns at once where no thread waits.
    """
    if not count_waiting_threads():
        return
    client: RuntimeClient = jax_distributed.global_state.client
    client.shutdown()
    host, _, port = place.address.rpartition(":")
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while count_waiting_threads() and time.monotonic() < deadline_s:
        shut_connections_to((host, int(port)))
        time.sleep(SHUT_INTERVAL_S)
