"""The snapshot server of one host: `python -m resilient_jax.snapshot.server`, started by the host's agent.

The server owns the memory, so snapshots outlive the worker. It ends with its agent, which frees all snapshots.
"""

import concurrent.futures
import os
import sys
import traceback
from collections.abc import Callable

from resilient_jax.erasure import choose_checksum
from resilient_jax.erasure.kernels import choose_kernel
from resilient_jax.errors import ConfigError, ExitCode, MessageError, ResilientJaxError
from resilient_jax.events import EventKind
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.failpoints import FailPoints
from resilient_jax.protocol.message_decoding import decode_message
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout
from resilient_jax.snapshot.commit_votes import CommitVotes
from resilient_jax.snapshot.malloc_settings import keep_freed_memory
from resilient_jax.snapshot.manifest import PartContents
from resilient_jax.snapshot.messages import (
    NEW_WORKER_DECODER,
    SERVICE,
    SETTINGS_DECODER,
    SETTINGS_ENV_VARIABLE,
    WORKER_REQUEST_DECODER,
    NewWorker,
    ServerNotification,
    ServerReady,
    ServerReply,
    ServerSettings,
    ServerToAgent,
    WorkerRequest,
)
from resilient_jax.snapshot.notifier import Notifier
from resilient_jax.snapshot.parity_exchange import (
    CONCURRENT_PIECES,
    ExchangeContext,
    ParityExchange,
    report_drop_to_root,
)
from resilient_jax.snapshot.peer_pool import PeerPool
from resilient_jax.snapshot.process_priority import lower_priority
from resilient_jax.snapshot.service import SnapshotService
from resilient_jax.snapshot.slot_contents import SlotContents
from resilient_jax.snapshot.snapshot_slots import SnapshotSlots
from resilient_jax.snapshot.worker_session import WorkerSession
from resilient_jax.threads import start_thread_pool
from resilient_jax.transport import Credentials, PeerServer

MAX_WORKER_SESSIONS = 4
"""There is one worker at a time, but its session may end later than its process."""
MAX_EXCHANGES = 6
"""Exchanges at once. Two snapshots have a slot; the exchanges of dropped ones may take a moment to notice."""
MAX_DROP_NOTICES = 4
"""Reports of drops to the root at once. A report that does not reach the root ends with its generation."""


class SnapshotServer:
    """The slots, services and threads of a server process."""

    def __init__(self, settings: ServerSettings) -> None:
        credentials = Credentials.from_paths(settings.token, settings.tls)
        self._agent = Connection[ServerToAgent, NewWorker](settings.connection_fd, NEW_WORKER_DECODER)
        self._notifier = Notifier(settings.host, self._agent)
        kernel, checksum = choose_kernel(), choose_checksum()
        self._notifier.record_event(
            EventKind.SNAPSHOT_ERASURE_KERNEL,
            kernel=kernel.kernel.description,
            reason=kernel.reason,
            checksum=f"{checksum.name} of {checksum.library}",
        )
        self._slots = SnapshotSlots(settings.host, self._notifier)
        self._context = ExchangeContext(
            host=settings.host,
            slots=self._slots,
            votes=CommitVotes(),
            peers=PeerPool(credentials),
            kernel=kernel.kernel,
            checksum=checksum,
            listener=self._notifier,
            failpoints=FailPoints.from_environment(settings.host),
            encoders=start_thread_pool(MAX_EXCHANGES * CONCURRENT_PIECES, "rj-encode"),
        )
        self._notifier.list_statuses = self._slots.list_statuses
        self._notifier.on_dropped = self._report_drop
        self._worker: WorkerSession | None = None
        # All threads are started now: see `threads`.
        self._sessions = start_thread_pool(MAX_WORKER_SESSIONS, "rj-snapshot-worker")
        self._exchanges = start_thread_pool(MAX_EXCHANGES, "rj-exchange")
        self._drops = start_thread_pool(MAX_DROP_NOTICES, "rj-drop")
        self._peers = PeerServer(
            settings.address,
            credentials,
            {SERVICE: SnapshotService(self._context).make_call_service()},
            name="rj-snapshot",
            on_event=lambda kind, detail: self._notifier.record_event(kind, None, **detail),
        )

    def run(self) -> None:
        """Serve until the agent's end of the socket pair is closed."""
        self._agent.send(ServerReady(endpoint=self._peers.address))
        for received in self._agent:
            (descriptor,) = received.take_descriptors(1)
            self._serve_worker(Connection(descriptor, WORKER_REQUEST_DECODER))

    def _serve_worker(self, connection: Connection[ServerReply | ServerNotification, WorkerRequest]) -> None:
        if self._worker is not None:
            # Before the next worker is served: what this one has not finished blocks a slot.
            self._worker.end()
        self._notifier.serve_worker(connection)
        self._worker = WorkerSession(connection, self._slots, self._notifier, self._exchange)
        _run_in(self._sessions, self._serve_session, self._worker)

    def _serve_session(self, session: WorkerSession) -> None:
        """Serve a worker. If that fails, end this process, so that the agent starts another one."""
        try:
            session.serve()
        except BaseException:
            self._agent.shut_down()
            raise

    def _exchange(self, snapshot: SlotContents, contents: PartContents) -> None:
        self._context.peers.keep_only(snapshot.layout.server_endpoints.values())
        _run_in(self._exchanges, ParityExchange(snapshot, contents, self._context).run)

    def _report_drop(self, id: SnapshotId, layout: SnapshotLayout, reason: str) -> None:
        _run_in(self._drops, report_drop_to_root, id, layout, reason, self._context)


def _run_in(pool: concurrent.futures.Executor, run: Callable[..., None], *arguments: object) -> None:
    pool.submit(run, *arguments).add_done_callback(_print_failure)


def _print_failure(done: concurrent.futures.Future[None]) -> None:
    """Print an error of a thread on standard error, since no caller reads its result."""
    if (error := done.exception()) is not None:
        traceback.print_exception(error)


def read_settings() -> ServerSettings:
    """Return the settings that the agent put into the environment.

    Raises:
        ConfigError: the settings are missing or invalid.
    """
    try:
        encoded = os.environ.get(SETTINGS_ENV_VARIABLE, "").encode("utf-8", "surrogateescape")
        return decode_message(SETTINGS_DECODER, encoded, f"the environment variable {SETTINGS_ENV_VARIABLE}")
    except MessageError as error:
        raise ConfigError(f"{error}. Only an agent starts a snapshot server, and sets it") from error


def main() -> None:
    """Run the server process, and exit at its end without waiting for other threads."""
    lower_priority(os.getpid())
    keep_freed_memory()
    code = ExitCode.DONE
    try:
        SnapshotServer(read_settings()).run()
    except ResilientJaxError as error:
        sys.stderr.write(f"snapshot server: {error}\n")
        code = error.exit_code
    except Exception:  # the process boundary
        traceback.print_exc()
        code = ExitCode.INTERNAL_ERROR
    sys.stderr.flush()
    os._exit(code)  # at once: threads that wait for other hosts must not keep the memory


if __name__ == "__main__":
    main()
