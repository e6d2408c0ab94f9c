"""What a worker says to its agent of itself, at the moments when that is decided upon."""

import subprocess
import sys

WORKER = """
import os, socket
from resilient_jax.ids import HostName
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.worker_messages import WORKER_MESSAGE_DECODER
from resilient_jax.worker.agent_connection import AgentConnection

ours, worker = socket.socketpair()
agent = Connection(ours.detach(), WORKER_MESSAGE_DECODER)
link = AgentConnection(worker.detach(), HostName("a"), lambda: None)
link.announce_checkpoint_polling()
link.report_checkpoint(None)  # of a look that began before
link.report_idle(step=3, holds_state=False, snapshot=None, done=False, failure=None)
reports = []
while len(reports) < 3:
    words = [received.message for received in agent.receive()]
    reports += [word.report for word in words if hasattr(word, "report")]
print([report.is_polling_checkpoints for report in reports], flush=True)
os._exit(0)
"""
"""A process of its own: a worker ends with its link."""


def test_what_was_seen_while_training_does_not_count_once_the_worker_is_idle():
    done = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("[True, False, True]\n", 0), done.stderr
