"""The worker's side of snapshots: decides when to take one, opens layouts, and opens readers for a restore.

The first snapshot of a generation opens its *layout*: the hosts exchange the endpoints of their snapshot servers (one
small all-reduce), partition the state, and form parity groups. Partition and groups follow from shardings and names, so
every host computes the same ones. Later snapshots of the generation only copy.
"""

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from resilient_jax.errors import CallerError, PeerUnreachable, SnapshotRefused
from resilient_jax.events import Event, EventKind
from resilient_jax.host_exchange import AddingWorld, CollectiveExchange
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.protocol.framing import MAX_FRAME_BYTES
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.generation_scoped import GenerationEnding, GenerationScoped
from resilient_jax.protocol.snapshots import Protection, SnapshotId, SnapshotLayout, SnapshotPlan
from resilient_jax.protocol.worker_messages import SnapshotSettings
from resilient_jax.snapshot.local_client import LocalServerClient
from resilient_jax.snapshot.manifest import PartContents
from resilient_jax.snapshot.parity_groups import describe_weaknesses, form_parity_groups
from resilient_jax.snapshot.snapshot_reader import SnapshotReader
from resilient_jax.state.capture import SnapshotCapture
from resilient_jax.state.flat_state import FlatState
from resilient_jax.state.interfaces import FailPointHook
from resilient_jax.state.protection_schedule import (
    FIRST_OFFSET,
    NUM_FIRST_SNAPSHOTS,
    ProtectionSchedule,
    compute_affordable_interval_steps,
)
from resilient_jax.state.snapshot_interval import compute_interval_steps
from resilient_jax.state.state_partition import StatePartition, partition_state
from resilient_jax.transport.credentials import Credentials

COPY_TIMEOUT_S: Final = 5.0
"""How long training waits for a copy whose arrays it needs; after that the snapshot is cancelled."""
FINISH_TIMEOUT_S: Final = 0.25
"""How long a generation that ends waits for its last copy."""
URGENT_COPY_TIMEOUT_S: Final = 30.0
"""The same until the first snapshot of a generation is committed, where few hosts have the state or no recent snapshot
does: to lose the state costs more than training that waits."""
COMMIT_TIMEOUT_S: Final = 15.0
"""How long a planned change waits for the last snapshot, without which the other hosts resume from an earlier step.
Shorter than the notice that schedulers give before they preempt a host."""
POLL_INTERVAL_S: Final = 0.05
NUM_MEASURED_STEPS: Final = 8
"""The first steps of a generation, each with a snapshot, from which `"auto"` computes the interval."""
MAX_DESCRIPTION_BYTES: Final = MAX_FRAME_BYTES - (2 << 20)
"""Paths, slices and strings travel in one message with the checksums of a part, for which 2 MiB are left."""


class SnapshotAgentConnection(Protocol):
    """The methods of the connection to the agent that snapshots use."""

    def raise_if_ended(self) -> None:
        """Raise `GenerationEnded` if the generation has ended."""
        ...

    def wait_for_snapshot_server(self) -> str:
        """Return the endpoint of this host's snapshot server, which the agent starts if need be."""
        ...

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> Event:
        """Write an event to the host's log."""
        ...


class SnapshotWorld(AddingWorld, Protocol):
    """The attributes and methods of the world that snapshots use."""

    generation: GenerationNumber

    def host_of_device(self, device: Device) -> HostName:
        """Return the host of a device."""
        ...


@dataclasses.dataclass(slots=True)
class _Opened:
    """The layout of one generation, and when its snapshots are due."""

    layout: SnapshotLayout
    cut: StatePartition
    first_step: int
    every: int | None
    """Steps between two snapshots; None while the interval is being measured."""
    began_s: float
    described_bytes: int
    """Size of the description of this host's part, without the strings."""
    is_automatic: bool
    """Whether they are taken without a call of the user."""
    newest: SnapshotId | None = None


class _Peer(msgspec.Struct, frozen=True, array_like=True):
    """The server and the failure domain that a host announces when a layout is opened."""

    server: str
    domain: str


class Snapshotter(GenerationScoped):
    """Takes and opens the snapshots of one worker, in all of its generations."""

    def __init__(
        self,
        descriptor: int,
        host: HostName,
        settings: SnapshotSettings,
        failure_domain: str,
        credentials: Credentials,
        agent: SnapshotAgentConnection,
        failpoint: FailPointHook,
    ) -> None:
        """Connect to the snapshot server without a request.

        Args:
            descriptor: this worker's end of its socket pair with the snapshot server, which may start later.
            failure_domain: the rack or slice that fails together with this host; empty if there is none.
            credentials: credentials for the servers of other hosts.
            failpoint: passes failpoints, where a test may stop this worker.
        """
        self._host = host
        self._settings = settings
        self._domain = failure_domain or host
        self._credentials = credentials
        self._line = agent
        self._server = LocalServerClient(descriptor)
        self._capture = SnapshotCapture(self._server, host, agent.record_event, failpoint=failpoint)
        self._opened: _Opened | None = None
        self._schedule: ProtectionSchedule | None = None
        self._base: SnapshotId | None = None
        """The snapshot that the present generation resumes from, or goes back to if it comes to nothing: servers keep
        it. None: there is none."""
        self._copy_timeout_s = COPY_TIMEOUT_S
        self._blocked_s = 0.0
        """How long the snapshots of this generation have blocked training."""
        self._protection = Protection()
        """When this generation takes snapshots."""

    def begin_generation(self, generation: Generation) -> None:
        """Take snapshots as the generation's protection says; a first one that is urgent is waited for longer."""
        protection = generation.state.protection
        self._copy_timeout_s = URGENT_COPY_TIMEOUT_S if protection.from_first_commit else COPY_TIMEOUT_S
        self._protection = protection
        self._base = generation.state.snapshot.id if generation.state.snapshot is not None else None

    def take(self, world: SnapshotWorld, state: FlatState) -> None:
        """Begin a snapshot of the committed state, if one is due; every host must call `take` after the same steps.

        Raises:
            CallerError: the paths and strings of the state do not fit in a message; the message has the limit.
            SnapshotRefused: the host has too little memory; the message has the required and the free amount.
        """
        opened = self._opened
        if opened is None or opened.layout.generation != world.generation or opened.is_automatic:
            self.wait_until_copied()
            if opened is None or opened.layout.generation != world.generation:
                cut = partition_state(state.leaves, world.host_of_device, world.hosts)
                opened = self._opened = self._open(world, state, cut)
            opened.is_automatic = False
        # By the step, which is the same on every host: to agree is a collective, and all must take part in it.
        if opened.every is None and state.step >= opened.first_step + NUM_MEASURED_STEPS:
            opened.every = self._agree_on_interval(world, opened)
        if opened.newest is None or state.step >= opened.newest.step + (opened.every or 1):
            self._take(opened, state)

    def protect(self, world: SnapshotWorld, state: FlatState) -> None:
        """Begin a snapshot of the committed state if every host has all of it, and one is due.

        Every host must call `protect` after every commit. Does nothing in a generation in which `take` was called.
        What does not fit into the hosts' memory is not protected, with an event.
        """
        interval = self._settings.replicated_interval_steps
        opened = self._opened
        is_open = opened is not None and opened.layout.generation == world.generation
        if interval == "off" or (is_open and opened is not None and not opened.is_automatic):
            return
        schedule = self._schedule
        if schedule is None or schedule.generation != world.generation:
            every = interval if isinstance(interval, int) else None
            schedule = self._schedule = ProtectionSchedule(
                generation=world.generation,
                first_step=state.step,
                every=every,
                first_offset=0 if self._protection.from_first_commit else FIRST_OFFSET,
            )
        schedule.mark(state.step, time.monotonic())
        if schedule.is_measured(state.step):
            schedule.every = self._agree_on_affordable_interval(world, schedule)
        if not schedule.is_due(state.step):
            return
        if not is_open:
            opened = self._open_automatic(world, state)
        if opened is None:
            schedule.is_disabled = True
            return
        self._take(opened, state)
        schedule.newest_step = state.step

    def _open_automatic(self, world: SnapshotWorld, state: FlatState) -> _Opened | None:
        """Open a layout for a state that every host has all of; return None if there is a reason not to."""
        cut = partition_state(state.leaves, world.host_of_device, world.hosts)
        if cut.replicated_on != tuple(world.hosts):
            return None  # the user takes the snapshots, or there are none
        self.wait_until_copied()
        opened, why = None, ""
        try:
            opened = self._open(world, state, cut, is_automatic=True)
        except SnapshotRefused as error:
            why = str(error)
        # A host without memory takes part in no snapshot, so none of them would be committed.
        if any(CollectiveExchange.between_hosts(world).gather(bool(why))) or opened is None:
            why = why or "another host cannot keep its part"
            self._line.record_event(EventKind.SNAPSHOT_DEGRADED, why=f"the state is in no snapshot: {why}")
            return None
        try:
            check_description_size(opened.described_bytes, state)
        except CallerError as error:  # on every host
            self._line.record_event(EventKind.SNAPSHOT_DEGRADED, why=f"the state is in no snapshot: {error}")
            return None
        self._opened = opened
        return opened

    def _take(self, opened: _Opened, held: FlatState) -> None:
        check_description_size(opened.described_bytes, held)
        self.wait_until_copied()
        started_s = time.monotonic()
        # Also if this host then skips it: every host must take the next one after the same step.
        opened.newest = SnapshotId(held.step, opened.layout.generation)
        self._capture.start(opened.newest, opened.cut, held.leaves, held.strings)
        self._blocked_s += time.monotonic() - started_s

    def wait_until_copied(self) -> None:
        """Return when no copy is in progress, so that the arrays of the last snapshot may be donated.

        A copy that takes too long is cancelled, which is an event.
        """
        started_s = time.monotonic()
        while not self._capture.wait_until_copied(POLL_INTERVAL_S):
            self._line.raise_if_ended()
            if time.monotonic() - started_s > self._copy_timeout_s:
                self._capture.cancel(f"training waited {self._copy_timeout_s:g} s for its copy")
                # The copy may be in the middle of an array: what is cancelled still has to let go of it.
                self._capture.wait_until_copied(COPY_TIMEOUT_S)
                break
        if self._copy_timeout_s != COPY_TIMEOUT_S and self._has_committed():
            self._copy_timeout_s = COPY_TIMEOUT_S
        self._blocked_s += time.monotonic() - started_s

    def _has_committed(self) -> bool:
        """Return whether a snapshot of this generation is committed."""
        first = self._capture.newest_finished
        opened = self._opened
        if first is None or opened is None or first.generation != opened.layout.generation:
            return False
        with contextlib.suppress(PeerUnreachable):  # the server has ended, as the agent notices
            return self._server.wait_committed(first, 0)
        return False

    def flush(self, generation: GenerationNumber, state: FlatState | None) -> SnapshotId | None:
        """Take and commit a snapshot of the committed state before a planned change; return its id.

        Return None if this generation takes no snapshots, or if the snapshot is not committed in time; the others then
        resume from the previous one.
        """
        opened = self._opened
        if opened is None or state is None or opened.layout.generation != generation:
            return None
        wanted = SnapshotId(state.step, generation)
        if opened.newest != wanted:
            self._take(opened, state)  # it was not due
        end_s = time.monotonic() + COMMIT_TIMEOUT_S
        while time.monotonic() < end_s:
            self._line.raise_if_ended()
            if self._server.wait_settled(wanted, POLL_INTERVAL_S):
                return wanted if self._server.wait_committed(wanted, 0) else None
        reason = (
            f"not committed on all hosts within {COMMIT_TIMEOUT_S:g} s: the others go back to the one before"
        )
        self._line.record_event(EventKind.SNAPSHOT_DROPPED, step=state.step, reason=reason)
        return None

    def end_generation(self, ending: GenerationEnding) -> None:
        """Release all arrays, and name the newest snapshot of which this host's part is complete.

        The copy in progress is cancelled, unless it is needed and does not take too long.
        """
        if ending.is_copy_needed:
            self._capture.wait_until_finished(FINISH_TIMEOUT_S)
        self._capture.cancel("its generation has ended")
        self._capture.wait_until_copied(COPY_TIMEOUT_S)
        opened, newest = self._opened, self._capture.newest_finished
        self._opened = self._base = None
        is_ours = opened is not None and newest is not None and newest.generation == opened.layout.generation
        ending.copied = newest if is_ours else None

    def open_reader(self, plan: SnapshotPlan) -> SnapshotReader:
        """Return a reader of the snapshot of `plan`, which reads from this host's memory where possible."""
        here = any(source.host == self._host for source in plan.sources)
        return SnapshotReader(
            plan,
            self._host,
            self._server if here else None,
            self._credentials,
            check=self._line.raise_if_ended,
            record_event=self._line.record_event,
        )

    # A generation's layout.

    def _open(
        self, world: SnapshotWorld, held: FlatState, cut: StatePartition, *, is_automatic: bool = False
    ) -> _Opened:
        settings = self._settings
        peers = self._exchange(world, self._line.wait_for_snapshot_server())
        # Also where hosts have copies of everything: all workers may die at once.
        parity = settings.num_parity
        domains = {host: peer.domain for host, peer in peers.items()}
        groups = form_parity_groups(world.hosts, parity, group_size=settings.group_size, domain_of=domains)
        for weakness in describe_weaknesses(groups, parity, domains):
            self._line.record_event(EventKind.SNAPSHOT_DEGRADED, why=weakness)
        layout = SnapshotLayout(
            generation=world.generation,
            groups=groups,
            part_bytes=dict(cut.part_bytes),
            server_endpoints={host: peer.server for host, peer in peers.items()},
            root=world.hosts[0],
        )
        try:
            self._server.open_layout(layout, restored=self._base, check=self._line.raise_if_ended)
        except PeerUnreachable as error:
            if not is_automatic:
                raise
            # The worker outlives its server where it had the only copy of the state; its agent starts it again.
            raise SnapshotRefused(f"the snapshot server of {self._host} is gone: {error}") from error
        self._line.record_event(
            EventKind.SNAPSHOT_LAYOUT,
            bytes=cut.part_bytes[self._host],
            groups=len(groups),
            parity=min(group.parity for group in groups),
        )
        self._blocked_s = 0.0
        every = settings.interval_steps if isinstance(settings.interval_steps, int) else None
        described = len(msgspec.msgpack.encode(PartContents(cut.leaves, cut.slices[self._host])))
        return _Opened(layout, cut, held.step, every, time.monotonic(), described, is_automatic)

    def _agree_on_affordable_interval(self, world: SnapshotWorld, schedule: ProtectionSchedule) -> int:
        """Return the interval that the slowest host can afford, for what the first snapshots of the generation took."""
        blocked_s, copy_s, step_s = _find_longest(
            world, [self._blocked_s / NUM_FIRST_SNAPSHOTS, self._capture.duration_s, schedule.step_s]
        )
        failure_s = self._protection.next_failure_s
        every = compute_affordable_interval_steps(max(copy_s, blocked_s), step_s, failure_s)
        self._record_interval(every, blocked_s, copy_s, step_s)
        return every

    def _agree_on_interval(self, world: SnapshotWorld, opened: _Opened) -> int:
        """Return Young and Daly's interval for the cost of a snapshot on the slowest host in the measured steps."""
        step_s = (time.monotonic() - opened.began_s) / NUM_MEASURED_STEPS
        blocked_s, copy_s, step_s = _find_longest(
            world, [self._blocked_s / NUM_MEASURED_STEPS, self._capture.duration_s, step_s]
        )
        every = compute_interval_steps(blocked_s, self._protection.next_failure_s, step_s, copy_s=copy_s)
        self._record_interval(every, blocked_s, copy_s, step_s)
        return every

    def _record_interval(self, every: int, blocked_s: float, copy_s: float, step_s: float) -> None:
        self._line.record_event(
            EventKind.SNAPSHOT_INTERVAL,
            steps=every,
            blocked_s=blocked_s,
            copy_s=copy_s,
            step_s=step_s,
            next_failure_s=self._protection.next_failure_s or 0.0,
        )

    def _exchange(self, world: SnapshotWorld, server: str) -> Mapping[HostName, _Peer]:
        found = CollectiveExchange.between_hosts(world).gather(_Peer(server, self._domain))
        return dict(zip(world.hosts, found, strict=True))


def _find_longest(world: SnapshotWorld, durations_s: Sequence[float]) -> list[float]:
    """Return the longest of each duration on any host, at least a microsecond."""
    found = CollectiveExchange.between_hosts(world).gather([float(seconds) for seconds in durations_s])
    return [max(1e-6, *of_hosts) for of_hosts in zip(*found, strict=True)]


def check_description_size(description_bytes: int, state: FlatState) -> None:
    """Check that a snapshot's messages can describe the state; otherwise every snapshot would be dropped.

    Args:
        description_bytes: bytes of the description without the strings.

    Raises:
        CallerError: the description is too long; the message has its size and the longest string.
    """
    sizes = {path: len(path.encode()) + len(text.encode()) for path, text in state.strings.items()}
    if description_bytes + sum(sizes.values()) <= MAX_DESCRIPTION_BYTES:
        return
    longest = max(sizes, key=sizes.__getitem__, default="")
    longest_string = f", the longest string {longest} {sizes[longest]} bytes" if sizes else ""
    raise CallerError(
        f"the state cannot be described in a snapshot: found {description_bytes + sum(sizes.values())} bytes of names, "
        f"shapes, slices and strings ({len(state.leaves)} arrays{longest_string}), expected "
        f"{MAX_DESCRIPTION_BYTES} at most. Keep long strings outside of the state, or stack many small arrays"
    )
