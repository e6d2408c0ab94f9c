"""`resilient-jax status` prints a table of a running job without truncated words."""

import io
import sys

import pytest
from rich.console import Console

from resilient_jax.cli import main, status
from resilient_jax.cli.options import read_versions
from resilient_jax.cluster.job_report import JobReport
from resilient_jax.errors import ExitCode
from resilient_jax.ids import GenerationNumber, HostName, Incarnation, WorldId
from resilient_jax.protocol.records import CoordinationServiceStatus, HostStatus, WorkerStatus
from resilient_jax.protocol.snapshots import ParityGroup, SnapshotId, SnapshotPhase, SnapshotStatus

HOST = HostName("ip-10-0-0-17.compute.internal")
HOSTS = (HOST, HostName("host-1"))
SNAPSHOT = SnapshotStatus(
    id=SnapshotId(generation=GenerationNumber(1), step=12),
    phase=SnapshotPhase.COMMITTED,
    groups=(ParityGroup(hosts=HOSTS, parity=1),),
    nbytes=2**20,
    wall_s=0.0,
)
REPORT = JobReport(
    job="folder[/name]",
    generation=None,
    leader=None,
    hosts=(
        HostStatus(
            host=HOST,
            agent_id="",
            agent_pid=1,
            address="",
            versions=read_versions(),
            worker=WorkerStatus(incarnation=Incarnation(3), pid=1795312),
            services=(CoordinationServiceStatus(world=WorldId(11), num_processes=2, address="", pid=2),),
            snapshots=(SNAPSHOT,),
            step=123456,
            is_draining=True,
        ),
    ),
)
WHOLE = [
    "folder[/name]",
    "process",
    "worker",
    "incarnation",
    "snapshots",
    HOST,
    "starting",
    "1795312",
    "123456",
    "draining",
]


@pytest.fixture
def _running(monkeypatch):
    async def read_report(contact):
        return REPORT

    monkeypatch.setattr(status, "find_contact", lambda run_dir: None)
    monkeypatch.setattr(status, "read_job_report", read_report)


@pytest.mark.usefixtures("_running")
def test_no_word_is_truncated_in_a_pipe(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["resilient-jax", "status", "run"])
    with pytest.raises(SystemExit) as end:
        main.main()
    shown, errors = capsys.readouterr()
    assert (end.value.code, errors) == (ExitCode.DONE, "")
    assert [word for word in WHOLE if word not in shown] == []
    assert "…" not in shown


def test_no_word_is_truncated_in_a_narrow_terminal():
    shown = io.StringIO()
    status.print_report(Console(file=shown, width=20), REPORT)
    assert [word for word in WHOLE if word != HOST and word not in shown.getvalue()] == []
    assert "…" not in shown.getvalue()
