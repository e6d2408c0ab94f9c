"""Capture and restore with real snapshot servers: the state is restored although hosts are lost."""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import SnapshotLost
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.protocol.snapshots import SnapshotPhase, SnapshotPlan, SnapshotSource
from resilient_jax.snapshot.snapshot_reader import SnapshotReader
from resilient_jax.state.capture import SnapshotCapture
from resilient_jax.state.flat_state import flatten_state
from resilient_jax.state.restore import restore_snapshot
from resilient_jax.state.state_partition import partition_state
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module
from tests.support.fake_snapshots import TIMEOUT_S, RecordedEvents, abstract_of, assert_same, put, values
from tests.support.snapshot_servers import CREDENTIALS, WAIT_S, make_id, make_layout, running

HOSTS = 4
PARITY = 2


def make_state(seed):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    return {
        "sharded": put(values((512, 1000), "float32", seed), NamedSharding(mesh, P(("x", "y")))),
        "both": put(values((64, 640), "bfloat16", seed), NamedSharding(mesh, P("y", "x"))),
        "replicated": put(values((300, 301), "float8_e4m3fn", seed), NamedSharding(mesh, P())),
        "keys": jax.device_put(jax.random.split(jax.random.key(seed), 8), NamedSharding(mesh, P("x"))),
        "step": seed,
    }


class Job:
    """Four hosts of two devices each, with their servers, worker connections and captures."""

    def __init__(self, hosts, reach=None):
        self.hosts = hosts
        self.names = [host.name for host in hosts]
        self.cut = partition_state(flatten_state(0, make_state(0)).leaves, self.host_of, self.names)
        self.layout = make_layout(hosts, PARITY, [self.cut.part_bytes[name] for name in self.names])
        self.locals = [host.worker() for host in hosts]
        self.notes = [RecordedEvents() for _ in hosts]
        for local in self.locals:
            local.open_layout(self.layout)
        self.captures = [
            SnapshotCapture(
                local, name, recorded, *([reach] if reach is not None and name == self.names[-1] else [])
            )
            for local, name, recorded in zip(self.locals, self.names, self.notes, strict=True)
        ]

    def host_of(self, device):
        return self.names[device.id * HOSTS // 8]

    def start(self, step, *, only=slice(None)):
        for capture in self.captures[only]:
            capture.start(make_id(step), self.cut, flatten_state(step, make_state(step)).leaves)

    def take(self, step):
        self.start(step)
        for host in self.hosts:
            host.wait_phase(make_id(step), SnapshotPhase.COMMITTED)

    def restore(self, step, sharding, *, lost=()):
        sources = [SnapshotSource(host=h.name, endpoint=h.endpoint) for h in self.hosts if h.name not in lost]
        plan = SnapshotPlan(id=make_id(step), groups=self.layout.groups, sources=tuple(sources))
        reader = SnapshotReader(
            plan,
            self.names[0],
            self.locals[0],
            CREDENTIALS,
            check=lambda: None,
            record_event=lambda *_, **__: None,
        )
        with contextlib.closing(reader):
            return *restore_snapshot(abstract_of(make_state(step)), reader, sharding), reader.bytes_decoded

    def close(self):
        assert all(capture.close(TIMEOUT_S) for capture in self.captures)


@contextlib.contextmanager
def job(**options):
    with running(HOSTS) as hosts, contextlib.closing(Job(hosts, **options)) as started:
        yield started


def on_three_devices(path, leaf):
    mesh = Mesh(np.array(jax.devices()[5:2:-1]), ("z",))
    return NamedSharding(mesh, P(None, None) if len(leaf.shape) == 2 else P())


def test_a_state_survives_the_loss_of_as_many_hosts_as_there_is_parity():
    with job() as four:
        four.take(5)
        lost = four.names[1:3]
        for host in four.hosts[1:3]:
            host.kill()
        step, restored, decoded = four.restore(5, on_three_devices, lost=lost)
        assert step == 5
        assert decoded >= sum(four.cut.part_bytes[name] for name in lost) - 64 * len(four.cut.leaves) * 8
        assert_as_made(restored, 5)


def test_restored_arrays_do_not_change_when_later_snapshots_overwrite_the_slots():
    with job() as four:
        four.take(5)
        _, restored, decoded = four.restore(5, on_three_devices)
        assert decoded == 0
        for step in (6, 7):  # both slots
            four.take(step)
        assert_as_made(restored, 5)


def assert_as_made(restored, step):
    """Check that a state has the bits of that of a step, and that what is no JAX array is of the same type."""
    made = make_state(step)
    assert_same(restored, made)
    for name, leaf in made.items():
        assert isinstance(leaf, jax.Array) or type(restored[name]) is type(leaf), name


def test_a_restore_fails_if_more_hosts_are_lost_than_there_is_parity():
    with job() as four:
        four.take(5)
        for host in four.hosts[1:]:
            host.kill()
        with pytest.raises(SnapshotLost):
            four.restore(5, on_three_devices, lost=four.names[1:])


def test_a_host_that_skips_a_snapshot_does_not_block_the_next_one_of_the_others():
    places = Held()
    with job(reach=places) as four:
        four.start(1)
        places.wait()
        four.start(2, only=slice(HOSTS - 1, None))  # while its copy of snapshot 1 is blocked
        four.notes[-1].wait_for(EventKind.SNAPSHOT_DROPPED)
        places.release()
        for host in four.hosts:
            host.wait_phase(make_id(1), SnapshotPhase.COMMITTED)
        four.start(2, only=slice(0, HOSTS - 1))
        for host, local in zip(four.hosts[:-1], four.locals, strict=False):
            host.wait_event(EventKind.SNAPSHOT_DROPPED, make_id(2))
            assert not local.wait_committed(make_id(2), WAIT_S)
        four.take(3)
        _, restored, _ = four.restore(3, on_three_devices)
        assert_as_made(restored, 3)


class Held:
    """A failpoint hook that blocks a capture in its first copy."""

    def __init__(self):
        self.notes = RecordedEvents()
        self.is_free = False

    def __call__(self, place, step):
        if place is FailPoint.DURING_COPY and step == 1:
            self.notes(place)
            with self.notes.changed:
                assert self.notes.changed.wait_for(lambda: self.is_free, TIMEOUT_S)

    def wait(self):
        self.notes.wait_for(FailPoint.DURING_COPY)

    def release(self):
        with self.notes.changed:
            self.is_free = True
            self.notes.changed.notify_all()
