"""A process at its limit of open files reports it and continues, or leaves nothing behind."""

import asyncio
import contextlib
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resilient_jax.clock import SystemClock
from resilient_jax.cluster.child_process import ChildProcess, SpawnedProcess
from resilient_jax.cluster.worker_process import WorkerDescriptors, WorkerProcess, launch_script
from resilient_jax.errors import OutOfResources, PeerUnreachable
from resilient_jax.ids import GenerationNumber, HostName, Incarnation
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.snapshots import SnapshotId
from resilient_jax.protocol.worker_messages import WorkerSettings
from resilient_jax.snapshot.local_client import LocalServerClient
from resilient_jax.snapshot.messages import (
    WORKER_REQUEST_DECODER,
    AbandonSnapshot,
    BeginSnapshot,
    PartLocation,
    SlotInfo,
)
from resilient_jax.transport.credentials import Credentials
from resilient_jax.transport.server_address import bind_server
from tests.support.open_descriptors import free_descriptors
from tests.support.own_process import in_own_process
from tests.support.patience import patience, wait_until

ID = SnapshotId(step=1, generation=GenerationNumber(1))


@in_own_process
def test_a_worker_that_cannot_take_a_slot_gives_it_back_and_keeps_its_connection() -> None:
    ours, theirs = socket.socketpair()
    local, server = LocalServerClient(ours.detach()), Connection(theirs.detach(), WORKER_REQUEST_DECODER)
    memory = os.memfd_create("part")
    os.ftruncate(memory, 4096)

    def answer_begin() -> None:
        (asked,) = [request for request in requests() if isinstance(request, BeginSnapshot)]
        slot = SlotInfo(number=0, mapped_bytes=4096)
        server.send(PartLocation(request_id=asked.request_id, slot=slot, offset=0, part_bytes=8), [memory])

    def requests() -> list[object]:
        return [received.message for received in server.receive()]

    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        with free_descriptors(0):
            begun = pool.submit(local.begin, ID)
            answer_begin()
            with pytest.raises(PeerUnreachable, match="can open no more"):
                begun.result(patience(1))
        assert any(isinstance(request, AbandonSnapshot) for request in requests()), (
            "the slot waits for a worker"
        )
        begun = pool.submit(local.begin, ID)
        answer_begin()
        assert len(begun.result(patience(1))) == 8
    local.close()
    server.close()
    os.close(memory)


@in_own_process
def test_a_worker_that_cannot_be_started_leaves_nothing_behind() -> None:
    was_started = [asyncio.run(start_worker_with(free)) for free in range(20)]
    assert was_started == sorted(was_started), was_started
    assert set(was_started) == {False, True}


async def start_worker_with(free: int) -> bool:
    """Start a worker with so many free descriptors, and end it; return False if it could not be started."""
    ours, theirs = socket.socketpair()
    before = describe_descriptors()
    with ours:
        number = theirs.detach()
        settings = WorkerSettings(job="job", host=HostName("host-0"), address="127.0.0.1", token="token")

        async def launch(descriptors: WorkerDescriptors) -> ChildProcess:
            return launch_script(
                ["-c", "import time; time.sleep(60)"], dict(os.environ), settings, descriptors
            )

        try:
            with free_descriptors(free):
                worker = await WorkerProcess.start(
                    Incarnation(1), launch, SystemClock(), socket.socket(fileno=number)
                )
        except OSError:
            now = describe_descriptors()
            left = {number: target for number, target in now.items() if number not in before}
            assert left == {}, f"with {free} free descriptors, some were left behind"
            assert children() == []
            return False
        await worker.child.kill_and_wait()
        worker.child.close_pipes()
        worker._connection.close()
        os.close(worker._death_pipe)
        return True


def describe_descriptors() -> dict[int, str]:
    """Return what each open descriptor of this process refers to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def children() -> list[str]:
    """Return the children that this process has not reaped."""
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    return task.read_text().split()


def test_a_child_that_cannot_be_watched_is_ended() -> None:
    async def start() -> None:
        with pytest.MonkeyPatch.context() as patch:

            def refuse(pid: int, flags: int = 0) -> int:
                raise OSError(24, "Too many open files")

            patch.setattr(os, "pidfd_open", refuse)
            with pytest.raises(OSError, match="Too many open files"):
                SpawnedProcess([sys.executable, "-c", "import time; time.sleep(60)"])
        wait_until("the child's end", lambda: children() == [])

    asyncio.run(start())


@in_own_process
def test_a_server_that_gets_no_descriptor_says_what_to_raise() -> None:
    with (
        free_descriptors(0),
        pytest.raises(
            OutOfResources, match=r"cannot listen on 127.0.0.1:0: Too many open files; .*ulimit -n"
        ),
    ):
        bind_server("127.0.0.1:0", Credentials("token"), lambda address: 0, lambda address, tls: 0)
