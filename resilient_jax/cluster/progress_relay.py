"""Tells the leader how far this host is, beside the store: its step, metrics and snapshots.

An agent collects what others tell it, too, and tells all of it at once, a few times a second at most: so in a large job
reports reach the leader through a tree of agents (`progress_tree`). No decision needs a report: one that is lost makes
numbers older that people read, and the leader's own record of progress. A host whose agent in the tree, its parent, is
lost reports to the leader, which names another. The first report goes to the leader at once: the parent also writes the
host's status (`status_combiner`).
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterable

import msgspec

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.progress_messages import (
    READ,
    REPORT,
    SERVICE,
    HostProgress,
    ProgressReports,
    ReadProgress,
    ReportReceipt,
)
from resilient_jax.cluster.progress_tree import FANOUT, ProgressTree
from resilient_jax.errors import ConfigError, PeerError, PeerUnreachable, Unauthenticated
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.transport.channel import Channel
from resilient_jax.transport.server import Server

INTERVAL_S = 1.0
"""Time between two reports of a host."""
SMALL_JOB_INTERVAL_S = 0.25
"""The same where all hosts report to the leader itself: progress lines look better."""
REPORT_TIMEOUT_S = 2.0
REPORTS_PER_ASSIGNMENT = 30
"""After so many reports to another agent the next goes to the leader, which may name another: hosts come and go."""


class ProgressRelay:
    """What this host's agent knows of the progress of hosts, and whom it tells."""

    def __init__(self, context: AgentContext, server: Server, make_own: Callable[[], HostProgress]) -> None:
        """Add the methods to the agent's server; `make_own` returns this host's progress now, with any `sequence`."""
        self._context = context
        self._server = server
        self._make_own = make_own
        self._known: dict[HostName, HostProgress] = {}
        self._unsent: set[HostName] = set()
        self._leader = ""
        """Where the leader listens; empty: unknown, or this agent leads."""
        self._parent = ""
        """Whom the leader has told this agent to report to; empty: to itself."""
        self._avoided: set[str] = set()
        """Parents that did not answer lately."""
        self._is_asking = False
        """Whether the next report goes to the leader, which may name another parent."""
        self._num_reports = 0
        """How many reports have arrived since the last one for that."""
        self._is_due = asyncio.Event()
        """Set: the next report is not delayed."""
        self._interval_s = SMALL_JOB_INTERVAL_S
        self._on_progress: Callable[[HostProgress], None] | None = None
        self._on_refused: Callable[[], None] = lambda: None
        self._tree = ProgressTree()
        server.add(SERVICE, {REPORT: self._receive, READ: self._read})

    @property
    def endpoint(self) -> str:
        """Where this agent listens, as host:port."""
        return self._server.address

    @property
    def parent(self) -> str:
        """The endpoint of the agent that this one reports to; empty: the leader, or none."""
        return self._parent

    def lead(self, tree: ProgressTree, on_progress: Callable[[HostProgress], None]) -> None:
        """Be the root of this tree from now on: call `on_progress` for each report that is news."""
        self._leader, self._parent = "", ""
        self._tree, self._on_progress = tree, on_progress
        self._interval_s = SMALL_JOB_INTERVAL_S
        for report in self._known.values():
            on_progress(report)

    def follow(self, leader: str, on_refused: Callable[[], None]) -> None:
        """Report to the leader at this endpoint from now on; call `on_refused` when no process listens there."""
        self._on_progress, self._on_refused = None, on_refused
        if leader != self._leader:
            self._leader, self._parent = leader, ""
            self._avoided.clear()
            self._unsent.update(self._known)
            self._is_due.set()

    def abandon(self, parent: str) -> None:
        """Report to the leader at once, which names another parent: this one did not answer."""
        if not parent or parent != self._parent:
            return
        self._context.log.record(EventKind.TREE_PARENT_LOST, parent=parent)
        self._avoided.add(parent)
        self._parent = ""
        # What it had been told, and has not told others yet, is lost with it.
        self._unsent.update(self._known)
        self._is_due.set()

    async def run(self) -> None:
        """Report to the leader, or to whom it names, until cancelled; a report that fails is sent again."""
        channel: Channel | None = None
        try:
            while True:
                await self._wait_due()
                self._look_at_own()
                target = self._leader if self._is_asking else self._parent or self._leader
                # To the leader also without news: so its death is noticed before its lease ends.
                if (
                    self._on_progress is not None
                    or not target
                    or not (self._unsent or target == self._leader)
                ):
                    continue
                if channel is not None and channel.address != target:
                    await channel.close()
                    channel = None
                with contextlib.suppress(ConfigError):  # certificates that are being replaced: the next time
                    channel = channel or Channel(target, self._context.settings.credentials)
                    await self._report(channel)
        finally:
            if channel is not None:
                await channel.close()

    async def _wait_due(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s):
                await self._is_due.wait()
        self._is_due.clear()

    def _look_at_own(self) -> None:
        own = self._make_own()
        known = self._known.get(own.host)
        sequence = known.sequence if known is not None else 0
        if known != msgspec.structs.replace(own, sequence=sequence):
            self._absorb([msgspec.structs.replace(own, sequence=sequence + 1)])

    def _absorb(self, reports: Iterable[HostProgress]) -> None:
        """Take in reports that are newer than what is known: those of a host may arrive by two ways."""
        for report in reports:
            known = self._known.get(report.host)
            if known is not None and known.agent_id == report.agent_id and known.sequence >= report.sequence:
                continue
            self._known[report.host] = report
            self._unsent.add(report.host)
            if self._on_progress is not None:
                self._on_progress(report)

    async def _report(self, channel: Channel) -> None:
        hosts, self._unsent = self._unsent, set()
        reports = tuple(self._known[host] for host in hosts)
        request = ProgressReports(
            sender=self._context.settings.host, hosts=reports, avoided=tuple(self._avoided)
        )
        try:
            receipt = await channel.call(SERVICE, REPORT, request, timeout_s=REPORT_TIMEOUT_S)
        except (PeerError, Unauthenticated) as error:
            self._unsent.update(hosts)
            if channel.address == self._parent:
                self.abandon(channel.address)
            elif isinstance(error, PeerUnreachable) and error.is_refused and channel.address == self._leader:
                self._on_refused()
            return
        self._num_reports += 1
        if channel.address == self._leader:
            self._parent, self._is_asking = receipt.report_to, False
            self._interval_s = receipt.interval_s
        if self._num_reports >= REPORTS_PER_ASSIGNMENT:
            self._avoided.clear()
            self._is_asking, self._num_reports = True, 0

    # As a server.

    async def _receive(self, request: ProgressReports) -> ReportReceipt:
        self._absorb(request.hosts)
        if self._on_progress is None:
            return ReportReceipt(report_to="", interval_s=INTERVAL_S)
        # A host that the store has not yet told the leader of asks again soon.
        is_soon = len(self._tree) <= FANOUT or request.sender not in self._tree
        return ReportReceipt(
            report_to=self._tree.find_parent(request.sender, request.avoided),
            interval_s=SMALL_JOB_INTERVAL_S if is_soon else INTERVAL_S,
        )

    async def _read(self, _: ReadProgress) -> ProgressReports:
        self._look_at_own()
        return ProgressReports(sender=self._context.settings.host, hosts=tuple(self._known.values()))
