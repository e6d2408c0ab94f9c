"""The gRPC methods by which agents tell the leader how far their hosts are, with their messages."""

from typing import Final

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.protocol.snapshots import SnapshotStatus
from resilient_jax.protocol.worker_report import TrainingProgress
from resilient_jax.transport.method import Method

SERVICE: Final = "rj.progress"


class HostProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a host is. Agents send it to the leader beside the store: no decision depends on it.

    Attributes:
        sequence: number of that agent's report; a greater one is newer.
        progress: what the worker last reported.
        snapshots: snapshots that are complete on this host.
    """

    host: HostName
    agent_id: str
    sequence: int = 0
    progress: TrainingProgress = TrainingProgress()
    snapshots: tuple[SnapshotStatus, ...] = ()


class ProgressReports(msgspec.Struct, frozen=True, kw_only=True):
    """How far some hosts are: all that have changed since the sender's last report, the sender's own among them.

    Attributes:
        avoided: endpoints of agents that did not answer the sender lately.
    """

    sender: HostName
    hosts: tuple[HostProgress, ...]
    avoided: tuple[str, ...] = ()


class ReportReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to reports, which have arrived.

    Attributes:
        report_to: endpoint of the agent that the sender reports to from now on; empty: the agent that answers.
    """

    report_to: str
    interval_s: float


class ReadProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Asks how far all hosts are; only the leader knows."""


REPORT: Final = Method("report", ProgressReports, ReportReceipt)
READ: Final = Method("read", ReadProgress, ProgressReports)
