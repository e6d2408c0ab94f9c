"""Children end with their parent, and take their own children with them."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys

from resilient_jax.cluster.child_process import SpawnedProcess, get_signal_name, open_line_reader
from tests.support.open_descriptors import count_descriptors, wait_for_descriptors
from tests.support.patience import patience
from tests.support.process_ends import is_gone, wait_gone

WAIT_S = patience(2)
SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
PARENT = """
import asyncio, sys
from resilient_jax.cluster.child_process import SpawnedProcess
async def main():
    child = SpawnedProcess([sys.executable, "-c", "import time; time.sleep(600)"], stdout=None)
    print(child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
WITH_GRANDCHILD = [
    sys.executable,
    "-c",
    "import subprocess, sys, time\n"
    "grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(grandchild.pid, flush=True)\n"
    "sys.stdin.read()\n",
]


def run(main):
    async def bounded():
        async with asyncio.timeout(patience(6)):
            await main()

    asyncio.run(bounded())


async def wait_until(is_true) -> None:
    while not is_true():  # noqa: ASYNC110 - the kernel sets no event
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(command, **options):
    """Run a child; yield it and the first line that it printed; end it and close its pipes."""
    child = SpawnedProcess(command, stderr=None, **options)
    lines = None
    try:
        assert child.stdout is not None
        lines, _ = await open_line_reader(child.stdout.fileno())
        child.stdout.close()
        yield child, (await asyncio.wait_for(lines.readline(), WAIT_S)).strip().decode()
    finally:
        await child.kill_and_wait()
        if child.stdin is not None:
            child.stdin.close()
        if lines is not None:
            await lines.read()


def test_a_child_dies_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not is_gone(pid)
        parent.kill()
    wait_gone(pid)


def test_a_killed_child_takes_its_group_with_it():
    async def main():
        async with running(WITH_GRANDCHILD, stdin=subprocess.PIPE) as (child, line):
            grandchild = int(line)
            assert not is_gone(grandchild)
            assert await child.kill_and_wait() == -signal.SIGKILL
            await asyncio.to_thread(wait_gone, grandchild)

    run(main)


def test_a_child_that_ends_by_itself_leaves_no_process_of_its_group_behind():
    async def main():
        async with running(WITH_GRANDCHILD, stdin=subprocess.PIPE) as (child, line):
            assert child.stdin is not None
            child.stdin.close()
            assert await child.wait_exited() == 0
            await asyncio.to_thread(wait_gone, int(line))

    run(main)


def test_the_exit_code_of_the_child_is_returned():
    async def main():
        async with running([sys.executable, "-c", "print('up'); raise SystemExit(7)"]) as (child, _):
            assert await child.wait_exited() == 7
            assert child.exit_code == 7
            child.kill()  # has no effect on a dead child

    run(main)


def test_a_stopped_child_is_distinguished_from_a_running_one():
    async def main():
        async with running(SLEEPER) as (child, _):
            assert not child.is_stopped()
            os.kill(child.pid, signal.SIGSTOP)
            await wait_until(child.is_stopped)
            os.kill(child.pid, signal.SIGCONT)
            await wait_until(lambda: not child.is_stopped())
            os.kill(child.pid, signal.SIGSTOP)
            await wait_until(child.is_stopped)
            assert await child.kill_and_wait() == -signal.SIGKILL
            assert not child.is_stopped()

    run(main)


def test_a_child_leaves_no_descriptor_behind():
    async def main():
        async with running(SLEEPER):
            pass
        before = count_descriptors()
        for _ in range(3):
            async with running(SLEEPER):
                pass
        await wait_for_descriptors(before)

    run(main)


def test_a_signal_without_a_name_is_said_by_its_number() -> None:
    assert (get_signal_name(signal.SIGKILL), get_signal_name(signal.SIGRTMIN + 5)) == ("SIGKILL", "signal 39")
