"""What a snapshot server tells its agent, over a real socket pair."""

import socket

from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.snapshot.fd_connection import Link
from resilient_jax.snapshot.messages import SERVER_WORD_DECODER, EventOccurred, Holding
from resilient_jax.snapshot.notifier import Reporter


def test_what_is_held_is_told_when_there_is_memory_again():
    """An agent that is not told decides by what was true before."""
    ours, theirs = socket.socketpair()
    agent, shortages = Link(ours.detach()), [MemoryError(), MemoryError()]
    reporter = Reporter(HostName("a"), Link(theirs.detach()))

    def statuses():
        if shortages:
            raise shortages.pop()
        return ()

    reporter.statuses = statuses
    reporter.holding_changed()
    reporter.happened(EventKind.SNAPSHOT_ERASURE_KERNEL)
    told = []
    while len(told) < 2:
        told += [SERVER_WORD_DECODER.decode(message) for message in agent.receive()]
    assert isinstance(told[0], Holding)
    assert isinstance(told[1], EventOccurred)
    agent.close()
