"""A replicated state is protected in every generation, or it is said why not; training goes on."""

import contextlib
import socket
import threading
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from resilient_jax.errors import PeerUnreachable, SnapshotRefused
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.generation import Generation, GenerationPhase, ResumedState
from resilient_jax.protocol.generation_scoped import GenerationEnding
from resilient_jax.protocol.snapshots import Protection, SnapshotId
from resilient_jax.protocol.worker_messages import SnapshotSettings
from resilient_jax.state import snapshotter as module
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.state.protection_schedule import FIRST_OFFSET
from resilient_jax.state.snapshotter import Snapshotter
from resilient_jax.transport.credentials import Credentials
from tests.support.fake_snapshots import FakeSnapshot
from tests.support.patience import patience
from tests.support.summing_hosts import add_messages

HERE, OTHER = HostName("here"), HostName("other")
FIRST_STEP = 5
TIMEOUT_S = patience(3)


class World:
    """Two hosts, of which the other one announces its server, then whether it was refused."""

    def __init__(self, *, is_other_refused: bool) -> None:
        self.generation = GenerationNumber(1)
        self.hosts = (HERE, OTHER)
        self.host_index = 0
        self._answers: list[object] = [("other:1", "rack"), is_other_refused]

    def host_of_device(self, device):
        return HERE

    def all_reduce(self, tree):
        return add_messages(tree, [(1, self._answers.pop(0))])


class AgentLine:
    """The connection to the agent."""

    def __init__(self) -> None:
        self.events: list[tuple[EventKind, dict]] = []

    def raise_if_ended(self) -> None:
        pass

    def wait_for_snapshot_server(self) -> str:
        return "here:1"

    def record_event(self, kind, **detail):
        self.events.append((kind, detail))
        return Event(kind=kind, host=HERE, monotonic_s=0.0, wall_s=0.0)


class Server:
    """This host's snapshot server, which has memory for a layout or not, and drops every snapshot."""

    def __init__(self, descriptor: int, *, refusal: str = "", is_gone: bool = False) -> None:
        self.layouts: list = []
        self.begun: list = []
        self._refusal = refusal
        self._is_gone = is_gone

    def open_layout(self, layout, *, restored, check):
        if self._is_gone:
            raise PeerUnreachable("its connection is closed")
        if self._refusal:
            raise SnapshotRefused(self._refusal)
        self.layouts.append(layout)

    def begin(self, id):
        self.begun.append(id.step)
        raise SnapshotRefused("no slot")

    def abandon(self, id):
        pass


class AcceptingServer:
    """This host's snapshot server, which takes every part."""

    def __init__(self) -> None:
        self._parts: Any = None

    def open_layout(self, layout, *, restored, check):
        self._parts = FakeSnapshot(layout.part_bytes).of(HERE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parts, name)


@pytest.fixture
def protect(monkeypatch):
    """Return a function that commits some steps; it returns the server and the events."""

    with contextlib.ExitStack() as stack:

        def run(
            *, num_steps=6, interval=2, explicit=False, urgent=False, is_other_refused=False, **server_is
        ):
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            server = Server(0, **server_is)
            monkeypatch.setattr(module, "LocalServerClient", lambda descriptor: server)
            settings = SnapshotSettings(num_parity=1, replicated_interval_steps=interval)
            line = AgentLine()
            taking = Snapshotter(
                ours.fileno(), HERE, settings, "", Credentials("token"), line, lambda place, step=0: None
            )
            taking.begin_generation(
                Generation(
                    number=GenerationNumber(1),
                    phase=GenerationPhase.ACTIVE,
                    state=ResumedState(protection=Protection(from_first_commit=urgent)),
                )
            )
            world = World(is_other_refused=is_other_refused)
            for step in range(FIRST_STEP, FIRST_STEP + num_steps):
                state = flatten_state(step, {"w": jnp.zeros((64, 64)), "n": np.int32(step)})
                taking.protect(world, state)
                if explicit:
                    taking.take(world, state)
                taking.wait_until_copied()
            assert taking._capture.close()
            return server, line.events

        yield run


def list_kinds(events):
    return [kind for kind, _ in events if kind is not EventKind.SNAPSHOT_DROPPED]


def test_a_replicated_state_is_snapshotted_with_parity_although_every_host_has_a_copy(protect):
    server, events = protect()
    assert server.begun == [FIRST_STEP + FIRST_OFFSET, FIRST_STEP + FIRST_OFFSET + 2]
    (layout,) = server.layouts
    assert [group.parity for group in layout.groups] == [1]
    sizes = sorted(layout.part_bytes.values())
    assert sizes[0] > 0.4 * sum(sizes), "each host has its share"
    assert list_kinds(events) == [EventKind.SNAPSHOT_LAYOUT]


def test_where_the_record_says_that_it_is_urgent_the_first_commit_is_in_a_snapshot(protect):
    server, _ = protect(urgent=True)
    assert server.begun == [FIRST_STEP, FIRST_STEP + 2, FIRST_STEP + 4]


@pytest.mark.parametrize(("refusal", "is_other_refused"), [("found 1 byte", False), ("", True)])
def test_what_does_not_fit_on_some_host_is_not_protected_and_training_goes_on(
    refusal, is_other_refused, protect
):
    server, events = protect(refusal=refusal, is_other_refused=is_other_refused)
    assert server.begun == []
    degraded = [detail["why"] for kind, detail in events if kind is EventKind.SNAPSHOT_DEGRADED]
    assert degraded == [f"the state is in no snapshot: {refusal or 'another host cannot keep its part'}"]


def test_a_worker_that_has_outlived_its_snapshot_server_goes_on_without(protect):
    server, events = protect(is_gone=True)
    assert server.begun == []
    (why,) = (detail["why"] for kind, detail in events if kind is EventKind.SNAPSHOT_DEGRADED)
    assert "the snapshot server of" in why


def test_snapshots_that_the_training_takes_itself_replace_the_automatic_ones(protect):
    server, _ = protect(explicit=True, num_steps=4)
    assert server.begun == [FIRST_STEP, FIRST_STEP + 1, FIRST_STEP + 2, FIRST_STEP + 3]


def test_protection_can_be_switched_off(protect):
    server, events = protect(interval="off")
    assert (server.layouts, server.begun, events) == ([], [], [])


@pytest.mark.parametrize(
    ("is_needed", "copied", "kind"),
    [
        (True, SnapshotId(FIRST_STEP, GenerationNumber(1)), EventKind.SNAPSHOT_COPIED),
        (False, None, EventKind.SNAPSHOT_DROPPED),
    ],
)
def test_a_generation_that_ends_finishes_the_copy_in_progress_if_it_is_needed(
    is_needed, copied, kind, monkeypatch
):
    reached, go_on = threading.Event(), threading.Event()

    def hold(place, step=0):
        if place is FailPoint.DURING_COPY:
            reached.set()
            assert go_on.wait(TIMEOUT_S)

    monkeypatch.setattr(module, "FINISH_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(module, "LocalServerClient", lambda descriptor: AcceptingServer())
    line = AgentLine()
    taking = Snapshotter(0, HERE, SnapshotSettings(num_parity=1), "", Credentials("token"), line, hold)
    state = flatten_state(FIRST_STEP, {"w": jnp.zeros((64, 64))})
    taking.take(World(is_other_refused=False), state)
    assert reached.wait(TIMEOUT_S)
    release = threading.Timer(0.05, go_on.set)
    release.start()
    ending = GenerationEnding(generation=GenerationNumber(1), is_intact=True, is_copy_needed=is_needed)
    taking.end_generation(ending)
    assert ending.copied == copied
    release.join()
    assert taking._capture.close()
    assert [
        found for found, _ in line.events if found.startswith("snapshot.") and found != "snapshot.layout"
    ] == [kind]
