"""Time our snapshots, memory copy and Orbax in alternation, with a state of one size.

    snapshot_timing.py WANTED.json TIMES.json

WANTED.json is a `SnapshotRequest` of `benchmarks.snapshot.figures`; the script writes `SnapshotTimings` to TIMES.json.
A case that needs more memory than is free is skipped. The first round of a case imports, connects and touches memory,
and is not counted. In every round the restored state is compared with the saved one, bit for bit.
"""

import contextlib
import functools
import importlib.metadata
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import msgspec
import numpy as np
import orbax.checkpoint as ocp

from resilient_jax.erasure.kernels import choose_kernel
from resilient_jax.snapshot.memory_budget import read_free_memory
from tests.benchmarks.jobs.snapshot_hosts import DEVICES, Job, State, job_of, on_devices
from tests.benchmarks.snapshot.figures import (
    ALONE,
    DISK,
    LOCAL,
    PARITY,
    PEER,
    TMPFS,
    GroupMemory,
    SnapshotRequest,
    SnapshotTask,
    SnapshotTiming,
    SnapshotTimings,
    group_name,
    threads_name,
)
from tests.benchmarks.snapshot.memory import (
    LOSS_STATES,
    ONE_HOST_STATES,
    ORBAX_STATES,
    group_states,
    required_bytes,
)

THREADS = (1, 2)
GROUPS = ((4, 1), (4, 2), (8, 1), (8, 2), (8, 4))
"""Number of hosts, and parity."""
LOST_GROUP = (8, 1)
"""The group whose last host is lost."""


class Bench:
    """The cases and their results."""

    def __init__(self, wanted: SnapshotRequest) -> None:
        self._wanted = wanted
        self._began_s = time.monotonic()
        self._state = State(wanted.state_bytes)
        self._times: dict[tuple[SnapshotTask, str], list[float]] = {}
        self._memory: list[GroupMemory] = []
        self._skipped: dict[str, str] = {}

    def run(self) -> SnapshotTimings:
        self._try("one host", ONE_HOST_STATES, self._measure_one_host)
        for hosts, parity in GROUPS:
            name = group_name(hosts, parity)
            is_lost_group = (hosts, parity) == LOST_GROUP
            self._try(
                f"{name} and the loss of a host" if is_lost_group else name,
                LOSS_STATES if is_lost_group else group_states(hosts, parity),
                functools.partial(self._measure_group, hosts, parity),
            )
        self._try("Orbax save to tmpfs", ORBAX_STATES, lambda: self._measure_saves(TMPFS, self._wanted.tmpfs))
        self._try("Orbax save to disk", ORBAX_STATES, lambda: self._measure_saves(DISK, self._wanted.disk))
        self._try("Orbax restore from disk", ORBAX_STATES, self._measure_restore_from_disk)
        return SnapshotTimings(
            state_bytes=self._state.nbytes,
            processor=processor(),
            timed=[
                SnapshotTiming(task=task, variant=variant, times_s=times_s)
                for (task, variant), times_s in self._times.items()
            ],
            memory=self._memory,
            skipped=self._skipped,
            versions={
                "kernel": choose_kernel().kernel.description,
                **{name: importlib.metadata.version(name) for name in ("jax", "orbax-checkpoint")},
            },
        )

    def _try(self, name: str, states: float, measure: Callable[[], None]) -> None:
        """Measure one case, or record why it is skipped: too little memory or time."""
        spent_s = time.monotonic() - self._began_s
        needed, free = required_bytes(states, self._state.nbytes), read_free_memory().free_bytes
        if spent_s > self._wanted.limit_s:
            self._skipped[name] = (
                f"{spent_s:.0f} s were spent before, the limit is {self._wanted.limit_s:.0f} s"
            )
        elif needed > free:
            self._skipped[name] = f"needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
        else:
            measure()

    def _rounds(self) -> Iterator[bool]:
        """Yield, for each round, whether it counts; the first does not."""
        yield False
        for _ in range(self._wanted.rounds):
            yield True

    def _add(self, counts: bool, task: SnapshotTask, variant: str, seconds: float) -> None:
        if counts:
            self._times.setdefault((task, variant), []).append(seconds)

    # Cases.

    def _measure_one_host(self) -> None:
        """Measure one host that has all of the state, without parity."""
        state = self._state
        with job_of(1, 0, state.leaves(), THREADS) as job:
            targets = {name: np.ones(state.shape, np.uint32) for name in state.tree}
            for counts in self._rounds():
                for threads in THREADS:
                    variant = threads_name(threads)
                    self._add(counts, SnapshotTask.COPY, variant, time_copies(state, targets, threads))
                    blocking_s, copied_s, _ = job.take(threads)
                    self._add(counts, SnapshotTask.BLOCKING, variant, blocking_s)
                    self._add(counts, SnapshotTask.CAPTURE, variant, copied_s)
            del targets
            for counts in self._rounds():
                self._add(counts, SnapshotTask.RESTORE, LOCAL, job.restore(state, DEVICES, local=True))
                self._add(counts, SnapshotTask.RESTORE, PEER, job.restore(state, DEVICES, local=False))

    def _measure_group(self, hosts: int, parity: int) -> None:
        with job_of(hosts, parity, self._state.leaves()) as job:
            for counts in self._rounds():
                *_, committed_s = job.take()
                self._add(counts, SnapshotTask.COMMIT, group_name(hosts, parity), committed_s)
            self._memory.append(job.memory(parity))
            if (hosts, parity) == LOST_GROUP:
                self._measure_loss(job)

    def _measure_loss(self, job: Job) -> None:
        state, lost = self._state, job.hosts[-1:]
        for host in lost:
            host.kill()
        for counts in self._rounds():
            self._add(
                counts, SnapshotTask.RESTORE, ALONE, job.restore(state, DEVICES - 1, local=True, lost=lost)
            )
        with saved(state, self._wanted.tmpfs) as checkpoint, job.survivors(state, lost) as survivors:
            for counts in self._rounds():
                self._add(counts, SnapshotTask.RESTORE, PARITY, survivors.restore())
                self._add(counts, SnapshotTask.ORBAX_RESTORE, TMPFS, time_orbax_restore(state, checkpoint))

    def _measure_saves(self, variant: str, folder: str) -> None:
        for counts in self._rounds():
            with contextlib.closing(new_checkpointer()) as checkpointer:
                path = Path(folder) / "save"
                began_s = time.perf_counter()
                checkpointer.save(path, args=ocp.args.StandardSave(self._state.tree))
                started_s = time.perf_counter()
                checkpointer.wait_until_finished()
                self._add(counts, SnapshotTask.ORBAX_SAVE, variant, time.perf_counter() - began_s)
                self._add(counts, SnapshotTask.ORBAX_BLOCKING, variant, started_s - began_s)
                shutil.rmtree(path)

    def _measure_restore_from_disk(self) -> None:
        """Measure the best case: the checkpoint was just written, so the kernel has it in its cache."""
        with saved(self._state, self._wanted.disk) as checkpoint:
            for counts in self._rounds():
                self._add(
                    counts, SnapshotTask.ORBAX_RESTORE, DISK, time_orbax_restore(self._state, checkpoint)
                )


def time_copies(state: State, targets: dict[str, np.ndarray], threads: int) -> float:
    """Return the seconds in which threads copy every shard into touched memory."""
    pairs = [
        (targets[name][shard.index], np.asarray(shard.data))
        for name, leaf in state.tree.items()
        for shard in leaf.addressable_shards
    ]

    def copy(number: int) -> None:
        for target, source in pairs[number::threads]:
            np.copyto(target, source)

    others = [threading.Thread(target=copy, args=(number,)) for number in range(1, threads)]
    began_s = time.perf_counter()
    for thread in others:
        thread.start()
    copy(0)
    for thread in others:
        thread.join()
    return time.perf_counter() - began_s


# Orbax, as its documentation recommends.


def new_checkpointer() -> ocp.AsyncCheckpointer:
    return ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())


@contextlib.contextmanager
def saved(state: State, folder: str) -> Iterator[Path]:
    """Yield the path of a checkpoint of the state; remove the checkpoint on exit."""
    path = Path(folder) / "restore"
    with contextlib.closing(new_checkpointer()) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(state.tree))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def time_orbax_restore(state: State, path: Path) -> float:
    """Return the seconds of a restore onto one device fewer; assert that the result is right."""
    abstract = state.abstract(on_devices(DEVICES - 1))
    with contextlib.closing(new_checkpointer()) as checkpointer:
        began_s = time.perf_counter()
        restored = checkpointer.restore(path, args=ocp.args.StandardRestore(abstract))
        jax.block_until_ready(restored)
        took_s = time.perf_counter() - began_s
    state.check(restored)
    return took_s


def processor() -> str:
    """Return the model name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def main(asked: Path, found: Path) -> None:
    wanted = msgspec.json.decode(asked.read_bytes(), type=SnapshotRequest)
    found.write_bytes(msgspec.json.encode(Bench(wanted).run()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
