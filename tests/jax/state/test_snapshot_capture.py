"""A part is copied while training continues; it is complete or absent, and no array is released too early."""

import contextlib
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.errors import StateError
from resilient_jax.events import EventKind
from resilient_jax.protocol.failpoints import FailPoint
from resilient_jax.state import part_copy
from resilient_jax.state.capture import SnapshotCapture
from resilient_jax.state.copy_sources import CopySource, CopyTask, plan_copies, start_host_transfer
from resilient_jax.state.flat_state import FlatLeaf, flatten_state
from resilient_jax.state.index_box import IndexBox, whole_box
from resilient_jax.state.part_copy import COPY_STEP_BYTES, copy_into_part
from resilient_jax.state.state_partition import partition_state
from tests.support.eight_devices import eight_devices  # noqa: F401 - a fixture of the whole module
from tests.support.fake_snapshots import (
    DTYPES,
    TIMEOUT_S,
    FakeSnapshot,
    RecordedEvents,
    host_names,
    hosts_of_eight,
    put,
    snapshot_id,
    states,
    take,
    values,
)

(HOST,) = host_names(1)


class Blocker:
    """A failpoint hook that blocks a capture until `go_on` is set."""

    def __init__(self, place):
        self.place = place
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, place, step):
        if place is self.place:
            self.reached.set()
            assert self.go_on.wait(TIMEOUT_S)


class CaptureRun:
    """A capture of one host's state, with its fake server and its events."""

    def __init__(self, state, *, failpoint=None, **options):
        self.leaves = flatten_state(1, state).leaves
        self.partition = partition_state(self.leaves, lambda device: HOST, [HOST])
        self.snapshot = FakeSnapshot(self.partition.part_bytes)
        self.recorded = RecordedEvents()
        options |= {} if failpoint is None else {"failpoint": failpoint}
        self.capture = SnapshotCapture(self.snapshot.of(HOST), HOST, self.recorded, **options)

    def start(self, step=1):
        self.capture.start(snapshot_id(step), self.partition, self.leaves)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        assert self.capture.close(TIMEOUT_S)


def check_parts(state, snapshot, partition, hosts):
    leaves = flatten_state(1, state).leaves
    for host in hosts:
        contents = snapshot.done[host].contents
        for leaf_slice in contents.slices:
            value = leaves[leaf_slice.leaf].value
            box = IndexBox(leaf_slice.start, leaf_slice.stop)
            expected = np.asarray(value)[(*box.index_within(whole_box(value.shape)), ...)].tobytes()
            assert snapshot.parts[host][leaf_slice.offset : leaf_slice.offset + len(expected)] == expected
        assert (contents.leaves, contents.slices) == (partition.leaves, partition.slices[host])


@given(
    states(),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([COPY_STEP_BYTES, 40]),
)
def test_parts_contain_the_elements_of_their_slices(state, count, threads, copy_bytes):
    hosts, host_of = hosts_of_eight(count)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_copy, "COPY_STEP_BYTES", copy_bytes)
        snapshot, partition = take(state, hosts, host_of, threads=threads)
    check_parts(state, snapshot, partition, hosts)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_parts_of_many_blocks_are_copied_correctly_for_all_shardings(threads):
    hosts, host_of = hosts_of_eight(2)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    state = {
        "long": put(values((3, 1000, 513), "bfloat16", 1), NamedSharding(mesh, P(None, None))),
        "columns": put(values((999, 1024), "float32", 2), NamedSharding(mesh, P(None, "y"))),
        "spread": put(values((512, 1024), "float32", 3), NamedSharding(mesh, P("y", "x"))),
        "host": values((700_001,), "int4", 4),
        "small": put(values((3,), "bool", 5), NamedSharding(mesh, P())),
    }
    snapshot, partition = take(state, hosts, host_of, threads=threads)
    assert all(len(part) > COPY_STEP_BYTES for part in snapshot.parts.values())
    check_parts(state, snapshot, partition, hosts)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slice_may_span_several_devices_of_its_host(dtype):
    local = Mesh(np.array(jax.devices()), ("x",))
    state = {"w": put(values((16, 5), dtype, 0), NamedSharding(local, P("x")))}
    hosts = host_names(3)  # each is assumed to have such a copy
    snapshot, partition = take(state, hosts, lambda device: hosts[0])
    check_parts(state, snapshot, partition, hosts)


def test_start_returns_before_anything_is_copied():
    blocker = Blocker(FailPoint.BEFORE_COPY)
    with CaptureRun({"w": jnp.ones(1000)}, failpoint=blocker) as run:
        run.start()
        assert blocker.reached.wait(TIMEOUT_S)
        assert not run.capture.wait_until_copied(0)
        assert set(run.snapshot.parts[HOST]) == {0xA5}
        blocker.go_on.set()
        assert run.capture.wait_until_copied(TIMEOUT_S)
        (detail,) = run.recorded.wait_for(EventKind.SNAPSHOT_COPIED)
        assert detail["step"] == 1
        assert detail["bytes"] == 4032  # 4000, aligned to 64
        assert detail["seconds"] >= 0


def test_arrays_may_be_donated_once_they_are_copied_and_are_donated_in_place():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    start = values((8, 1000), "float32", 1)
    array = put(start, NamedSharding(mesh, P("x")))
    scale = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    array = scale(array) * 0 + start  # in memory that XLA owns, as after any step
    where = [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
    blocker = Blocker(FailPoint.AFTER_COPY)
    with CaptureRun({"w": array}, failpoint=blocker) as run:
        run.start()
        assert blocker.reached.wait(TIMEOUT_S)
        assert run.capture.wait_until_copied(TIMEOUT_S), (
            "the arrays are read, even though the part is not complete"
        )
        run.leaves = ()
        after = scale(array)
        assert [shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards] == where
        blocker.go_on.set()
        run.recorded.wait_for(EventKind.SNAPSHOT_COPIED)
        part = np.frombuffer(bytes(run.snapshot.parts[HOST]), np.float32)
        assert np.array_equal(np.sort(part[part != 0]), np.sort(start[start != 0].reshape(-1)))


@pytest.mark.parametrize("place", [FailPoint.BEFORE_COPY, FailPoint.DURING_COPY, FailPoint.AFTER_COPY])
def test_a_cancelled_capture_is_never_complete(place):
    blocker = Blocker(place)
    state = {"a": jnp.ones(100)}
    with CaptureRun(state, failpoint=blocker) as run:
        run.start()
        assert blocker.reached.wait(TIMEOUT_S)
        run.capture.cancel("the generation has ended")
        blocker.go_on.set()
        assert run.capture.wait_until_copied(TIMEOUT_S)
        (detail,) = run.recorded.wait_for(EventKind.SNAPSHOT_DROPPED)
        assert detail == {"step": 1, "reason": "cancelled: the generation has ended"}
    assert run.snapshot.done == {}
    assert run.snapshot.abandoned == [(HOST, snapshot_id(1))]


def test_cancel_has_no_effect_on_a_finished_snapshot():
    with CaptureRun({"w": jnp.ones(10)}) as run:
        run.start()
        run.recorded.wait_for(EventKind.SNAPSHOT_COPIED)
        run.capture.cancel("too late")
        assert run.capture.wait_until_copied(0)
    assert list(run.snapshot.done) == [HOST]
    assert run.recorded.kinds() == [EventKind.SNAPSHOT_COPIED]


def test_a_copy_in_progress_is_waited_for_to_its_end():
    blocker = Blocker(FailPoint.DURING_COPY)
    with CaptureRun({"w": jnp.ones(10)}, failpoint=blocker) as run:
        run.start()
        assert blocker.reached.wait(TIMEOUT_S)
        assert not run.capture.wait_until_finished(0.01)
        blocker.go_on.set()
        assert run.capture.wait_until_finished(TIMEOUT_S)
        assert run.capture.newest_finished == snapshot_id(1)


def test_a_snapshot_is_taken_after_a_cancelled_one():
    blocker = Blocker(FailPoint.DURING_COPY)
    with CaptureRun({"a": jnp.ones(100), "b": jnp.ones(100)}, failpoint=blocker) as run:
        run.start(1)
        assert blocker.reached.wait(TIMEOUT_S)
        run.capture.cancel("once")
        blocker.go_on.set()
        run.recorded.wait_for(EventKind.SNAPSHOT_DROPPED)
        run.start(2)
        run.recorded.wait_for(EventKind.SNAPSHOT_COPIED)
    assert run.snapshot.done[HOST].id == snapshot_id(2)


def test_a_start_during_a_copy_drops_the_new_snapshot_with_an_event():
    blocker = Blocker(FailPoint.DURING_COPY)
    with CaptureRun({"a": jnp.ones(100), "b": jnp.ones(100)}, failpoint=blocker) as run:
        run.start(1)
        assert blocker.reached.wait(TIMEOUT_S)
        run.start(2)
        (detail,) = run.recorded.wait_for(EventKind.SNAPSHOT_DROPPED)
        assert detail["step"] == 2
        assert detail["reason"].startswith("that of step 1 is still being copied")
        assert not run.capture.wait_until_copied(0), "the one that is under way still reads its arrays"
        blocker.go_on.set()
        run.recorded.wait_for(EventKind.SNAPSHOT_COPIED)
    assert run.snapshot.done[HOST].id == snapshot_id(1)
    assert run.snapshot.abandoned == [(HOST, snapshot_id(2))], "other hosts must not wait for a part of it"
    assert run.capture.newest_finished == snapshot_id(1)


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_start_after_a_copy_or_a_cancel_waits_for_the_previous_snapshot(cancelled):
    blocker = Blocker(FailPoint.DURING_COPY if cancelled else FailPoint.AFTER_COPY)
    with CaptureRun({"a": jnp.ones(100), "b": jnp.ones(100)}, failpoint=blocker) as run:
        run.start(1)
        assert blocker.reached.wait(TIMEOUT_S)
        if cancelled:
            run.capture.cancel("it takes too long")
        run.start(2)
        assert not run.capture.wait_until_copied(0), "the second one is not read yet"
        blocker.go_on.set()
        run.recorded.wait_for(EventKind.SNAPSHOT_COPIED, 1 if cancelled else 2)
    assert run.capture.newest_finished == snapshot_id(2)
    assert run.snapshot.abandoned == ([(HOST, snapshot_id(1))] if cancelled else [])


def test_a_snapshot_that_the_server_refuses_is_dropped_with_its_reason():
    with CaptureRun({"w": jnp.ones(10)}) as run:
        run.snapshot.refuse = "both slots are in use"
        run.start()
        (detail,) = run.recorded.wait_for(EventKind.SNAPSHOT_DROPPED)
        assert detail == {"step": 1, "reason": "both slots are in use"}
        assert run.snapshot.abandoned == []
        run.snapshot.refuse = None
        run.start(2)
        run.recorded.wait_for(EventKind.SNAPSHOT_COPIED)


def test_a_snapshot_is_dropped_if_a_leaf_was_donated_too_early():
    blocker = Blocker(FailPoint.BEFORE_COPY)
    with CaptureRun({"w": jnp.ones(10)}, failpoint=blocker) as run:
        run.start()
        assert blocker.reached.wait(TIMEOUT_S)
        cast(jax.Array, run.leaves[0].value).delete()
        blocker.go_on.set()
        (detail,) = run.recorded.wait_for(EventKind.SNAPSHOT_DROPPED)
        assert "leaf ['w'] was donated before its snapshot was copied" in detail["reason"]
    assert run.snapshot.done == {}


@pytest.mark.parametrize("threads", [1, 2])
def test_an_error_in_the_copy_is_an_event_and_the_next_snapshot_is_taken(threads):
    failures = ["the disk of the snapshot burns"]

    def fail_once(place, step):
        if place is FailPoint.DURING_COPY and failures:
            raise OSError(failures.pop())

    state = {"a": jnp.ones(65_536), "b": jnp.ones(65_536)}
    with CaptureRun(state, failpoint=fail_once, num_threads=threads) as run:
        run.start(1)
        (detail,) = run.recorded.wait_for(EventKind.SNAPSHOT_DROPPED)
        assert detail["reason"] == "OSError: the disk of the snapshot burns"
        run.start(2)
        run.recorded.wait_for(EventKind.SNAPSHOT_COPIED)
    assert run.snapshot.abandoned == [(HOST, snapshot_id(1))]


def test_a_part_of_the_wrong_size_is_refused():
    with CaptureRun({"w": jnp.ones(100)}) as run:
        run.snapshot.parts[HOST] = bytearray(64)
        run.start()
        (detail,) = run.recorded.wait_for(EventKind.SNAPSHOT_DROPPED)
        assert detail["reason"] == "InternalError: the server gave 64 bytes for a part of 448"


def test_start_refuses_a_state_of_another_structure():
    with CaptureRun({"w": jnp.ones(100)}) as run:
        with pytest.raises(StateError, match="changed its structure between snapshots"):
            run.capture.start(snapshot_id(1), run.partition, flatten_state(1, {"w": jnp.ones(101)}).leaves)
        assert run.capture.wait_until_copied(0)


def test_a_state_whose_sharding_changed_since_the_partition_is_refused():
    hosts, host_of = hosts_of_eight(2)
    spread = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    here = put(values((8,), "int32", 0), spread)
    partition = partition_state(flatten_state(1, {"w": here}).leaves, host_of, hosts)
    of_first_host = [shard for shard in here.addressable_shards if host_of(shard.device) == hosts[0]]
    elsewhere = SimpleNamespace(
        shape=(8,),
        dtype=here.dtype,
        sharding=here.sharding,
        is_deleted=lambda: False,
        addressable_shards=of_first_host,
    )  # the array of the second host after its shards have moved to the first one
    with pytest.raises(
        StateError, match=r"leaf \['w'\]: this host has 0 of the 1 elements from \[4\] to \[5\]"
    ):
        plan_copies([FlatLeaf(path="['w']", value=cast(jax.Array, elsewhere))], partition.slices[hosts[1]])


def test_close_cancels_a_running_copy():
    blocker = Blocker(FailPoint.DURING_COPY)
    run = CaptureRun({"a": jnp.ones(100), "b": jnp.ones(100)}, failpoint=blocker)
    run.start()
    assert blocker.reached.wait(TIMEOUT_S)
    assert not run.capture.close(0), "its thread is still blocker"
    blocker.go_on.set()
    assert run.capture.close(TIMEOUT_S)
    assert run.recorded.kinds() == [EventKind.SNAPSHOT_DROPPED]
    assert run.snapshot.done == {}


@given(states(), st.sampled_from([1, 2, 4]))
def test_only_the_slices_are_transferred_from_accelerators(state, count):
    hosts, host_of = hosts_of_eight(count)
    leaves = flatten_state(1, state).leaves
    partition = partition_state(leaves, host_of, hosts)
    for host in hosts:
        tasks = plan_copies(leaves, partition.slices[host])
        for task, sent in zip(tasks, start_host_transfer(tasks), strict=True):
            assert (sent.box, sent.offset) == (task.box, task.offset)
            on_devices = [source for source in sent.sources if isinstance(source.data, jax.Array)]
            assert sum(source.data.size for source in on_devices) in (0, task.box.size)
            leaf = next(leaf for leaf in leaves if leaf.path == task.path)
            for box, _, data in sent.sources:
                expected = np.asarray(leaf.value)[(*box.index_within(whole_box(leaf.value.shape)), ...)]
                assert np.asarray(data).tobytes() == expected.tobytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failed_copy_releases_its_arrays_at_once(threads):
    array = np.ones(2 * COPY_STEP_BYTES, np.uint8)
    seen = weakref.ref(array)
    halves = [IndexBox((0,), (COPY_STEP_BYTES,)), IndexBox((COPY_STEP_BYTES,), (2 * COPY_STEP_BYTES,))]
    tasks = [
        CopyTask("w", half, 1, half.start[0], (CopySource(whole_box(array.shape), half, array),))
        for half in halves
    ]
    del array

    def stop():
        raise OSError("stop")

    gc.disable()  # it might otherwise collect a reference cycle, which the test is to detect
    try:
        with contextlib.suppress(OSError):
            copy_into_part(memoryview(bytearray(2 * COPY_STEP_BYTES)), tasks, stop, threads)
        assert seen() is None
    finally:
        gc.enable()
