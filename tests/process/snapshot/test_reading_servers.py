"""The reader against real snapshot servers: processes that encode their parity, some of which are killed."""

import contextlib
import random
import socket
from collections.abc import Iterator
from itertools import combinations

import msgspec
import pytest

from resilient_jax.errors import SnapshotLost
from resilient_jax.events import EventKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout, SnapshotPlan, SnapshotSource
from resilient_jax.snapshot.local_client import LocalServerClient
from resilient_jax.snapshot.manifest import PartContents
from resilient_jax.snapshot.messages import (
    SERVER_TO_AGENT_DECODER,
    SETTINGS_ENV_VARIABLE,
    NewWorker,
    ServerReady,
    ServerSettings,
    ServerToAgent,
)
from resilient_jax.snapshot.parity_groups import form_parity_groups
from resilient_jax.snapshot.snapshot_reader import PartRead, SnapshotReader
from resilient_jax.transport import Credentials
from tests.support.forge import share_forge
from tests.support.patience import patience
from tests.support.snapshot_servers import SERVER

TOKEN = "test-token"
ID = SnapshotId(7, GenerationNumber(2))
WAIT_S = patience(12)
HOSTS = [HostName(name) for name in "abcde"]
LENGTHS = [3 * 2**20 + 17, 2**20, 0, 4 * 2**20 - 64, 3 * 2**20]


class RunningHost:
    """A server process, and its connections to agent and worker, which the test plays."""

    def __init__(self, host: HostName) -> None:
        ours, theirs = socket.socketpair()
        settings = ServerSettings(host=host, address="127.0.0.1", token=TOKEN, connection_fd=theirs.fileno())
        self.process = share_forge(SERVER).start(
            f"{SERVER}:main",
            environment={SETTINGS_ENV_VARIABLE: msgspec.json.encode(settings).decode()},
            has_pipes=False,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.link = Connection[NewWorker, ServerToAgent](ours.detach(), SERVER_TO_AGENT_DECODER)
        self.endpoint = self._wait_serving()
        mine, servers = socket.socketpair()
        self.link.send(NewWorker(), [servers.fileno()])
        servers.close()
        self.local = LocalServerClient(mine.detach())

    def _wait_serving(self) -> str:
        for received in self.link:
            if isinstance(received.message, ServerReady):
                return received.message.endpoint
        raise AssertionError("the server ended before it served")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def close(self) -> None:
        self.local.close()
        self.link.close()
        self.process.wait(WAIT_S)


@pytest.fixture
def hosts() -> Iterator[dict[HostName, RunningHost]]:
    with contextlib.ExitStack() as stack:
        running = {}
        for host in HOSTS:
            running[host] = RunningHost(host)
            stack.callback(running[host].close)
        yield running


def take(hosts: dict[HostName, RunningHost], parity: int) -> tuple[SnapshotPlan, dict[HostName, bytes]]:
    """Take a snapshot of random parts as a job does; return its plan and the parts once it is committed."""
    rng = random.Random(1)
    parts = {host: rng.randbytes(length) for host, length in zip(HOSTS, LENGTHS, strict=True)}
    layout = SnapshotLayout(
        generation=ID.generation,
        groups=form_parity_groups(HOSTS, parity),
        part_bytes={host: len(part) for host, part in parts.items()},
        server_endpoints={host: running.endpoint for host, running in hosts.items()},
        root=HOSTS[0],
    )
    for running in hosts.values():
        running.local.open_layout(layout)
    for host, running in hosts.items():
        with running.local.begin(ID) as view:
            view[:] = parts[host]
        running.local.finish(ID, PartContents())
    for running in hosts.values():
        assert running.local.wait_committed(ID, WAIT_S)
    sources = tuple(SnapshotSource(host=host, endpoint=running.endpoint) for host, running in hosts.items())
    return SnapshotPlan(id=ID, groups=layout.groups, sources=sources), parts


def reader_for(plan: SnapshotPlan, host: HostName, running: RunningHost, notes: list) -> SnapshotReader:
    return SnapshotReader(
        plan,
        host,
        running.local,
        Credentials(TOKEN),
        check=lambda: None,
        record_event=lambda kind, **detail: notes.append((kind, detail)),
    )


def test_the_parts_of_any_two_hosts_are_decoded_from_the_parity_of_real_servers(hosts):
    plan, parts = take(hosts, 2)
    for lost in combinations(HOSTS[1:], 2):  # absent from the plan, so they get no requests
        left = tuple(source for source in plan.sources if source.host not in lost)
        reader = reader_for(
            SnapshotPlan(id=ID, groups=plan.groups, sources=left), HOSTS[0], hosts[HOSTS[0]], []
        )
        with contextlib.closing(reader):
            for host, part in parts.items():
                target = bytearray(len(part))
                reader.read_all([PartRead(host, 0, memoryview(target))])
                assert target == part
            assert reader.bytes_local == len(parts[HOSTS[0]])
            assert reader.bytes_decoded == sum(len(parts[host]) for host in lost)


def test_parts_of_servers_killed_during_a_read_are_decoded_until_too_many_are_lost(hosts):
    plan, parts = take(hosts, 2)
    notes: list = []
    reader = reader_for(plan, HOSTS[0], hosts[HOSTS[0]], notes)
    with contextlib.closing(reader):
        assert set(reader.read_manifests()) == set(HOSTS)
        for victim in ("b", "d"):
            hosts[HostName(victim)].kill()
        for host, part in parts.items():
            target = bytearray(max(0, len(part) - 200))
            reader.read_all([PartRead(host, 100 if target else 0, memoryview(target))])
            assert target == part[100 : 100 + len(target)]
        assert reader.bytes_decoded == len(parts[HostName("b")]) + len(parts[HostName("d")]) - 400
    failed = {detail["source"] for kind, detail in notes if kind is EventKind.SNAPSHOT_SOURCE_FAILED}
    assert failed == {"b", "d"}
    hosts[HostName("e")].kill()
    reader = reader_for(plan, HOSTS[0], hosts[HOSTS[0]], [])
    with contextlib.closing(reader), pytest.raises(SnapshotLost, match=r"step 7 .*no process listens there"):
        reader.read_all([PartRead(HostName("d"), 0, memoryview(bytearray(10)))])
