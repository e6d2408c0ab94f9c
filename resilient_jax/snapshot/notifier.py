"""Tells agent and worker what happens, in order, from a thread of its own: no lock is held while a socket is full."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from resilient_jax.events import Event, EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.snapshots import SnapshotId, SnapshotLayout, SnapshotStatus
from resilient_jax.snapshot.messages import (
    CompleteSnapshots,
    EventOccurred,
    NewWorker,
    ServerNotification,
    ServerReply,
    ServerToAgent,
    WorkerRequest,
)

RETRY_INTERVAL_S: Final = 0.1
"""Between two tries to tell something."""


class Notifier:
    """An arena's listener.

    Attributes:
        statuses: what the arena holds, when it is asked; set before the first change.
        on_dropped: has the root told of a drop; must return at once. Set before the first one.
    """

    def __init__(self, host: HostName, agent: Connection[ServerToAgent, NewWorker]) -> None:
        self.list_statuses: Callable[[], tuple[SnapshotStatus, ...]] = tuple
        self.on_dropped: Callable[[SnapshotId, SnapshotLayout, str], None] = lambda id, layout, reason: None
        self._host = host
        self._agent = agent
        self._worker: Connection[ServerReply | ServerNotification, WorkerRequest] | None = None
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._tell, name="rj-snapshot-reports", daemon=True).start()

    def record_event(
        self, kind: EventKind, id: SnapshotId | None = None, **detail: str | float | bool
    ) -> None:
        """Send the agent an event for the host's log."""
        event = Event(
            kind=kind,
            host=self._host,
            monotonic_s=time.monotonic(),
            wall_s=time.time(),
            generation=id.generation if id is not None else None,
            step=id.step if id is not None else None,
            detail=dict(detail),
        )
        self._waiting.put(lambda: self._agent.send(EventOccurred(event=event)))

    def notify_agent(self) -> None:
        """Send the agent the snapshots that are complete now."""
        # Asked for when it is sent: so the last one sent is the newest.
        self._waiting.put(lambda: self._agent.send(CompleteSnapshots(snapshots=self.list_statuses())))

    def notify_worker(self, notice: ServerNotification) -> None:
        """Send the current worker a notification."""
        self._waiting.put(lambda: self._send_worker(notice))

    def notify_root(self, id: SnapshotId, layout: SnapshotLayout, reason: str) -> None:
        """Have the root learn that this host dropped a snapshot."""
        self.on_dropped(id, layout, reason)

    def serve_worker(self, worker: Connection[ServerReply | ServerNotification, WorkerRequest]) -> None:
        """Notices go there from now on."""
        self._waiting.put(lambda: setattr(self, "_worker", worker))

    def _send_worker(self, notice: ServerNotification) -> None:
        if self._worker is not None:
            with contextlib.suppress(OSError):  # it is dead, which its line tells
                self._worker.send(notice)

    def _tell(self) -> None:
        while True:
            send = self._waiting.get()
            try:
                self._send_patiently(send)
            except OSError:  # nobody decides for this process any more: the main thread ends it
                self._agent.shut_down()
                return

    def _send_patiently(self, send: Callable[[], None]) -> None:
        """What is never told is decided wrongly: a shortage of memory is waited out."""
        while True:
            try:
                return send()
            except MemoryError:
                time.sleep(RETRY_INTERVAL_S)
