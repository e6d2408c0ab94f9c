"""The thread of a worker that receives its agent's orders while the main thread trains, or waits in C++.

The guard executes at once all orders that need no main thread. When the main thread's generation has ended, the guard
breaks the main thread out of whatever it waits in, repeatedly, until the main thread reports idle.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from typing import Any, Final, Protocol

from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.jax_runtime.collective_thread import collective_thread
from resilient_jax.jax_runtime.compilation_state import is_compiling
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.worker_messages import (
    RESTART_EXIT_CODE,
    Heartbeat,
    HoldTraining,
    LeaseRenewed,
    TakeStacks,
    WorkerMessage,
    WorkerOrder,
)
from resilient_jax.protocol.worker_report import WorkerState, is_busy
from resilient_jax.worker import worker_protocol
from resilient_jax.worker.hang_detection import HangLimits
from resilient_jax.worker.hang_watch import HangWatch, OverdueReporter

ABORT_INTERVAL_S: Final = 0.02
"""A collective that begins after an abort opens or finds other sockets: so the abort is repeated until unwound."""
HEARTBEAT_INTERVAL_S: Final = 1.0
LEASE_CHECK_INTERVAL_S: Final = 0.125
"""Half of the longest delay until the guard notices that the host's lease expired without an order."""
AGENT_GONE_EXIT_CODE: Final = 71


class Interrupt(Protocol):
    """Breaks the main thread out of whatever C++ it waits in. Called again until the main thread has unwound."""

    def __call__(self) -> None:
        """End the waits that the main thread is in now; those that begin afterwards need another call."""
        ...


class OrderHandler(OverdueReporter, Protocol):
    """The receiver of the guard's orders, called by the guard thread; `AgentConnection` is one."""

    def handle_order(self, order: Any) -> None:  # noqa: ANN401 - any order but a lease
        """Handle an order of the agent."""
        ...


class GuardThread:
    """Receives orders until the agent is gone, which ends the process.

    Attributes:
        interruption: a lock held during an interruption. The main thread takes it to become idle: an interruption that
            is under way when the main thread has unwound must end before the next world's sockets exist, or would break
            those.
    """

    def __init__(
        self,
        host: HostName,
        connection: Connection[WorkerMessage, WorkerOrder],
        handler: OrderHandler,
        interrupt: Interrupt,
        limits: HangLimits,
    ) -> None:
        self.interruption = threading.Lock()
        self._host = host
        self._connection = connection
        self._handler = handler
        self._interrupt = interrupt
        self._watch = HangWatch(connection, handler, limits)
        self._lease_until_s = float("inf")  # until the first renewal
        self._thread = threading.Thread(target=self._run, name="resilient-jax-guard", daemon=True)

    def start(self) -> None:
        """Start the thread, which receives orders and sends heartbeats from now on."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._listen()
        except Exception:  # the guard must never die silently: without it no order reaches this process
            traceback.print_exc()
            os._exit(RESTART_EXIT_CODE)

    def _listen(self) -> None:
        heartbeat_at_s = time.monotonic()
        while True:
            wait_s = ABORT_INTERVAL_S if self._must_interrupt() else LEASE_CHECK_INTERVAL_S
            # A worker that gets little of a processor may read a renewal long after it was sent. What was sent before
            # this is read now; whether the lease has ended since is known only after the next look.
            looked_s = time.monotonic()
            try:
                orders = self._connection.receive(wait_s)
            except EOFError:
                # Without its agent the worker gets no more orders.
                sys.stderr.write(f"[{self._host}] the agent has ended; so does this worker\n")
                os._exit(AGENT_GONE_EXIT_CODE)
            for received in orders:
                if isinstance(received.message, LeaseRenewed):
                    self._lease_until_s = received.message.valid_until_s
                elif isinstance(received.message, TakeStacks):
                    # The order that follows, and unwinds the main thread, is not handled before.
                    self._watch.take_stacks(received.message.why)
                else:
                    self._handler.handle_order(received.message)
            self._hold_if_lease_expired(looked_s)
            if self._must_interrupt():
                self._interrupt_main_thread()
            self._watch.look()
            if time.monotonic() - heartbeat_at_s > HEARTBEAT_INTERVAL_S:
                heartbeat_at_s = time.monotonic()
                self._watch.feed_dump()
                send_unless_closed(self._connection, Heartbeat())

    def _must_interrupt(self) -> bool:
        """Return whether the main thread must unwind."""
        return is_busy(self._handler.state) and self._handler.is_interrupted

    def _hold_if_lease_expired(self, looked_s: float) -> None:
        """Pause training as if ordered to: a stopped agent cannot report that others count this host as dead.

        Args:
            looked_s: monotonic time until which all orders have been read.
        """
        is_training = self._handler.state is WorkerState.RUNNING and not self._handler.is_interrupted
        if is_training and looked_s > self._lease_until_s:
            self._handler.record_event(EventKind.STORE_LOST, why="the agent did not renew the lease in time")
            self._handler.handle_order(HoldTraining())

    def _interrupt_main_thread(self) -> None:
        with self.interruption:
            # Asked again under the lock: meanwhile the main thread may be idle,
            # and then the next sockets are the next world's.
            if self._must_interrupt():
                self._interrupt()
        is_compiling_now = is_compiling(threading.main_thread().ident) or collective_thread.is_compiling
        self._handler.report_found(worker_protocol.report_compiling, is_compiling_now)


def send_unless_closed(connection: Connection[WorkerMessage, WorkerOrder], message: WorkerMessage) -> None:
    """Send a message; drop it if the agent is gone, which ends this process soon anyway."""
    with contextlib.suppress(ConnectionError):
        connection.send(message)
