"""Copies arrays into the memory of a host's part. The server computes its checksums later, off the training path.

The copy works in steps, each of which releases the GIL, and can be cancelled between two steps.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from resilient_jax.state.copy_sources import CopyTask
from resilient_jax.state.index_box import contiguous_runs

COPY_STEP_BYTES: Final = 2 * 2**20
"""Of one step: a core's share of the cache. With 256 KiB the overhead of the steps is an eighth of the time."""
UNSIGNED_DTYPES: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""By item size. numpy releases the GIL while it copies its own types, but not for bfloat16 and similar ones."""


def copy_into_part(
    part: memoryview, tasks: list[CopyTask], check_cancelled: Callable[[], None], num_threads: int = 1
) -> None:
    """Copy all slices into the part. Bytes between two slices keep their value.

    Args:
        part: memory of one dimension of bytes.
        tasks: tasks in order of their offsets; emptied on the way, so that copied arrays can be freed.
        check_cancelled: called between two steps by every thread; an exception that this call raises ends the copy.
        num_threads: threads that share the work.
    """
    stretches = _split_tasks(tasks, num_threads, len(part))
    tasks.clear()
    _run_all([functools.partial(_copy_all, part, stretch, check_cancelled) for stretch in stretches])


def _split_tasks(tasks: Sequence[CopyTask], threads: int, part_bytes: int) -> list[list[CopyTask]]:
    """Split the tasks into consecutive runs of about equally many bytes, one for each thread."""
    runs: list[list[CopyTask]] = [[] for _ in range(threads)]
    for task in tasks:
        runs[min(task.offset * threads // max(part_bytes, 1), threads - 1)].append(task)
    return [some for some in runs if some]


def _copy_all(part: memoryview, tasks: list[CopyTask], go_on: Callable[[], None]) -> None:
    """Copy the tasks of one thread, in order, and release each when it is copied."""
    tasks.reverse()
    while tasks:
        _copy(part, tasks.pop(), go_on)


def _copy(part: memoryview, task: CopyTask, go_on: Callable[[], None]) -> None:
    dtype = UNSIGNED_DTYPES.get(task.itemsize)
    for box, wanted, data in task.sources:
        # On CPU a view. Off an accelerator this waits for the transfer that `start_host_transfer` began.
        source = np.asarray(data)
        source = source.view(dtype) if dtype is not None else source
        target = np.ndarray(task.box.shape, source.dtype, part, task.offset)
        for run in contiguous_runs(wanted, task.itemsize, COPY_STEP_BYTES):
            go_on()
            # The ellipsis makes a view of a scalar, too.
            np.copyto(target[(*run.index_within(task.box), ...)], source[(*run.index_within(box), ...)])


def _run_all(jobs: Sequence[Callable[[], None]]) -> None:
    """Run the jobs on threads, the last one on this thread; wait for all and raise the first error."""
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
        errors.clear()  # otherwise error and frame refer to each other and keep the arrays alive
