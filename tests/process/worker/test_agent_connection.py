"""What a worker reports to its agent at the moments when decisions depend on it."""

import subprocess
import sys

from tests.support.patience import patience

WORKER = """
import os, socket
from resilient_jax.ids import GenerationNumber, HostName, WorldId
from resilient_jax.protocol.connection import Connection
from resilient_jax.protocol.generation import Generation, GenerationPhase, Membership
from resilient_jax.protocol.worker_messages import WORKER_MESSAGE_DECODER, FormWorld, WorkerAdmitted
from resilient_jax.worker import worker_protocol
from resilient_jax.worker.agent_connection import AgentConnection
from resilient_jax.worker.hang_detection import HangLimits

ours, worker = socket.socketpair()
agent = Connection(ours.detach(), WORKER_MESSAGE_DECODER)
limits = HangLimits(regular_s=60.0, other_s=60.0, forming_timeout_s=60.0)
connection = AgentConnection(worker.detach(), HostName("a"), lambda: None, limits, polls_checkpoints=True)
agent.send(WorkerAdmitted())
connection.join_job({}, "")
generation = Generation(
    number=GenerationNumber(1), phase=GenerationPhase.FORM, membership=Membership(world=WorldId(1))
)
agent.send(FormWorld(generation=generation, host=HostName("a"), relay_address=""))
connection.wait_for_order()
connection.report_found(worker_protocol.report_checkpoint, None)  # of a look that began before
connection.report_idle(step=3, holds_state=False, part=None, snapshot=None, copied=None, done=False, failure=None)
reports = []
while len(reports) < 4:
    words = [received.message for received in agent.receive()]
    reports += [word.report for word in words if hasattr(word, "report")]
# The second is of its way into the world.
print([report.checkpoints.is_polling_checkpoints for report in reports[1:]], flush=True)
os._exit(0)
"""
"""Run in a process of its own, because a worker ends with its connection."""


def test_a_checkpoint_reported_while_training_is_outdated_once_the_worker_is_idle():
    done = subprocess.run(
        [sys.executable, "-c", WORKER], capture_output=True, text=True, timeout=patience(6), check=False
    )
    assert (done.stdout, done.returncode) == ("[True, False, True]\n", 0), done.stderr
