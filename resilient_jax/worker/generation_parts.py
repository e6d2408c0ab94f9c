"""The one ordered list of what lives and dies with a generation, and its walk."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from resilient_jax.compile.ahead_of_time import LEAVE_TIMEOUT_S, AheadOfTimeCompiler
from resilient_jax.compile.compilation_monitor import CompilationMonitor
from resilient_jax.compile.program_exchange import ProgramDirectory
from resilient_jax.compile.program_fetcher import ProgramFetcher
from resilient_jax.errors import PeerError
from resilient_jax.events import Event, EventKind
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.generation_scoped import GenerationEnding, GenerationScoped
from resilient_jax.state.snapshotter import Snapshotter
from resilient_jax.step import reduction
from resilient_jax.telemetry.worker_activity import WorkerActivity
from resilient_jax.worker import worker_protocol
from resilient_jax.worker.agent_connection import AgentConnection
from resilient_jax.worker.committed_state import CommittedState
from resilient_jax.worker.state_handover import StateHandover
from resilient_jax.worker.training_control import GenerationEnded
from resilient_jax.worker.world_connector import WorldConnector


class RecentEvents(GenerationScoped):
    """What this worker has recorded on its way into the present generation, oldest first; one for all generations."""

    def __init__(self) -> None:
        self.found: list[Event] = []

    def begin_generation(self, generation: Generation) -> None:
        """Forget how the worker came into the generation before."""
        self.found.clear()


class WorldExit(GenerationScoped):
    """Leaves worlds, with all programs that refer to their devices.

    Args:
        compiler: compiler whose thread may still compile for the world's devices.
    """

    def __init__(
        self,
        compiler: AheadOfTimeCompiler,
        connector: WorldConnector,
        agent: AgentConnection,
        record_event: Callable[..., object],
    ) -> None:
        self._compiler, self._connector = compiler, connector
        self._agent, self._record_event = agent, record_event

    def leave_devices(self, generation: Generation | None) -> None:
        """Disconnect from the world, if this worker is in one; without it only drop the programs."""
        started_s = time.monotonic()
        is_idle = drop_programs(self._compiler)
        if not self._connector.is_connected:
            return
        leaks = self._connector.leave(is_backend_in_use=not is_idle)
        self._agent.report_found(worker_protocol.report_world, None)
        self._record_event(
            EventKind.WORLD_LEFT,
            seconds=time.monotonic() - started_s,
            leaked_backends=leaks.backends,
            leaked_clients=leaks.clients,
        )

    def unwind(self) -> None:
        """Compile no more for the worlds that would have followed this one."""
        self._compiler.cancel()


class SnapshotFlush(GenerationScoped):
    """Takes the snapshot before a planned change, if hosts that stay have not all of the committed state."""

    def __init__(
        self,
        committed: CommittedState,
        snapshotter: Snapshotter,
        agent: AgentConnection,
        record_event: Callable[..., object],
    ) -> None:
        self._committed, self._snapshotter = committed, snapshotter
        self._agent, self._record_event = agent, record_event

    def end_generation(self, ending: GenerationEnding) -> None:
        """Have the snapshot on all hosts, or none of it."""
        committed = self._committed
        if not ending.is_flushed or self._agent.is_interrupted:
            return
        if committed.holds_state or not self._agent.takes_snapshot:
            return
        try:
            ending.flushed = self._snapshotter.flush(ending.generation, committed.state)
        except GenerationEnded:
            pass  # an unplanned change interrupted the planned one
        except PeerError as error:  # the server is gone; the agent notices
            self._record_event(EventKind.SNAPSHOT_DROPPED, step=committed.step, reason=summarize(error))


ORDER: Final[Mapping[type[GenerationScoped], str]] = {
    WorkerActivity: "Begins first: the wait for the order is no silence of the user's code, and what is done first "
    "from here on is not usual, either.",
    WorldConnector: "Unwinds before `WorldExit`: other hosts of this host's replicas may wait. Ends before "
    "`SnapshotFlush`: what the main thread waits for from then on is no collective, and not broken off as one.",
    RecentEvents: "Anywhere: whatever begins records no event.",
    ProgramFetcher: "Begins before `ProgramDirectory`: no thread of this host claims a program in the old generation "
    "after those claims were dropped.",
    ProgramDirectory: "Anywhere after `ProgramFetcher`.",
    CompilationMonitor: "Begins after `ProgramFetcher`: what comes from hosts of the old generation is not counted.",
    WorldExit: "Leaves the devices after `StateHandover`, which copies from them: this destroys their backend.",
    StateHandover: "Leaves the devices before `WorldExit`.",
    SnapshotFlush: "Ends before `Snapshotter`, which takes the last snapshot for it.",
    Snapshotter: "Ends last: it lets go of all arrays, and finds what is complete then. Begins anywhere: only training "
    "reads what begins here.",
}
"""The parts of a worker, each with the reason for its place. Devices are left from the last part to the first, as
scopes are: what came to them last leaves them first. All other moments go from the first part to the last."""


class GenerationParts:
    """Walks the parts of one worker.

    Whatever a part raises ends the walk, and is raised: the parts behind it do not begin. The end of the generation is
    walked all the same, so a part may end that has not begun.

    Args:
        parts: parts in any order, at most one of each kind in `order`.
    """

    def __init__(
        self, parts: Iterable[GenerationScoped], order: Mapping[type[GenerationScoped], str] = ORDER
    ) -> None:
        positions = {kind: position for position, kind in enumerate(order)}
        self._parts = sorted(parts, key=lambda part: positions[type(part)])
        kinds = [type(part) for part in self._parts]
        assert len(set(kinds)) == len(kinds), "two parts of a kind have no order"

    def begin_generation(self, generation: Generation) -> None:
        """Begin a generation in all parts."""
        for part in self._parts:
            part.begin_generation(generation)

    def keep_devices(self, generation: Generation) -> None:
        """Have all parts stay on the devices of their world."""
        for part in self._parts:
            part.keep_devices(generation)

    def leave_devices(self, generation: Generation | None) -> None:
        """Have all parts leave the devices, from the last to the first; see `GenerationScoped.leave_devices`."""
        for part in reversed(self._parts):
            part.leave_devices(generation)

    def unwind(self) -> None:
        """Tell all parts that the train function has returned or raised."""
        for part in self._parts:
            part.unwind()

    def end_generation(self, ending: GenerationEnding) -> None:
        """End the generation in all parts, which write into `ending` what they have left."""
        for part in self._parts:
            part.end_generation(ending)


def drop_programs(compiler: AheadOfTimeCompiler) -> bool:
    """Drop the cached programs of a world that is left: they refer to its devices, and would keep its backend.

    Returns:
        Whether `compiler` has stopped working for the world's devices, within `LEAVE_TIMEOUT_S`.
    """
    is_idle = compiler.wait_until_idle(LEAVE_TIMEOUT_S)
    reduction.clear_caches()  # not sooner: the compiler's thread would fill them again
    return is_idle


def summarize(error: BaseException) -> str:
    """Return the first line of an error, for an event."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
