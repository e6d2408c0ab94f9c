"""The worker's side of snapshots: it decides when to take one, opens layouts, and opens readers for a restore.

The first snapshot of a generation opens its *layout*: the hosts exchange the endpoints of their snapshot servers (one
small all-reduce), partition the state, and form parity groups. All of it follows from shardings and names, so every
host computes the same. Later snapshots of the generation only copy.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from resilient_jax.errors import CallerError
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.protocol.framing import MAX_FRAME_BYTES
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout, SnapshotPlan
from resilient_jax.protocol.worker_messages import SnapshotSettings
from resilient_jax.snapshot.local_client import LocalServerClient
from resilient_jax.snapshot.manifest import PartContents
from resilient_jax.snapshot.parity_groups import describe_weaknesses, form_parity_groups
from resilient_jax.snapshot.snapshot_reader import SnapshotReader
from resilient_jax.state.capture import SnapshotCapture
from resilient_jax.state.flat_state import FlatState
from resilient_jax.state.interfaces import FailPointHook
from resilient_jax.state.snapshot_interval import compute_interval_steps
from resilient_jax.state.state_partition import StatePartition, partition_state
from resilient_jax.transport.credentials import Credentials

COPY_TIMEOUT_S: Final = 5.0
"""How long training waits for a copy before it needs the memory: longer, and the snapshot is given up."""
COMMIT_TIMEOUT_S: Final = 15.0
"""How long a planned change waits for the last snapshot: without it the others would go back a step. Shorter than what
schedulers give a host that is to leave."""
POLL_INTERVAL_S: Final = 0.05
NUM_MEASURED_STEPS: Final = 8
"""Of a generation, with a snapshot each, before `every = "auto"` says how many there are between two."""
MAX_DESCRIPTION_BYTES: Final = MAX_FRAME_BYTES - (2 << 20)
"""Names of leaves, what lies where, and texts go in one message, with the checksums of a part."""
ADDRESS_BYTES: Final = 192
"""For a server's address and a failure domain's name."""


class SnapshotAgentConnection(Protocol):
    """What is needed of the line to the agent."""

    def raise_if_ended(self) -> None:
        """Raise `GenerationEnded` if the generation has ended."""
        ...

    def wait_for_snapshot_server(self) -> str:
        """Return the endpoint of this host's snapshot server, which the agent starts if need be."""
        ...

    def record_event(self, kind: EventKind, **detail: str | float | bool) -> Event:
        """Write an event to the host's log."""
        ...


class SnapshotWorld(Protocol):
    """What is needed of the world."""

    generation: GenerationNumber
    hosts: tuple[HostName, ...]

    @property
    def host_index(self) -> int:
        """This host's place in `hosts`."""
        ...

    def host_of_device(self, device: Device) -> HostName:
        """Return the host of a device."""
        ...

    def all_reduce(self, tree: Any) -> Any:  # noqa: ANN401 - a tree of small numpy arrays
        """Return the sum over all hosts."""
        ...


@dataclasses.dataclass(slots=True)
class _Opened:
    """The layout of one generation, and when its snapshots are due."""

    layout: SnapshotLayout
    cut: StatePartition
    first_step: int
    every: int | None
    """None: to be measured."""
    began_s: float
    described_bytes: int
    """What says which numbers are where, without the texts."""
    newest: SnapshotId | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Peer:
    """What a host says of itself when a layout is opened."""

    server: str
    domain: str


class Snapshotter:
    """Takes the snapshots of one worker, in all of its generations."""

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
        """Connect to the snapshot server, without a request yet.

        Args:
            descriptor: this worker's end of its socket pair with the snapshot server, which may start later.
            host: this one.
            settings: of the job.
            failure_domain: what fails together with this host; empty: nothing.
            credentials: for the servers of other hosts.
            line: to the agent.
            reach: here a test can hold this worker.
        """
        self._host = host
        self._settings = settings
        self._domain = failure_domain or host
        self._credentials = credentials
        self._line = agent
        self._reach = failpoint
        self._server = LocalServerClient(descriptor)
        self._capture = SnapshotCapture(self._server, host, agent.record_event, failpoint=failpoint)
        self._opened: _Opened | None = None
        self._restored: SnapshotId | None = None
        """What the present generation goes on from, if it is a snapshot."""
        self._blocked_s = 0.0
        """By the snapshots of this generation."""

    def take(self, world: SnapshotWorld, state: FlatState) -> None:
        """Begins a snapshot of the committed state, if one is due; every host must call it after the same steps.

        Raises:
            CallerError: it does not fit in memory, or its texts and names in a message; says how much does.
        """
        opened = self._opened
        if opened is None or opened.layout.generation != world.generation:
            self.wait_until_copied()
            opened = self._opened = self._open(world, state)
        if opened.every is None and state.step >= opened.first_step + NUM_MEASURED_STEPS:
            opened.every = self._agree_on_interval(world, opened)
        if opened.newest is None or state.step >= opened.newest.step + (opened.every or 1):
            self._take(opened, state)

    def _take(self, opened: _Opened, held: FlatState) -> None:
        check_description_size(opened.described_bytes, held)
        self.wait_until_copied()
        started_s = time.monotonic()
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
            if time.monotonic() - started_s > COPY_TIMEOUT_S:
                self._capture.cancel(f"training waited {COPY_TIMEOUT_S:g} s for its copy")
                self._capture.wait_until_copied(COPY_TIMEOUT_S)
                break
        self._blocked_s += time.monotonic() - started_s

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

    def end_generation(self) -> None:
        """End the generation: cancel its copy and release all arrays."""
        self._capture.cancel("its generation has ended")
        self._capture.wait_until_copied(COPY_TIMEOUT_S)
        self._opened = self._restored = None

    def open_reader(self, plan: SnapshotPlan) -> SnapshotReader:
        """Return a reader of the snapshot of `plan`, which reads from this host's memory where possible."""
        self._restored = plan.id
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

    def _open(self, world: SnapshotWorld, held: FlatState) -> _Opened:
        settings = self._settings
        peers = self._exchange(world, self._line.wait_for_snapshot_server())
        cut = partition_state(held.leaves, world.host_of_device, world.hosts)
        # Then a host that is lost takes nothing along, and parity would protect against nothing.
        has_copies = len(cut.replicated_on) > settings.num_parity
        parity = 0 if has_copies else settings.num_parity
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
        self._server.open_layout(layout, restored=self._restored, check=self._line.raise_if_ended)
        self._line.record_event(
            EventKind.SNAPSHOT_LAYOUT,
            bytes=cut.part_bytes[self._host],
            groups=len(groups),
            parity=min(group.parity for group in groups),
            copies=has_copies,
        )
        self._blocked_s = 0.0
        every = settings.interval_steps if isinstance(settings.interval_steps, int) else None
        described = len(msgspec.msgpack.encode(PartContents(cut.leaves, cut.slices[self._host])))
        return _Opened(layout, cut, held.step, every, time.monotonic(), described)

    def _agree_on_interval(self, world: SnapshotWorld, opened: _Opened) -> int:
        """Young and Daly's, from what snapshots cost the slowest host in the first steps of this generation."""
        measured = np.zeros((len(world.hosts), 3), np.float32)
        step_s = (time.monotonic() - opened.began_s) / NUM_MEASURED_STEPS
        measured[world.host_index] = self._blocked_s / NUM_MEASURED_STEPS, self._capture.duration_s, step_s
        blocked_s, copy_s, step_s = map(float, world.all_reduce(measured).max(axis=0))
        every = compute_interval_steps(
            blocked_s, self._settings.mean_time_between_failures_s, step_s, copy_s=copy_s
        )
        self._line.record_event(
            EventKind.SNAPSHOT_INTERVAL, steps=every, blocked_s=blocked_s, copy_s=copy_s, step_s=step_s
        )
        return every

    def _exchange(self, world: SnapshotWorld, server: str) -> Mapping[HostName, _Peer]:
        text = f"{server} {self._domain}".encode()
        if len(text) > ADDRESS_BYTES:
            raise CallerError(
                f"--failure-domain: found {self._domain!r}, {len(text)} bytes with this host's address, expected "
                f"{ADDRESS_BYTES} at most. Give it a shorter name"
            )
        rows = np.zeros((len(world.hosts), ADDRESS_BYTES), np.int32)
        rows[world.host_index, : len(text)] = np.frombuffer(text, np.uint8)
        texts = [bytes(row.astype(np.uint8)).rstrip(b"\0").decode() for row in world.all_reduce(rows)]
        return {host: _Peer(*text.split(" ", 1)) for host, text in zip(world.hosts, texts, strict=True)}


def check_description_size(description_bytes: int, state: FlatState) -> None:
    """Refuses a state that a snapshot's messages cannot describe; each would be dropped, and nothing protected.

    Args:
        described_bytes: of what stands beside the texts.
        held: the state.

    Raises:
        CallerError: says what takes how much.
    """
    sizes = {path: len(path.encode()) + len(text.encode()) for path, text in state.strings.items()}
    if description_bytes + sum(sizes.values()) <= MAX_DESCRIPTION_BYTES:
        return
    longest = max(sizes, key=sizes.__getitem__, default="")
    texts = f", the longest text {longest} {sizes[longest]} bytes" if sizes else ""
    raise CallerError(
        f"the state cannot be described in a snapshot: found {description_bytes + sum(sizes.values())} bytes of names, "
        f"shapes, places and texts ({len(state.leaves)} arrays{texts}), expected {MAX_DESCRIPTION_BYTES} at most. Keep "
        "long texts outside of the state, or stack many small arrays"
    )
