"""The snapshot server of one host: `python -m resilient_jax.snapshot.server`, started by the host's agent.

It owns the memory, so the snapshots outlive the worker; it ends with its agent, and then nothing of them is left.
"""

import concurrent.futures
import contextlib
import os
import sys
import traceback
from collections.abc import Callable

import msgspec

from resilient_jax.erasure import choose_checksum
from resilient_jax.erasure.kernels import choose_kernel
from resilient_jax.errors import ConfigError, ExitCode, ResilientJaxError
from resilient_jax.events import EventKind
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.failpoints import FailPoints
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout
from resilient_jax.snapshot.commit_votes import CommitVotes
from resilient_jax.snapshot.malloc_settings import keep_freed_memory
from resilient_jax.snapshot.manifest import PartContents
from resilient_jax.snapshot.messages import (
    NEW_WORKER_DECODER,
    SERVICE,
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
from resilient_jax.snapshot.service import SnapshotService
from resilient_jax.snapshot.slot_contents import SlotContents
from resilient_jax.snapshot.snapshot_slots import SnapshotSlots
from resilient_jax.snapshot.worker_session import WorkerSession
from resilient_jax.threads import start_thread_pool
from resilient_jax.transport import Credentials, SyncServer

GRPC_THREADS = 8
"""That answer other servers. No call waits for another, so more would only wait for the processor."""
MAX_WORKER_SESSIONS = 4
"""To workers that live or end. There is one at a time, but its line may end later than its process."""
MAX_EXCHANGES = 6
"""Of snapshots at once. Two have a slot; those that were given up may take a moment to notice."""
MAX_DROP_NOTICES = 4
"""That the root is told of at once. One that it does not hear is over with the generation, and so are the next."""
NICENESS = 5
"""Encoding gives way to training where both want a processor, but is not starved: others wait for the parity."""


class SnapshotServer:
    """Everything that lives as long as the process."""

    def __init__(self, settings: ServerSettings) -> None:
        credentials = Credentials.from_paths(settings.token, settings.tls)
        self._agent = Connection[ServerToAgent, NewWorker](settings.connection_fd, NEW_WORKER_DECODER)
        self._reporter = Notifier(settings.host, self._agent)
        kernel, checksum = choose_kernel(), choose_checksum()
        self._reporter.record_event(
            EventKind.SNAPSHOT_ERASURE_KERNEL,
            kernel=kernel.kernel.description,
            reason=kernel.reason,
            checksum=f"{checksum.name} of {checksum.library}",
        )
        self._slots = SnapshotSlots(settings.host, self._reporter)
        self._context = ExchangeContext(
            host=settings.host,
            slots=self._slots,
            votes=CommitVotes(),
            peers=PeerPool(credentials),
            kernel=kernel.kernel,
            checksum=checksum,
            listener=self._reporter,
            failpoints=FailPoints.from_environment(settings.host),
            encoders=start_thread_pool(MAX_EXCHANGES * CONCURRENT_PIECES, "rj-encode"),
        )
        self._reporter.list_statuses = self._slots.list_statuses
        self._reporter.on_dropped = self._tell_root
        self._grpc = SyncServer(
            f"{settings.address}:0",
            credentials=credentials,
            num_threads=GRPC_THREADS,
            on_event=lambda kind, detail: self._reporter.record_event(kind, None, **detail),
        )
        self._service = SnapshotService(self._context, settings.address, credentials)
        self._grpc.add(SERVICE, self._service.handlers)
        self._worker: WorkerSession | None = None
        # All threads run from the beginning: see `threads`.
        self._lines = start_thread_pool(MAX_WORKER_SESSIONS, "rj-snapshot-worker")
        self._exchanges = start_thread_pool(MAX_EXCHANGES, "rj-exchange")
        self._drops = start_thread_pool(MAX_DROP_NOTICES, "rj-drop")

    def run(self) -> None:
        """Serves until the agent's end of the socket pair is closed."""
        self._service.bulk.start()
        self._grpc.start()
        self._agent.send(ServerReady(endpoint=self._grpc.address))
        for received in self._agent:
            (descriptor,) = received.take_descriptors(1)
            self._serve_worker(Connection(descriptor, WORKER_REQUEST_DECODER))

    def _serve_worker(self, link: Connection[ServerReply | ServerNotification, WorkerRequest]) -> None:
        if self._worker is not None:
            self._worker.end()
        self._reporter.serve_worker(link)
        self._worker = WorkerSession(link, self._slots, self._reporter, self._exchange)
        _run_in(self._lines, self._serve_line, self._worker)

    def _serve_line(self, line: WorkerSession) -> None:
        """If it fails the worker would have no snapshots any more: this process ends, and the agent starts another."""
        try:
            line.serve()
        except BaseException:
            self._agent.shut_down()
            raise

    def _exchange(self, held: SlotContents, contents: PartContents) -> None:
        self._context.peers.keep_only(held.layout.server_endpoints.values())
        _run_in(self._exchanges, ParityExchange(held, contents, self._context).run)

    def _tell_root(self, id: SnapshotId, layout: SnapshotLayout, reason: str) -> None:
        _run_in(self._drops, report_drop_to_root, id, layout, reason, self._context)


def _run_in(pool: concurrent.futures.Executor, run: Callable[..., None], *arguments: object) -> None:
    pool.submit(run, *arguments).add_done_callback(_tell_failure)


def _tell_failure(done: concurrent.futures.Future[None]) -> None:
    """On standard error: nobody asks for what comes out."""
    if (error := done.exception()) is not None:
        traceback.print_exception(error)


def read_settings() -> ServerSettings:
    """From the environment.

    Raises:
        ConfigError: they are missing, or not as they should be.
    """
    try:
        return msgspec.json.decode(os.environ.get(SETTINGS_ENV_VARIABLE, ""), type=ServerSettings)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{SETTINGS_ENV_VARIABLE} does not hold the settings of a snapshot server ({error}); an agent starts it, "
            "nobody else"
        ) from error


def lower_priority() -> None:
    """Training goes first. A sandbox may forbid it: then it competes."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.nice(NICENESS)


def main() -> None:
    """The process."""
    lower_priority()
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
