"""The reports of a snapshot server to its agent, over a real socket pair."""

import socket

from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.connection import Connection
from resilient_jax.snapshot.messages import (
    NEW_WORKER_DECODER,
    SERVER_TO_AGENT_DECODER,
    CompleteSnapshots,
    EventOccurred,
)
from resilient_jax.snapshot.notifier import Notifier


def test_messages_are_sent_in_order_once_memory_is_available_again():
    """Without the message an agent would decide by an outdated report."""
    ours, theirs = socket.socketpair()
    agent, shortages = Connection(ours.detach(), SERVER_TO_AGENT_DECODER), [MemoryError(), MemoryError()]
    reporter = Notifier(HostName("a"), Connection(theirs.detach(), NEW_WORKER_DECODER))

    def statuses():
        if shortages:
            raise shortages.pop()
        return ()

    reporter.list_statuses = statuses
    reporter.notify_agent()
    reporter.record_event(EventKind.SNAPSHOT_ERASURE_KERNEL)
    told = []
    while len(told) < 2:
        told += [received.message for received in agent.receive()]
    assert isinstance(told[0], CompleteSnapshots)
    assert isinstance(told[1], EventOccurred)
    agent.close()
