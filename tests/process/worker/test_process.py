"""An agent that watches a worker leaves nothing open when it ends, and ends a worker that it cannot understand."""

import asyncio
import gc
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from resilient_jax.clock import SystemClock
from resilient_jax.cluster.child_process import SpawnedProcess
from resilient_jax.cluster.worker_output import WorkerOutput
from resilient_jax.cluster.worker_process import WorkerDescriptors, WorkerProcess
from resilient_jax.ids import HostName, Incarnation
from tests.support.patience import wait_until


@pytest.mark.parametrize("turns", range(7))
def test_a_watch_that_is_cancelled_at_any_moment_closes_all_that_it_opened(
    turns: int, tmp_path: Path
) -> None:
    """`turns` of the event loop after the watch began; what is left open is a ResourceWarning, and so an error."""

    async def run() -> None:
        snapshots, given = socket.socketpair()

        async def launch(_: object) -> SpawnedProcess:
            return SpawnedProcess(["sleep", "600"])

        with snapshots:
            worker = await WorkerProcess.start(Incarnation(1), launch, SystemClock(), given)
            output = WorkerOutput(HostName("host-0"), None, show_all=False, is_failing=lambda: False)
            watching = worker.watch_until_exit(output, 60.0, lambda: None, lambda message: None)
            for _ in range(turns):
                await asyncio.sleep(0)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await worker.child.kill_and_wait()

    gc.collect()  # of other tests
    before = set(os.listdir("/proc/self/fd"))
    asyncio.run(run())
    gc.collect()
    # Threads of other tests may have one open for a moment.
    wait_until("all are closed", lambda: set(os.listdir("/proc/self/fd")) <= before)


def test_a_worker_that_sends_what_cannot_be_read_is_ended(tmp_path: Path) -> None:
    """Nobody would read what it sends afterwards: it would wait, and seem to be stopped."""
    sends = "import os, sys, time; os.write(int(sys.argv[1]), b'\\0\\0\\0\\x02\\0\\xc1'); time.sleep(600)"

    async def run() -> int:
        snapshots, given = socket.socketpair()

        async def launch(theirs: WorkerDescriptors) -> SpawnedProcess:
            return SpawnedProcess([sys.executable, "-c", sends, str(theirs.agent)], pass_fds=(theirs.agent,))

        with snapshots:
            worker = await WorkerProcess.start(Incarnation(1), launch, SystemClock(), given)
            output = WorkerOutput(HostName("host-0"), None)
            return await worker.watch_until_exit(output, 60.0, lambda: None, lambda message: None)

    assert asyncio.run(run()) == -signal.SIGKILL
