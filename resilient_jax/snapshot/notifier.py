"""Sends events and notifications to agent and worker, in order.

They are sent on a thread of their own, so that no lock is held while a socket's buffer is full.
"""

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
"""Between two attempts to send a message while memory is short."""


class Notifier:
    """Receives what changes in the snapshot slots.

    Most calls come with the lock of `SnapshotSlots` held, so each returns at once and calls nothing back.

    Attributes:
        list_statuses: returns the complete snapshots; to be set before the first change.
        on_dropped: starts a report to the root and returns at once; to be set before the first drop.
    """

    def __init__(self, host: HostName, agent: Connection[ServerToAgent, NewWorker]) -> None:
        self.list_statuses: Callable[[], tuple[SnapshotStatus, ...]] = tuple
        self.on_dropped: Callable[[SnapshotId, SnapshotLayout, str], None] = lambda id, layout, reason: None
        self._host = host
        self._agent = agent
        self._worker: Connection[ServerReply | ServerNotification, WorkerRequest] | None = None
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._send_all, name="rj-snapshot-reports", daemon=True).start()

    def record_event(
        self, kind: EventKind, id: SnapshotId | None = None, **detail: str | float | bool
    ) -> None:
        """Send the agent an event for the host's log, of a snapshot if `id` is given."""
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
        # The list is made when it is sent, so the last one sent is the newest.
        self._waiting.put(lambda: self._agent.send(CompleteSnapshots(snapshots=self.list_statuses())))

    def notify_worker(self, notice: ServerNotification) -> None:
        """Send the current worker a notification."""
        self._waiting.put(lambda: self._send_worker(notice))

    def notify_root(self, id: SnapshotId, layout: SnapshotLayout, reason: str) -> None:
        """Start a report to the root that this host dropped a snapshot."""
        self.on_dropped(id, layout, reason)

    def serve_worker(self, worker: Connection[ServerReply | ServerNotification, WorkerRequest]) -> None:
        """Send notifications to this worker from now on."""
        # Through the queue: notices that were put there before are for the worker before.
        self._waiting.put(lambda: setattr(self, "_worker", worker))

    def _send_worker(self, notice: ServerNotification) -> None:
        if self._worker is not None:
            with contextlib.suppress(OSError):  # the worker died, which its session notices
                self._worker.send(notice)

    def _send_all(self) -> None:
        while True:
            send = self._waiting.get()
            try:
                self._send_patiently(send)
            except OSError:  # the agent is gone: the main thread ends this process
                self._agent.shut_down()
                return

    def _send_patiently(self, send: Callable[[], None]) -> None:
        """Send a message, retrying while memory is short: without the message the receiver would decide wrongly."""
        while True:
            try:
                return send()
            except MemoryError:
                time.sleep(RETRY_INTERVAL_S)
