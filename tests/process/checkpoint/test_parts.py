"""A checkpoint that several hosts write together has the layout of one that one host writes, or there is none."""

import functools
import hashlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp
import pytest

from resilient_jax.checkpoint import part_writer
from resilient_jax.checkpoint.messages import SaveShare
from resilient_jax.checkpoint.orbax_store import OrbaxStore
from resilient_jax.checkpoint.orbax_writer import write_checkpoint
from resilient_jax.checkpoint.part_plan import HostPart, PartPlan, describe_state
from resilient_jax.checkpoint.stored_tree import PathKey, StoredLeaf
from resilient_jax.errors import CheckpointFailed
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.leaf_spec import LeafSpec
from tests.process.checkpoint.storage_processes import (
    end_idle_processes,
    find_storage_process,
    lend_process,
    take_back_process,
)
from tests.support.patience import patience, wait_until

HOSTS = tuple(map(HostName, ("host-0", "host-1", "host-2")))
TIMEOUT_S = patience(12)
Tree = dict[str, object]


def make_state(step: int) -> Tree:
    random = np.random.default_rng(step)
    return {
        "layers": [{"w": random.normal(size=(4, 6)).astype(np.float32)} for _ in HOSTS],
        "large": random.normal(size=(1000, 257)).astype(np.float32),
        "stack": random.normal(size=(5, 150, 100)).astype(np.float32),
        "moments": [np.arange(6, dtype=np.int32), None, ()],
        "step": np.asarray(step, np.int32),
    }


def make_part(state: Tree, number: int) -> HostPart:
    """Return what a host writes: its share of the large arrays, of which every host has all, and some small ones."""
    stored = describe_state(state)
    return PartPlan(stored, HOSTS[number], lambda device: HOSTS[0], HOSTS).make_part(stored.leaves)


class Hosts:
    """The stores of several hosts, each with a storage process of its own, and what they record."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stores = [OrbaxStore(directory, max_to_keep=2, timeout_s=TIMEOUT_S) for _ in HOSTS]
        self.events: list[tuple[int, EventKind, dict[str, object]]] = []

    def note(self, number: int) -> Callable[..., None]:
        return lambda kind, **detail: self.events.append((number, kind, detail))

    def start(self, number: int, state: Tree, step: int, token: str) -> None:
        share = SaveShare(token=token, number=number, hosts=HOSTS)
        self.stores[number].start_save(step, make_part(state, number), share, self.note(number))

    def wait_saved(self, number: int) -> None:
        self.stores[number].wait_until_saved(self.note(number))

    def save(self, step: int) -> Tree:
        """Save on all hosts, the first one last."""
        state = make_state(step)
        for number in reversed(range(len(HOSTS))):
            self.start(number, state, step, f"token{step}")
        for number in range(len(HOSTS)):
            self.wait_saved(number)
        return state

    def save_anew(self, state: Tree, token: str) -> None:
        """Save step 3 on all hosts."""
        for number in range(len(HOSTS)):
            self.start(number, state, 3, token)
        for number in range(len(HOSTS)):
            self.wait_saved(number)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    found = Hosts(tmp_path / "checkpoints")
    for store in found.stores:
        lend_process(store)
    yield found
    for store in found.stores:
        take_back_process(store)
        store.in_flight.give_up("the test is over", found.note(0))
        store.close()


@pytest.fixture(scope="module", autouse=True)
def storage_processes() -> Iterator[None]:
    yield
    end_idle_processes()


def is_equal(one: object, other: object) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, one, other))


def test_parts_are_one_checkpoint_for_us_and_for_plain_orbax(hosts: Hosts) -> None:
    for step in (3, 4, 5):
        state = hosts.save(step)
    assert is_equal(hosts.stores[2].load(5, state), state)
    with ocp.CheckpointManager(hosts.directory) as manager:
        assert list(manager.all_steps()) == [4, 5], "older ones are removed"
        assert is_equal(manager.restore(5, args=ocp.args.StandardRestore(state)), state)
    saved = [
        (number, detail["step"])
        for number, kind, detail in hosts.events
        if kind is EventKind.CHECKPOINT_SAVED
    ]
    assert saved == [(0, 3), (0, 4), (0, 5)], "one event for each checkpoint"
    assert sorted(os.listdir(hosts.directory)) == ["4", "5"], "nothing else is left"
    folder = hosts.directory / "5"
    digests = dict(
        line.split("  ")[::-1] for line in (folder / "resilient_jax.sha256").read_text().splitlines()
    )
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert digests.keys() == files.keys() - {"resilient_jax.sha256"}
    assert {name: hashlib.sha256(files[name].read_bytes()).hexdigest() for name in digests} == digests


def test_each_host_writes_its_share_of_the_bytes(hosts: Hosts) -> None:
    state = hosts.save(3)
    due = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / len(HOSTS)
    databases = sorted((hosts.directory / "3" / "default").glob("ocdbt.process_*"))
    for database in databases:
        written = sum(path.stat().st_size for path in database.rglob("*") if path.is_file())
        assert written < 1.05 * due, database.name  # random elements, which zstd makes smaller by a twelfth
        assert written > 0.8 * due, database.name
    assert len(databases) == len(HOSTS)


def test_a_complete_checkpoint_of_the_step_stays_and_a_damaged_one_is_replaced(hosts: Hosts) -> None:
    state = hosts.save(3)
    hosts.save_anew(make_state(7), "again")
    assert is_equal(hosts.stores[0].load(3, state), state)
    (damaged, *_) = (
        path for path in (hosts.directory / "3").rglob("ocdbt.process_1/d/*") if path.stat().st_size
    )
    damaged.write_bytes(bytes(damaged.stat().st_size))
    other = make_state(7)
    hosts.save_anew(other, "once more")
    assert is_equal(hosts.stores[0].load(3, other), other)


def test_without_a_lost_host_there_is_none_and_the_next_one_is_made(hosts: Hosts) -> None:
    state = make_state(3)
    hosts.start(0, state, 3, "first")
    hosts.start(1, state, 3, "first")
    hosts.wait_saved(1)
    wait_until(
        "the parts of the others", lambda: hosts.stores[0].in_flight.list_missing_parts() == ["host-2"]
    )
    hosts.stores[0].in_flight.give_up("host-2 ended before its part was written", hosts.note(0))
    (failed,) = [detail for _, kind, detail in hosts.events if kind is EventKind.CHECKPOINT_FAILED]
    assert failed["reason"] == "host-2 ended before its part was written; without the parts of host-2"
    assert not hosts.stores[0].has_checkpoint(3)
    after = hosts.save(4)
    assert is_equal(hosts.stores[1].load(4, after), after)
    assert sorted(os.listdir(hosts.directory)) == ["4"], "what the killed process has left is removed"


def test_a_host_that_cannot_write_its_part_is_named(hosts: Hosts) -> None:
    state = make_state(3)
    part = make_part(state, 2)
    wrong = [
        msgspec.structs.replace(leaf, boxes=leaf.boxes[:1] * 2, grid=leaf.grid * 2) for leaf in part.leaves
    ]
    hosts.start(0, state, 3, "first")
    hosts.start(1, state, 3, "first")
    share = SaveShare(token="first", number=2, hosts=HOSTS)
    hosts.stores[2].start_save(3, part._replace(leaves=wrong), share, hosts.note(2))
    with pytest.raises(CheckpointFailed, match="host-2 could not write its part: ValueError: "):
        hosts.wait_saved(0)
    assert not hosts.stores[0].has_checkpoint(3)


def test_a_part_whose_process_is_killed_ends_the_save_and_is_named(hosts: Hosts) -> None:
    state = make_state(3)
    hosts.start(2, state, 3, "first")  # its process waits for the first host's
    pid = find_storage_process(hosts.stores[2])
    os.kill(pid, signal.SIGKILL)
    hosts.start(0, state, 3, "first")
    hosts.start(1, state, 3, "first")
    hosts.wait_saved(1)
    with pytest.raises(CheckpointFailed):
        hosts.wait_saved(2)
    with pytest.raises(CheckpointFailed, match="host-2 could not write its part"):
        hosts.wait_saved(0)
    assert not hosts.stores[0].has_checkpoint(3)


def test_where_the_first_host_dies_the_others_wait_for_it_and_begin_the_next_one(hosts: Hosts) -> None:
    state = make_state(3)
    for number in (1, 2):
        hosts.start(number, state, 3, "never begun")
        assert hosts.stores[number].in_flight.list_missing_parts() == ["host-0"]
    hosts.start(0, state, 3, "first")
    pid = find_storage_process(hosts.stores[0])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(CheckpointFailed):
        hosts.wait_saved(0)
    after = hosts.save(4)
    assert is_equal(hosts.stores[0].load(4, after), after)


def test_a_directory_that_hosts_do_not_share_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_writer, "BEGIN_TIMEOUT_S", 0.2)
    here, there = (SaveShare(token="one", number=number, hosts=HOSTS[:2]) for number in range(2))
    with pytest.raises(CheckpointFailed, match=r"no folder of host-0 in .* same files on every host"):
        part_writer.write_part(tmp_path / "there", 3, [], there)
    scalar = StoredLeaf(path=(PathKey("step", is_index=False),), spec=LeafSpec("step", "int32", ()), boxes=())
    write = functools.partial(part_writer.write_first_part, step=3, leaves=[(scalar, [])], share=here)
    with pytest.raises(CheckpointFailed, match=r"host-1 has not begun its part .* same files on every host"):
        write_checkpoint(tmp_path / "here", 3, here, write)
