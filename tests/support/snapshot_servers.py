"""Real snapshot servers as processes, the agent's side of their connections, and parts to fill them with."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from resilient_jax.erasure import Checksum, choose_checksum
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import GenerationNumber, HostName
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.snapshots import (
    ParityGroup,
    SnapshotId,
    SnapshotLayout,
    SnapshotPhase,
    SnapshotStatus,
)
from resilient_jax.snapshot.local_client import LocalServerClient
from resilient_jax.snapshot.manifest import PartContents, PartManifest, checksum_blocks
from resilient_jax.snapshot.messages import (
    READ,
    SERVER_TO_AGENT_DECODER,
    SERVICE,
    SETTINGS_ENV_VARIABLE,
    CompleteSnapshots,
    EventOccurred,
    NewWorker,
    ReadRequest,
    Region,
    ServerReady,
    ServerSettings,
    ServerToAgent,
)
from resilient_jax.snapshot.slot_contents import compute_slot_layout
from resilient_jax.transport import Credentials, PeerChannel
from tests.support.forge import share_forge
from tests.support.patience import patience

CREDENTIALS = Credentials("test-token")
WAIT_S = patience(9)
CHECKSUM: Checksum = choose_checksum()


SERVER = "resilient_jax.snapshot.server"


class Host:
    """The server process of one host, whose agent a test plays.

    Attributes:
        endpoint: of the server; empty until it listens.
        holding: the complete snapshots that the server reported last.
        events: all events that the server has reported.
    """

    def __init__(
        self,
        name: str,
        environment: Mapping[str, str] | None = None,
        call: Sequence[str] = (f"{SERVER}:main",),
    ) -> None:
        self.name = HostName(name)
        self.endpoint = ""
        self.holding: tuple[SnapshotStatus, ...] = ()
        self.events: list[Event] = []
        self.is_killed = False
        self.changed = threading.Condition()
        ours, theirs = socket.socketpair()
        self._link = Connection[NewWorker, ServerToAgent](ours.detach(), SERVER_TO_AGENT_DECODER)
        settings = ServerSettings(
            host=self.name, address="127.0.0.1", token=CREDENTIALS.token, connection_fd=theirs.fileno()
        )
        with theirs:
            self.process = share_forge(SERVER).start(
                *call,
                environment={
                    **(environment or {}),
                    SETTINGS_ENV_VARIABLE: msgspec.json.encode(settings).decode(),
                },
                has_pipes=False,
                pass_fds=(theirs.fileno(),),
            )
        self._workers: list[LocalServerClient] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def connect(self) -> socket.socket:
        """Return a new worker's end of a socket pair with the server."""
        self.wait(lambda: self.endpoint != "")
        ours, theirs = socket.socketpair()
        with ours:
            self._link.send(NewWorker(), [ours.fileno()])
        return theirs

    def worker(self) -> LocalServerClient:
        """Return the client of a new worker, which the test plays."""
        local = LocalServerClient(self.connect().detach())
        self._workers.append(local)
        return local

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until a message of the server makes the condition true."""
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S), (
                f"{self.name} (exit code {self.process.poll()}): {self.holding} {self.events}"
            )

    def wait_phase(self, id: SnapshotId, phase: SnapshotPhase) -> None:
        self.wait(lambda: self.phase_of(id) is phase)

    def wait_event(self, kind: EventKind, id: SnapshotId | None = None) -> Event:
        def found() -> list[Event]:
            steps = (None,) if id is None else (id.step,)
            return [e for e in self.events if e.kind is kind and (id is None or e.step in steps)]

        self.wait(lambda: bool(found()))
        return found()[0]

    def phase_of(self, id: SnapshotId) -> SnapshotPhase | None:
        return next((status.phase for status in self.holding if status.id == id), None)

    def read(self, id: SnapshotId, region: Region, length: int, *, row: int = 0, offset: int = 0) -> bytes:
        """Return verified bytes as another host receives them."""
        request = ReadRequest(id=id, region=region, row=row, offset=offset, length=length)
        out = bytearray(length)
        with contextlib.closing(PeerChannel(self.endpoint, CREDENTIALS, SERVICE)) as peer:
            peer.read_into(READ, request, memoryview(out), timeout_s=WAIT_S)
        return bytes(out)

    def kill(self) -> None:
        """Kill the server by SIGKILL, and wait for its end."""
        self.is_killed = True
        self.process.kill()
        self.process.wait(WAIT_S)

    def end(self) -> int:
        """Close the agent's connection, as when the agent ends; return the server's exit code."""
        for worker in self._workers:
            worker.close()
        self._link.shut_down()
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self._listener.join(WAIT_S)
            self._link.close()

    def _listen(self) -> None:
        for received in self._link:
            self._hear(received.message)

    def _hear(self, word: ServerToAgent) -> None:
        with self.changed:
            match word:
                case ServerReady():
                    self.endpoint = word.endpoint
                case CompleteSnapshots():
                    self.holding = word.snapshots
                case EventOccurred():
                    self.events.append(word.event)
            self.changed.notify_all()


@contextlib.contextmanager
def running(
    count: int, environment: Mapping[str, str] | None = None, call: Sequence[str] = (f"{SERVER}:main",)
) -> Iterator[list[Host]]:
    """Run the servers of hosts h0, h1, ...; check afterwards that each one not killed by the test exits with 0.

    Args:
        call: the function that is a server, and its arguments.
    """
    hosts = [Host(f"h{i}", environment, call) for i in range(count)]
    try:
        for host in hosts:
            host.wait(lambda host=host: host.endpoint != "")
        yield hosts
    finally:
        codes = {host.name: host.end() for host in hosts}
    assert {
        host.name: codes[host.name] for host in hosts if not host.is_killed and codes[host.name] != 0
    } == {}


def make_layout(
    hosts: Sequence[Host], parity: int, part_bytes: Sequence[int], generation: int = 1
) -> SnapshotLayout:
    """Return a layout with one group of all hosts; the first host is the root."""
    return SnapshotLayout(
        generation=GenerationNumber(generation),
        groups=(ParityGroup(hosts=tuple(host.name for host in hosts), parity=parity),),
        part_bytes={host.name: size for host, size in zip(hosts, part_bytes, strict=True)},
        server_endpoints={host.name: host.endpoint for host in hosts},
        root=hosts[0].name,
    )


def make_id(step: int, generation: int = 1) -> SnapshotId:
    return SnapshotId(step, GenerationNumber(generation))


def make_part(id: SnapshotId, host: HostName, length: int) -> bytes:
    """Return random bytes that are the same for the same arguments in every process."""
    return random.Random(f"{id} {host}").randbytes(length)


def make_manifest(
    layout: SnapshotLayout, id: SnapshotId, host: HostName, part: bytes | memoryview
) -> PartManifest:
    block_bytes = compute_slot_layout(layout, host).block_bytes
    return PartManifest(
        id=id,
        host=host,
        contents=PartContents(),
        part_bytes=len(part),
        checksum=CHECKSUM.name,
        block_bytes=block_bytes,
        block_checksums=checksum_blocks(part, CHECKSUM, block_bytes),
    )


def take(worker: LocalServerClient, id: SnapshotId, host: HostName, part: bytes) -> None:
    """Take one snapshot as a worker does."""
    worker.begin(id)[:] = part
    worker.finish(id, PartContents())
