"""Whether the agent lives that has a host's name: a real one is asked, in each state that it can be in."""

import asyncio
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from resilient_jax.cluster.name_holder import NameHolder, ask_name_holder
from resilient_jax.cluster.stored_records import decode_record
from resilient_jax.ids import HostName, JobName
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.protocol.store_keys import make_host_key
from resilient_jax.store.remote import RemoteStore
from resilient_jax.transport.credentials import Credentials
from tests.benchmarks.paths import JOBS
from tests.support.agents import TOKEN, HandStartedAgent, served_store
from tests.support.patience import wait_until

JOB, HOST = JobName("names"), HostName("host-a")
CREDENTIALS = Credentials(TOKEN)


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with served_store() as address:
        yield address


def start_agent(store: str, work: Path, out: str) -> HandStartedAgent:
    (work / "job.toml").write_text("lease_ttl_s = 60.0\n")
    options = ["--store", store, "--job", JOB, "--host-name", HOST, "--run-dir", str(work / HOST)]
    script = str(JOBS / "control_stub_worker.py")
    return HandStartedAgent([*options, "--no-zygote", "--config", str(work / "job.toml"), script], work / out)


def read_status(address: str) -> HostStatus | None:
    async def read() -> HostStatus | None:
        async with RemoteStore(address, CREDENTIALS) as store:
            found = await store.get(make_host_key(JOB, HOST))
            return decode_record(found, HostStatus) if found is not None else None

    return asyncio.run(read())


def wait_registered(store: str, agent: HandStartedAgent) -> HostStatus:
    def is_registered() -> bool:
        status = read_status(store)
        return status is not None and status.agent.pid == agent.process.pid

    wait_until("the agent's registration", is_registered)
    status = read_status(store)
    assert status is not None
    return status


def ask(status: HostStatus) -> NameHolder:
    return asyncio.run(ask_name_holder(status, CREDENTIALS))


def test_a_restarted_agent_takes_the_name_of_its_ghost_while_the_lease_lasts(
    store: str, tmp_path: Path
) -> None:
    with start_agent(store, tmp_path, "first") as first:
        before = wait_registered(store, first)
        assert ask(before) is NameHolder.ALIVE
        assert ask(change_fields(before, id="another")) is NameHolder.GONE
        first.process.send_signal(signal.SIGSTOP)
        assert ask(before) is NameHolder.SILENT
        first.process.send_signal(signal.SIGCONT)
    assert ask(before) is NameHolder.GONE
    with start_agent(store, tmp_path, "second") as second:  # the lease of the first lasts a minute
        after = wait_registered(store, second)
        assert second.interrupt() == 130
    assert after.agent.id != before.agent.id


def test_a_port_that_is_taken_by_a_stranger_answers_nothing(store: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        status = msgspec.convert(
            {
                "host": HOST,
                "agent": {
                    "id": "a",
                    "pid": 1,
                    "address": "127.0.0.1",
                    "port": port,
                    "versions": {"python": "3", "resilient_jax": "1", "jax": "1", "jaxlib": "1"},
                },
            },
            HostStatus,
        )
        assert ask(status) is NameHolder.SILENT
    assert ask(change_fields(status, port=0)) is NameHolder.SILENT
