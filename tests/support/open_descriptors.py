"""Whether a test leaves descriptors behind, in a process that runs other tests, too."""

import asyncio
import contextlib
import gc
import os
import resource
from collections.abc import Iterator

from tests.support.own_process import is_run_by_pytest
from tests.support.patience import Deadline, patience

WAIT_S = patience(3)


def count_descriptors() -> int:
    """Return how many descriptors this process has open, without those that only wait for the garbage collector."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def wait_for_descriptors(most: int) -> None:
    """Wait until no more than `most` descriptors are open.

    Nothing tells it: transports close theirs in later turns of the loop, and a thread that an earlier test left may
    have one open for a moment.

    Raises:
        AssertionError: more stay open; their targets are named.
    """
    deadline = Deadline(WAIT_S)
    while (found := count_descriptors()) > most:
        assert deadline.find_rest_s() > 0, f"{found} descriptors, expected {most}: {list_targets()}"
        await asyncio.sleep(0.01)


def list_targets() -> list[str]:
    """Return what this process's descriptors are open on."""
    targets = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            targets.append(os.readlink(f"/proc/self/fd/{number}"))
    return targets


@contextlib.contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Let this process open only `count` more descriptors.

    In a process that runs other tests, a thread of theirs may close one meanwhile, and there would be more.
    """
    assert not is_run_by_pytest(), "this test needs @in_own_process"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    used = set(map(int, os.listdir("/proc/self/fd"))) - {probe}
    limit = probe
    while count > 0 or limit in used:
        count -= limit not in used
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
