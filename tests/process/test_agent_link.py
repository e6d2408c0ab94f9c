"""What a worker says to its agent of itself, at the moments when that is decided upon."""

import subprocess
import sys

WORKER = """
import os, socket
from resilient_jax.ids import HostName
from resilient_jax.protocol.framing import FrameDecoder
from resilient_jax.protocol.worker_messages import WORD_DECODER
from resilient_jax.worker.agent_connection import AgentConnection

agent, worker = socket.socketpair()
link = AgentConnection(worker.detach(), HostName("a"), lambda: None)
link.announce_checkpoint_polling()
link.report_checkpoint(None)  # of a look that began before
link.report_idle(step=3, holds_state=False, snapshot=None, done=False, failure=None)
deframer, reports = FrameDecoder(), []
while len(reports) < 3:
    words = map(WORD_DECODER.decode, deframer.feed(agent.recv(65536)))
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
