"""A host's part: pieces copied into it one after the other, each block checksummed while it lies in the cache.

The copy works in steps and lets go of Python's lock in each; between two steps it can be stopped.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from resilient_jax.erasure import Checksum
from resilient_jax.snapshot.manifest import BLOCK_BYTES, block_count
from resilient_jax.training.snapshots.boxes import Box, intersect, runs
from resilient_jax.training.snapshots.sources import Task

COPY_BYTES: Final = 2 * 2**20
"""Of one step: a core's share of the cache. With 256 KiB the steps themselves are an eighth of the time."""
RAW: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""By item size. numpy copies its own types without Python's lock; bfloat16 and its kin, which are not, with it."""


def fill(
    part: memoryview, tasks: list[Task], checksum: Checksum, go_on: Callable[[], None], threads: int = 1
) -> tuple[int, ...]:
    """Copies all pieces and gives the checksum of every block of the part.

    Bytes between two pieces stay as they are and are checksummed, too.

    Args:
        part: the memory, one dimension of bytes.
        tasks: in order of their offsets; emptied on the way, so that what is copied can be freed.
        checksum: of the blocks.
        go_on: called between two steps by every thread; what it raises ends the copy.
        threads: that share the work.
    """
    blocks: list[int | None] = [None] * block_count(len(part), BLOCK_BYTES)
    stretches = _deal(tasks, threads, len(part))
    tasks.clear()
    _run_all([_Stretch(part, *stretch, blocks, checksum, go_on) for stretch in stretches])
    return tuple(
        # A block that two threads share is left over by both.
        checksum.compute(part[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]) if known is None else known
        for index, known in enumerate(blocks)
    )


def _deal(tasks: Sequence[Task], threads: int, part_bytes: int) -> list[tuple[list[Task], int, int]]:
    """Consecutive tasks for each thread, about equally many bytes, and the range of the part that they are in."""
    dealt: list[list[Task]] = [[] for _ in range(threads)]
    for task in tasks:
        dealt[min(task.offset * threads // max(part_bytes, 1), threads - 1)].append(task)
    dealt = [some for some in dealt if some]
    starts = [0, *(some[0].offset for some in dealt[1:]), part_bytes]
    return [(some, starts[i], starts[i + 1]) for i, some in enumerate(dealt)]


class _Stretch:
    """What one thread does."""

    def __init__(
        self,
        part: memoryview,
        tasks: list[Task],
        start: int,
        stop: int,
        blocks: list[int | None],
        checksum: Checksum,
        go_on: Callable[[], None],
    ) -> None:
        self._part = part
        self._tasks = tasks
        self._stop = stop
        self._blocks = blocks
        self._checksum = checksum
        self._go_on = go_on
        self._next_block = -(-start // BLOCK_BYTES)

    def __call__(self) -> None:
        self._tasks.reverse()
        while self._tasks:
            self._copy(self._tasks.pop())
        self._checksum_up_to(self._stop)

    def _copy(self, task: Task) -> None:
        dtype = RAW.get(task.itemsize)
        held = [(source.box, np.asarray(source.data)) for source in task.sources]
        held = [(box, array.view(dtype) if dtype is not None else array) for box, array in held]
        target = np.ndarray(task.box.shape, held[0][1].dtype, self._part, task.offset)
        end = task.offset
        for run in runs(task.box, task.itemsize, COPY_BYTES):
            self._go_on()
            _copy_run(run, task.box, target, held)
            end += run.size * task.itemsize
            self._checksum_up_to(end)

    def _checksum_up_to(self, end: int) -> None:
        """Of blocks whose bytes are all there. The part's last one ends with it."""
        last = len(self._part)
        while (stop := min((self._next_block + 1) * BLOCK_BYTES, last)) <= end:
            start = self._next_block * BLOCK_BYTES
            if start >= stop:
                return
            self._blocks[self._next_block] = self._checksum.compute(self._part[start:stop])
            self._next_block += 1


def _copy_run(run: Box, outer: Box, target: np.ndarray, held: list[tuple[Box, np.ndarray]]) -> None:
    for box, array in held:
        both = intersect(run, box)
        if both is not None:
            # The ellipsis makes a view of a scalar, too.
            np.copyto(target[(*both.within(outer), ...)], array[(*both.within(box), ...)])


def _run_all(jobs: Sequence[Callable[[], None]]) -> None:
    """The last one on this thread. Waits for all; raises the first error."""
    errors: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # raised again on the thread that waits
            errors.append(error)

    others = [
        threading.Thread(target=run, args=(job,), name="resilient-jax-snapshot-copy", daemon=True)
        for job in jobs[:-1]
    ]
    for thread in others:
        thread.start()
    for job in jobs[-1:]:
        run(job)
    for thread in others:
        thread.join()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # else the error holds this frame, this frame the error, and both the arrays
