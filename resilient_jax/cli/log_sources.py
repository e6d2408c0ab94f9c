"""Where logs of a job are read: in its run folder on this machine, or anywhere from the agents of its hosts."""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from resilient_jax.cli.job_contact import RemoteJob
from resilient_jax.cluster.agent_calls import call_agents, read_log
from resilient_jax.cluster.agent_messages import ReadLog
from resilient_jax.cluster.job_report import JobReport, make_credentials, read_job_report
from resilient_jax.cluster.run_directory import HostLog, JobContact, find_logs, read_ended_job
from resilient_jax.errors import CallerError, PeerError, StoreUnreachable
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.telemetry.log_reader import LogPart, read_appended, read_last_lines
from resilient_jax.transport.channel import Channel

REPORT_INTERVAL_S = 5.0
"""Time between two reads of the store while logs are followed; at once after a host that did not answer."""


class LogQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which lines are asked for.

    Attributes:
        hosts: hosts that are asked for; empty: all.
        lines: how many of the last lines of each host.
        follow: whether lines that are appended are shown, too, until the job ends.
    """

    log: HostLog
    hosts: tuple[str, ...]
    lines: int
    follow: bool

    def selects(self, host: str) -> bool:
        """Return whether this host is asked for."""
        return not self.hosts or host in self.hosts


class LogRound(msgspec.Struct, frozen=True, kw_only=True):
    """What was read at one time.

    Attributes:
        parts: what each host that answered has given.
        silent: by host, why there is no part.
        is_over: whether the job had ended before, so that nothing more is written.
    """

    parts: Mapping[str, LogPart]
    silent: Mapping[str, str]
    is_over: bool


class LogSource(Protocol):
    """Reads logs of several hosts in rounds."""

    async def read(self, query: LogQuery, offsets: Mapping[str, int]) -> LogRound:
        """Return the next part of each host's log; of a host without an offset the last lines.

        Raises:
            CallerError: there is no log.
        """
        ...


class FolderLogs:
    """Reads the files of a run folder, also after the end of the job."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def read(self, query: LogQuery, offsets: Mapping[str, int]) -> LogRound:
        """Return the next part of each file, see `LogSource`."""
        has_ended = read_ended_job(self._directory) is not None  # before the files, which grow until then
        logs = find_logs(self._directory, query.log)
        if not logs:
            raise CallerError(
                f"{self._directory}: found no file HOST.{query.log}, expected a run folder, with logs of hosts: "
                "`launch` prints it first; of an agent it is --run-dir"
            )
        check_hosts(query, logs)
        parts = {
            host: read_appended(path, offsets[host])
            if host in offsets
            else read_last_lines(path, query.lines)
            for host, path in logs.items()
            if query.selects(host)
        }
        return LogRound(parts=parts, silent={}, is_over=has_ended)


class AgentLogs:
    """Asks the agents of the hosts that the store has records of."""

    def __init__(self, contact: JobContact) -> None:
        """Ask the agents of this job, with its token."""
        self._contact = contact
        self._credentials = make_credentials(contact)
        self._report: JobReport | None = None
        self._read_report_at_s = 0.0
        self._answers = True
        """Whether an agent answered in the round before."""

    async def read(self, query: LogQuery, offsets: Mapping[str, int]) -> LogRound:
        """Return the next part of each host's log, see `LogSource`.

        Raises:
            StoreUnreachable: the store does not answer.
            Unauthenticated: the store or an agent does not accept our token.
        """
        report = await self._read_report()
        if not offsets:
            check_running(report, self._contact)
            check_hosts(query, [host.host for host in report.hosts])

        async def ask(channel: Channel, host: HostStatus) -> LogPart:
            request = ReadLog(log=query.log, lines=query.lines, offset=offsets.get(host.host))
            return await read_log(channel, request)

        selected = [host for host in report.hosts if query.selects(host.host)]
        answers = await call_agents(selected, self._credentials, ask)
        silent: dict[str, str] = {
            host.host: describe_silence(host, answer)
            for host in selected
            if isinstance(answer := answers[host.host], PeerError)
        }
        if silent:
            self._read_report_at_s = 0.0
        parts: dict[str, LogPart] = {
            host: answer for host, answer in answers.items() if not isinstance(answer, PeerError)
        }
        self._answers = bool(parts)
        return LogRound(parts=parts, silent=silent, is_over=is_over(report))

    async def _read_report(self) -> JobReport:
        """Return what the store says, now or some seconds ago; it may be away for as long as an agent answers."""
        now_s = time.monotonic()
        if self._report is None or now_s >= self._read_report_at_s:
            try:
                self._report = await read_job_report(self._contact)
            except StoreUnreachable as error:
                if self._report is None:
                    raise
                if not self._answers:
                    raise StoreUnreachable(
                        f"job {self._contact.job}: neither an agent nor the store answers any more: the job has ended, "
                        f"or its store is lost ({error})"
                    ) from error
            self._read_report_at_s = time.monotonic() + REPORT_INTERVAL_S
        return self._report


def make_log_source(chosen: Path | RemoteJob) -> LogSource:
    """Return the source for what the command line names.

    Raises:
        Unauthenticated: the environment has no token for the agents.
    """
    if isinstance(chosen, Path):
        return FolderLogs(chosen)
    return AgentLogs(chosen.make_contact(calls_agents=True))


def is_over(report: JobReport) -> bool:
    """Return whether a job has ended, or has no host any more."""
    return not report.hosts or (report.generation is not None and report.generation.outcome is not None)


def check_running(report: JobReport, contact: JobContact) -> None:
    """Check that there is an agent to ask.

    Raises:
        CallerError: the store has no record of a host of this job.
    """
    if not report.hosts:
        found = (
            "no job of this name" if report.generation is None else "no host of it, but its last generation"
        )
        raise CallerError(
            f"job {contact.job}: found {found} in the store at {contact.store}, expected agents that run. Check --job "
            "and --store; the logs of a job that is over are in the run folders of its hosts"
        )


def check_hosts(query: LogQuery, known: Collection[str]) -> None:
    """Check that all hosts that were asked for are there.

    Raises:
        CallerError: one is not.
    """
    for host in query.hosts:
        if host not in known:
            raise CallerError(f"--host {host}: found no such host, expected one of: {', '.join(known)}")


def describe_silence(host: HostStatus, error: PeerError) -> str:
    """Return what to print about a host whose agent did not answer."""
    return (
        f"host {host.host}: its agent (process {host.agent.pid}) did not answer: {error}. Look at that machine: the "
        "agent may be dead, stopped or cut off; then the store drops it when its lease ends"
    )
