"""What the words of `resilient-jax hosts` mean, and what it prints."""

import asyncio
from pathlib import Path

import pytest

from resilient_jax.cli.hosts import HostOrder, describe_quarantine, parse_order
from resilient_jax.cluster.quarantine import clear_quarantine, read_quarantine, write_quarantine
from resilient_jax.errors import CallerError
from resilient_jax.ids import HostName, JobName
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord, QuarantineRecord
from resilient_jax.store.memory import MemoryStore

JOB = JobName("lm")
RECORD = QuarantineRecord(
    host=HostName("host-2"), reason="the worker died 6 times", since_wall_s=100.0, until_wall_s=3700.0
)


def test_a_run_folder_comes_first_unless_the_job_is_named_by_its_store() -> None:
    clear = HostOrder(run_directory=Path("runs/a"), action="clear", host="host-2")
    assert parse_order(["runs/a", "clear", "host-2"], has_folder=True) == clear
    assert parse_order(["list"], has_folder=False) == HostOrder(run_directory=None, action="list", host="")


@pytest.mark.parametrize("words", [["runs/a"], ["runs/a", "clear"], ["runs/a", "list", "x"], ["runs/a", "x"]])
def test_other_words_are_refused(words: list[str]) -> None:
    with pytest.raises(CallerError, match="expected RUN_DIR and one of: list, clear HOST"):
        parse_order(words, has_folder=True)


def test_a_list_says_how_long_and_why() -> None:
    assert describe_quarantine([RECORD], 160.0) == "host-2: for 3540 s more: the worker died 6 times"
    assert describe_quarantine([], 160.0) == "no host or device is in quarantine"


def test_a_device_is_named_by_its_host_and_number() -> None:
    drain = HostOrder(run_directory=None, action="drain", host="host-2", device=7)
    assert parse_order(["drain", "host-2:7"], has_folder=False) == drain
    with pytest.raises(CallerError, match="found 'host-2:x', expected HOST, or HOST:DEVICE with the number"):
        parse_order(["drain", "host-2:x"], has_folder=False)
    device = DeviceQuarantineRecord(
        host=HostName("host-2"), device=7, reason="XID 79", since_wall_s=100.0, until_wall_s=3700.0
    )
    assert describe_quarantine([], 160.0, [device]) == "host-2:7: for 3540 s more: XID 79"


def test_a_quarantine_is_written_read_and_cleared_once() -> None:
    async def write_and_clear() -> None:
        store = MemoryStore()
        assert await write_quarantine(store, JOB, RECORD)
        assert await read_quarantine(store, JOB) == (RECORD,)
        assert await clear_quarantine(store, JOB, HostName("host-2"))
        assert not await clear_quarantine(store, JOB, HostName("host-2"))
        assert await read_quarantine(store, JOB) == ()

    asyncio.run(write_and_clear())
