"""What of a worker's output is on the screen: the script's lines, and none that libraries print when a peer dies."""

import pytest

from resilient_jax.cluster import worker_output
from resilient_jax.cluster.worker_output import WorkerOutput

REFUSED = (
    "[external/gloo/gloo/transport/tcp/debug_logger.cc:10] ERROR failed to connect, willRetry=1, retry=1, "
    "retryLimit=3, rank=1, size=2, local=[127.0.0.2]:1, remote=[127.0.0.3]:2, error=SO_ERROR: Connection refused"
)
FATAL = """\
F1124 22:05:36.227212   22365 client.h:80] Terminating process because the JAX service detected fatal errors.
Additional GRPC error information from remote target coordination_service while calling /xla.PollForError:
:UNKNOWN:Error received from peer  {grpc_status:14, grpc_message:"Socket closed"}
*** Check failure stack trace: ***
    @     0x7fc261640634  absl::lts_20260107::log_internal::LogMessage::SendToLog()"""
TERMINATE = """\
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at external/gloo/gloo/transport/tcp/pair.cc:451] op.preamble.length <= op.nbytes. 8 vs 4
Fatal Python error: Aborted

Thread 0x00007f50fe13c250 (most recent call first):
  File "train.py", line 3 in train"""


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    shown: list[str] = []
    monkeypatch.setattr(worker_output, "print_bytes", lambda text: shown.append(text.decode()))
    return shown


@pytest.mark.parametrize("text", [REFUSED, FATAL, TERMINATE])
def test_what_libraries_print_when_a_peer_dies_is_in_the_log_alone(text: str, tmp_path, screen):
    output = WorkerOutput("host-0", tmp_path / "log")
    for line in ["before", *text.splitlines()]:
        output.write(line.encode(), is_error=True)
    output.clear_errors()  # another worker is started
    output.write(b"after", is_error=True)
    output.close()
    assert screen == ["[host-0] before\n", "[host-0] after\n"]
    assert (tmp_path / "log").read_text() == f"before\n{text}\nafter\n"


def test_a_line_of_the_script_is_shown_that_only_looks_like_one_of_a_library(screen):
    output = WorkerOutput("host-0", None)
    lines = ["[train.py:10] loss 3", "Entering W1124", "    @ 3 epochs", "terminated early"]
    for line in lines:
        output.write(line.encode(), is_error=True)
    assert screen == [f"[host-0] {line}\n" for line in lines]


GLOO = "[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
MIXED = (  # as two threads wrote it
    "[Gloo] Rank 1[Gloo] Rank  is connected to 01 is connected to  peer ranks. 1"
    "Expected number of connected peer ranks is :  peer ranks. 1Expected number of connected peer ranks is : "
)
HALVES = [
    "[Gloo] Rank [Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3",
    "0 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3",
]


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        ([GLOO, "7", ""], ["7", ""]),
        ([MIXED, "1", "7"], ["7"]),
        ([MIXED, "", GLOO, "7"], ["7"]),
        ([*HALVES, "7"], ["7"]),
        (["loss 3" + GLOO, "7"], ["loss 3", "7"]),
        ([MIXED, "loss 3", "1", "7"], ["loss 3", "7"]),
    ],
)
def test_the_pieces_of_gloos_messages_are_not_shown_and_no_line_of_the_script_is_lost(lines, shown, screen):
    output = WorkerOutput("host-0", None)
    for line in lines:
        output.write(line.encode())
    assert screen == [f"[host-0] {line}\n" for line in shown]
