"""States and jobs for `snapshot_timing.py`: one process acts as the workers of all hosts, with real servers.

The process has eight devices. Each host's snapshot server is a process of its own, as in a job.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotLayout, SnapshotPlan, SnapshotSource
from resilient_jax.protocol.worker_messages import SNAPSHOT_CONNECTION_VARIABLE
from resilient_jax.snapshot.local_client import LocalServerClient
from resilient_jax.snapshot.slot_memory import MEMFD_NAME
from resilient_jax.snapshot.snapshot_reader import SnapshotReader
from resilient_jax.state.capture import SnapshotCapture
from resilient_jax.state.flat_state import FlatLeaf, flatten_state
from resilient_jax.state.restore import restore_snapshot
from resilient_jax.state.state_partition import StatePartition, partition_state
from tests.benchmarks.snapshot.figures import GroupMemory
from tests.support.snapshot_servers import CREDENTIALS, Host, make_id, make_layout, running

DEVICES = 8
COLUMNS = 1024
LARGE_ROWS, SMALL_ROWS = 2016, 56
"""Rows of a leaf: multiples of 7 and of 8 devices; the large leaf is 8 MB, as the matrices of a model of 1 GB."""
DTYPE = np.dtype(np.uint32)
WAIT_S = 300.0
SECTOR_BYTES = 512
"""The unit of `st_blocks`."""


# The state.


def random_leaf(shape: tuple[int, int]) -> np.ndarray:
    """Return the data of leaf 0; other leaves are its XOR with their number."""
    return np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)


class State:
    """Leaves of random values on eight devices. Every leaf can be recomputed, to check what is restored."""

    def __init__(self, nbytes: int) -> None:
        rows = LARGE_ROWS if nbytes >= LARGE_ROWS * COLUMNS * DTYPE.itemsize else SMALL_ROWS
        self.shape = (rows, COLUMNS)
        self.count = max(1, round(nbytes / (rows * COLUMNS * DTYPE.itemsize)))
        self._random = random_leaf(self.shape)
        self.tree = {f"leaf{number:03}": self._put(number) for number in range(self.count)}

    @property
    def nbytes(self) -> int:
        return self.count * self.shape[0] * COLUMNS * DTYPE.itemsize

    def leaves(self) -> Sequence[FlatLeaf]:
        return flatten_state(0, self.tree).leaves

    def abstract(self, sharding: NamedSharding | None = None) -> dict[str, jax.ShapeDtypeStruct]:
        return {name: jax.ShapeDtypeStruct(self.shape, np.uint32, sharding=sharding) for name in self.tree}

    def check(self, restored: Mapping[str, Any]) -> None:  # arrays, in the tree of `abstract`
        """Assert that every bit of every leaf was restored."""
        for number, name in enumerate(self.tree):
            assert np.array_equal(np.asarray(restored[name]), self._values(number)), name

    def _values(self, number: int) -> np.ndarray:
        return self._random ^ np.uint32(number)

    def _put(self, number: int) -> jax.Array:
        values = self._values(number)
        # Each shard has memory of its own, as the result of a computation would have.
        return jax.make_array_from_callback(
            self.shape, on_devices(DEVICES), lambda index: values[index].copy()
        )


def on_devices(count: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:count]), ("x",)), P("x"))


# Hosts.


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """The share of the state that one survivor restores: some rows of every leaf.

    Attributes:
        number: index of the survivor.
        of: number of survivors.
        shape: of a leaf.
        leaves: number of leaves.
    """

    plan: SnapshotPlan
    host: HostName
    number: int
    of: int
    shape: tuple[int, int]
    leaves: int


class Survivors:
    """Processes that act as the workers of the surviving hosts."""

    def __init__(self, children: Sequence[subprocess.Popen[str]]) -> None:
        self._children = children
        self._expect("ready")

    def restore(self) -> float:
        """Return the seconds until every survivor has its share of the state; assert that every share is right."""
        began_s = time.perf_counter()
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        self._expect("restored")
        took_s = time.perf_counter() - began_s
        self._expect("right")
        return took_s

    def _expect(self, word: str) -> None:
        for child in self._children:
            assert child.stdout is not None
            said = child.stdout.readline()
            assert said == f"{word}\n", said


@dataclass(kw_only=True)
class Job:
    """Hosts with servers, whose workers are all in this process."""

    hosts: list[Host]
    state_cut: StatePartition
    layout: SnapshotLayout
    leaves: Sequence[FlatLeaf]
    lines: list[LocalServerClient]
    captures: dict[int, list[SnapshotCapture]]
    dropped: list[str]
    step: int = 0

    def take(self, threads: int = 1) -> tuple[float, float, float]:
        """Take a snapshot; return the seconds of its starts, until all arrays are read, and until the commit."""
        captures = self.captures[threads]
        self.step += 1
        id = make_id(self.step)
        began_s = time.perf_counter()
        for capture in captures:
            capture.start(id, self.state_cut, self.leaves)
        started_s = time.perf_counter()
        assert all(capture.wait_until_copied(WAIT_S) for capture in captures)
        copied_s = time.perf_counter()
        for host, line in zip(self.hosts, self.lines, strict=True):
            assert line.wait_committed(id, WAIT_S), (self.dropped, host.holding, host.events)
        return started_s - began_s, copied_s - began_s, time.perf_counter() - began_s

    def restore(self, state: "State", devices: int, *, local: bool, lost: Sequence[Host] = ()) -> float:
        """Return the seconds in which the first host's worker restores the newest snapshot; assert that it is right.

        Args:
            state: of which the snapshot was taken.
            devices: number of devices to restore onto.
            local: whether the worker may read its own server's memory; else it asks that server as a peer.
            lost: hosts whose servers are gone; the plan omits them.
        """
        plan = self._plan(lost)
        abstract, sharding = state.abstract(), on_devices(devices)
        began_s = time.perf_counter()
        reader = SnapshotReader(
            plan,
            self.hosts[0].name,
            self.lines[0] if local else None,
            CREDENTIALS,
            check=lambda: None,
            record_event=lambda *_, **__: None,
        )
        with contextlib.closing(reader):
            _, restored = restore_snapshot(abstract, reader, lambda *_: sharding)
            jax.block_until_ready(restored)
            took_s = time.perf_counter() - began_s
        state.check(restored)
        return took_s

    @contextlib.contextmanager
    def survivors(self, state: "State", lost: Sequence[Host]) -> Iterator[Survivors]:
        """Yield worker processes, in place of this process, on all hosts but the lost ones."""
        left = [host for host in self.hosts if host not in lost]
        with contextlib.ExitStack() as owned:
            children = []
            for number, host in enumerate(left):
                share = Share(
                    plan=self._plan(lost),
                    host=host.name,
                    number=number,
                    of=len(left),
                    shape=state.shape,
                    leaves=state.count,
                )
                child = owned.enter_context(start_survivor(host, share))
                owned.callback(child.kill)
                children.append(child)
            yield Survivors(children)

    def _plan(self, lost: Sequence[Host]) -> SnapshotPlan:
        sources = [SnapshotSource(host=h.name, endpoint=h.endpoint) for h in self.hosts if h not in lost]
        return SnapshotPlan(id=make_id(self.step), groups=self.layout.groups, sources=tuple(sources))

    def memory(self, parity: int) -> GroupMemory:
        return GroupMemory(
            hosts=len(self.hosts),
            parity=parity,
            part_bytes=sum(self.layout.part_bytes.values()),
            held_bytes=sum(held_bytes(host.process.pid) for host in self.hosts),
        )


def start_survivor(host: Host, share: Share) -> subprocess.Popen[str]:
    with host.connect() as theirs:
        return subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("snapshot_survivor.py")),
                msgspec.json.encode(share).decode(),
            ],
            env={
                **os.environ,
                "XLA_FLAGS": "",  # one device
                SNAPSHOT_CONNECTION_VARIABLE: str(theirs.fileno()),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(theirs.fileno(),),
        )


def held_bytes(pid: int) -> int:
    """Return the bytes that the kernel gave to a server's slots, manifests included."""
    found: dict[int, int] = {}  # by inode, because several descriptors may share memory
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if MEMFD_NAME in os.readlink(descriptor):
                status = descriptor.stat()
                found[status.st_ino] = status.st_blocks * SECTOR_BYTES
    return sum(found.values())


@contextlib.contextmanager
def job_of(
    count: int, parity: int, leaves: Sequence[FlatLeaf], threads: Sequence[int] = (1,)
) -> Iterator[Job]:
    """Yield a job of hosts in one group, with captures for each number of threads."""
    with running(count) as hosts, contextlib.ExitStack() as owned:
        names = [host.name for host in hosts]
        state_cut = partition_state(leaves, lambda device: names[device.id * count // DEVICES], names)
        layout = make_layout(hosts, parity, [state_cut.part_bytes[name] for name in names])
        lines = [host.worker() for host in hosts]
        for line in lines:
            line.open_layout(layout)
        dropped: list[str] = []

        def note(kind: EventKind, **detail: object) -> None:
            if kind is EventKind.SNAPSHOT_DROPPED:
                dropped.append(str(detail))

        captures = {
            each: [
                SnapshotCapture(line, name, note, num_threads=each)
                for line, name in zip(lines, names, strict=True)
            ]
            for each in threads
        }
        for some in captures.values():
            for capture in some:
                owned.callback(capture.close, WAIT_S)
        yield Job(
            hosts=hosts,
            state_cut=state_cut,
            layout=layout,
            leaves=leaves,
            lines=lines,
            captures=captures,
            dropped=dropped,
        )
