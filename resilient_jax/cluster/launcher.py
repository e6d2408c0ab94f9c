"""Several hosts on one machine: the store, unless it is an etcd cluster, and one agent per host.

The launcher is to its agents what a pod's scheduler is: it starts them, restarts a killed one, and ends all when the
job is over. It takes no part in the job, but serves the embedded store; the job ends with it in any case.
"""

import asyncio
import contextlib
import dataclasses
import functools
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path

import msgspec

from resilient_jax.clock import SystemClock
from resilient_jax.cluster.agent_end import FATAL_EXIT_CODES, OWN_EXIT_CODES, describe_agent_end
from resilient_jax.cluster.child_process import SpawnedProcess
from resilient_jax.cluster.host_keeper import HostCare, HostKeeper
from resilient_jax.cluster.job_view import JobView
from resilient_jax.cluster.notice_grace import DEFAULT_GRACE, NoticeGrace
from resilient_jax.cluster.progress_reader import add_progress, read_progress
from resilient_jax.cluster.run_directory import (
    EndedJob,
    JobContact,
    remove_contact,
    write_contact,
    write_ended_job,
)
from resilient_jax.cluster.stored_records import decode_record
from resilient_jax.cluster.worker_exit import describe_missing, find_killed_scripts
from resilient_jax.cluster.zygote_connection import encode_environment
from resilient_jax.cluster.zygote_process import ZygoteProcess
from resilient_jax.errors import ExitCode, PeerError, ResilientJaxError
from resilient_jax.ids import HostName, JobName, Revision
from resilient_jax.notices import list_handled_notices
from resilient_jax.protocol.generation import Generation, JobOutcome, JobOutcomeKind
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.leader_record import LeaderRecord
from resilient_jax.protocol.store_keys import make_generation_key, make_hosts_prefix, make_leader_key
from resilient_jax.protocol.zygote_messages import ZYGOTE_VARIABLE, PrepareZygote
from resilient_jax.store.interface import PutEvent, Store
from resilient_jax.store.lease_renewals import RenewalServer
from resilient_jax.store.memory import MemoryStore
from resilient_jax.store.service import serve_store
from resilient_jax.store.store_access import make_store_access
from resilient_jax.telemetry.event_log import EventLog
from resilient_jax.transport.credentials import TOKEN_VARIABLE, Credentials
from resilient_jax.transport.server import Server

EVENT_LOG_FILE = "launcher.events.jsonl"
ZYGOTE_LOG = "zygote.txt"
"""What libraries print when the zygote imports them."""
STORE_TIMEOUT_S = 30.0
"""Until `launch` gives up an etcd cluster that does not answer."""
WATCH_RETRY_INTERVAL_S = 0.1
FOLDER_CHECK_INTERVAL_S = 0.5
"""How often it is looked whether the run folder is still there."""
PROGRESS_INTERVAL_S = 0.25
"""How often the leader is asked how far the hosts are."""
END_GRACE_S = 10.0
"""Agents clean up in well under a second after the grace of a notice; this bounds the wait for one that cannot."""
LEAVING_EXIT_CODES = frozenset({int(ExitCode.INTERRUPTED), int(ExitCode.DRAINED)})
"""Exit codes of agents that were ordered to leave."""


class HostSite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a host of the job runs on this machine.

    Attributes:
        command_prefix: words before the agent's command that make the agent run there, such as `ip netns exec NAME`.
    """

    address: str
    command_prefix: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """A job on this machine.

    Attributes:
        agent_options: options of every agent's command line.
        run_directory: a directory that exists, is writable and is claimed for this job.
        num_spares: hosts beside `num_hosts`, which take part only in the place of another.
        host_restart_delay_s: seconds for which a killed host stays away; None: a killed host is not restarted.
        sites: places of the hosts, in order; empty: each host has an address of its own on the loopback device.
        host_environments: variables of each host's agent beside `environment`, in order; empty: no variables.
        store_host: address that the embedded store listens at.
        store: URL of an etcd cluster; None: an embedded store.
        store_tls: folder with certificates for that cluster.
        grace: time of a notice to leave, which agents get in `agent_options`, too.
        zygote_environment: environment of workers that are forked from one zygote of this machine; None: it has none.
    """

    job: JobName
    num_hosts: int
    command: tuple[str, ...]
    agent_options: tuple[str, ...]
    run_directory: Path
    environment: Mapping[str, str]
    num_spares: int = 0
    host_restart_delay_s: float | None = 1.0
    max_host_restarts: int = 100
    sites: tuple[HostSite, ...] = ()
    host_environments: tuple[Mapping[str, str], ...] = ()
    store_host: str = "127.0.0.1"
    store: str | None = None
    store_tls: Path | None = None
    grace: NoticeGrace = DEFAULT_GRACE
    zygote_environment: Mapping[str, str] | None = None


def make_host_names(count: int) -> list[HostName]:
    """Return the names of a local job's hosts, its spares last."""
    return [HostName(f"host-{index}") for index in range(count)]


class Launcher:
    """Runs one job. `run` is its complete life; `view` may be read meanwhile."""

    def __init__(
        self,
        settings: LaunchSettings,
        *,
        on_line: Callable[[bytes], None],
        on_change: Callable[[JobView], None] = lambda view: None,
        restore_folder: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare the job.

        Args:
            on_line: prints a line; must not wait.
            restore_folder: makes the run folder again if somebody has removed it, and returns whether the folder had to
                be made; called in a thread.
        """
        self._settings = settings
        self._on_line = on_line
        self._on_change = on_change
        self._restore_folder = restore_folder
        self._credentials = Credentials(secrets.token_hex(16))
        self._interrupted = 0
        self._is_refused = False
        """Whether an agent failed as any other would: what the others make of their end is not how the job ends."""
        self._over = asyncio.Event()
        self._keepers: dict[HostName, HostKeeper] = {}
        self._grace_s = settings.grace.seconds
        """Of the notice that agents have got, or may get."""
        self.view = JobView()
        self.address = ""
        self._leader_endpoint = ""
        self._zygote: ZygoteProcess | None = None

    @property
    def credentials(self) -> Credentials:
        """The credentials of this job's store."""
        return self._credentials

    async def run(self) -> JobOutcome:
        """Start everything, wait for the job's end, leave no process behind."""
        settings, directory = self._settings, self._settings.run_directory
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, *list_handled_notices()):
            react = self._on_hangup if number is signal.SIGHUP else functools.partial(self._on_signal, number)
            loop.add_signal_handler(number, react)
        log = EventLog(directory / EVENT_LOG_FILE, "launcher")
        async with self._open_store(log) as store:
            contact = JobContact(
                job=settings.job,
                store=self.address,
                token=self._credentials.token,
                launcher_pid=os.getpid(),
                store_tls=str(settings.store_tls or ""),
            )
            # Once the store answers: from now on other commands find the job.
            write_contact(directory, contact)
            self._start_zygote(log)
            watching = [
                asyncio.create_task(self._watch(store)),
                asyncio.create_task(self._follow_progress()),
                asyncio.create_task(self._keep_folder(contact)),
            ]
            try:
                outcome = await self._run_hosts()
                write_ended_job(directory, self._make_end(outcome))
                return outcome
            finally:
                for task in watching:
                    task.cancel()
                await asyncio.gather(*watching, return_exceptions=True)
                if self._zygote is not None:
                    await self._zygote.close()
                remove_contact(directory, contact)
                log.close()

    def _start_zygote(self, log: EventLog) -> None:
        """Start the process that workers of all hosts are forked from; without it agents start their own."""
        settings, environment = self._settings, self._settings.zygote_environment
        if environment is None:
            return
        order = PrepareZygote(script=settings.command[0], environment=encode_environment(environment))
        output = settings.run_directory / ZYGOTE_LOG
        try:
            self._zygote = ZygoteProcess(order, environment, log, SystemClock(), output)
        except OSError as error:  # no descriptor, process or memory left
            self._on_line(f"no zygote could be started: {error}; each host starts its own".encode())

    @contextlib.asynccontextmanager
    async def _open_store(self, log: EventLog) -> AsyncGenerator[Store, None]:
        """Serve an embedded store, or connect to the etcd cluster; forget the job's records there at the end."""
        settings = self._settings
        if settings.store is None:
            server = Server(
                f"{settings.store_host}:0",
                credentials=self._credentials,
                on_event=lambda kind, detail: log.record_detail(kind, detail),
            )
            embedded = MemoryStore()
            renewals = RenewalServer(f"{settings.store_host}:0", self._credentials, embedded)
            serve_store(server, embedded, renewals)
            async with embedded, server, renewals:
                self.address = server.address
                yield embedded
            return
        self.address = settings.store
        access = make_store_access(settings.store, self._credentials, settings.store_tls)
        async with await access.connect(STORE_TIMEOUT_S) as store:
            try:
                yield store
            finally:
                with contextlib.suppress(ResilientJaxError):
                    await store.delete_prefix(f"/{settings.job}/")

    def _make_end(self, outcome: JobOutcome) -> EndedJob:
        return EndedJob(
            job=self._settings.job,
            outcome=outcome,
            step=self.view.progress.step,
            metrics=self.view.progress.metrics,
            wall_s=time.time(),
        )

    async def _run_hosts(self) -> JobOutcome:
        settings = self._settings
        care = HostCare(
            view=self.view,
            over=self._over,
            end_job=self._end_refused,
            on_line=self._on_line,
            restart_delay_s=settings.host_restart_delay_s,
            max_restarts=settings.max_host_restarts,
        )
        self._keepers = {
            name: HostKeeper(name, functools.partial(self._start_agent, name, index), care)
            for index, name in enumerate(make_host_names(settings.num_hosts + settings.num_spares))
        }
        hosts = [asyncio.create_task(keeper.run()) for keeper in self._keepers.values()]
        try:
            await self._wait_end(hosts)
        finally:
            for keeper in self._keepers.values():
                if keeper.agent is not None:
                    keeper.agent.kill()
            for host in hosts:
                host.cancel()
            await asyncio.gather(*hosts, return_exceptions=True)
        if self.view.outcome is not None and not self._is_refused:
            return self._with_agents_code(self.view.outcome)
        return self._outcome_without_leader()

    async def _wait_end(self, hosts: "list[asyncio.Task[None]]") -> None:
        pending = set(hosts)
        deadline_s: float | None = None
        loop = asyncio.get_running_loop()
        while pending:
            if deadline_s is None and self._is_ending():
                deadline_s = loop.time() + self._grace_s + END_GRACE_S
            if deadline_s is not None and loop.time() > deadline_s:
                return
            finished, pending = await asyncio.wait(pending, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
            for host in finished:
                host.result()

    def _is_ending(self) -> bool:
        """Return whether all agents should be gone soon. After training a script may work on as long as it likes."""
        outcome = self.view.outcome
        is_done = outcome is not None and outcome.exit_code == ExitCode.DONE
        return bool(self._interrupted) or (outcome is not None and not (is_done and self.view.hosts))

    def _with_agents_code(self, outcome: JobOutcome) -> JobOutcome:
        """Return the outcome with the code of a script that failed after training was done: its agent exited with
        that code.
        """
        if outcome.exit_code != ExitCode.DONE:
            return outcome
        # An agent that had failed before says nothing about a script that came to its end on the other hosts.
        codes = self._list_codes(with_failed=False)
        cut_short = [code for code in codes.values() if code in LEAVING_EXIT_CODES]
        if self._interrupted and cut_short:
            message = "interrupted after training was done, while scripts still worked"
            return JobOutcome(kind=JobOutcomeKind.INTERRUPTED, exit_code=cut_short[0], message=message)
        trained = (
            [] if self.view.generation is None else [m.host for m in self.view.generation.membership.members]
        )
        killed = find_killed_scripts(codes, trained)
        for host, number in killed.items():
            self._on_line(f"{host}: {describe_missing(-number)}".encode())
        # These codes mean that a host left or was given up: the others finished the job without it.
        failed = [
            (host, code)
            for host, code in sorted(codes.items())
            if code > 0 and code not in OWN_EXIT_CODES and host not in killed
        ]
        if not failed:
            return outcome
        host, code = failed[0]
        message = f"training was done, but then the script failed with code {code}; its log has the rest"
        return JobOutcome(kind=JobOutcomeKind.USER_ERROR, exit_code=code, host=host, message=message)

    def _outcome_without_leader(self) -> JobOutcome:
        """Return the outcome of a job whose hosts were refused, interrupted or killed, or exhausted their restarts."""
        codes = self._list_codes(with_failed=True)
        ends = {host: ExitCode.TOO_FEW_HOSTS if code < 0 else code for host, code in codes.items()}
        # Fatal codes first: they are the reason why the other agents were ended.
        fatal = [code for code in ends.values() if code in FATAL_EXIT_CODES]
        failed = [] if self._interrupted else sorted(code for code in ends.values() if code)
        code = next(iter([*fatal, *failed]), int(ExitCode.INTERRUPTED))
        if code == ExitCode.INTERRUPTED:
            step = self.view.progress.step
            when = f"after {step} steps" if step else "before the first step"
            message = f"interrupted {when}; none of the job's processes is left"
            return JobOutcome(kind=JobOutcomeKind.INTERRUPTED, exit_code=code, message=message)
        how = ", ".join(f"{host} {describe_agent_end(code)}" for host, code in sorted(codes.items()))
        return JobOutcome(
            kind=_outcome_kind_of(code),
            exit_code=code,
            message=f"no host is left: {how}; the output of each is above and in its log",
        )

    def _list_codes(self, *, with_failed: bool) -> dict[HostName, int]:
        """Return the exit code of each host's last agent, also if it `is_out` when `with_failed`."""
        return {
            name: keeper.exit_code
            for name, keeper in self._keepers.items()
            if keeper.exit_code is not None and (with_failed or not keeper.is_out)
        }

    def _start_agent(self, name: HostName, index: int) -> SpawnedProcess:
        settings = self._settings
        # An address of its own: loopback has 2^24 of them, and each host of a pod has one, too.
        site = settings.sites[index] if settings.sites else HostSite(address=f"127.0.0.{index + 2}")
        command = [
            *site.command_prefix,
            sys.executable,
            "-m",
            "resilient_jax.cli.main",
            "agent",
            *("--store", self.address),
            *(("--store-tls", str(settings.store_tls)) if settings.store_tls is not None else ()),
            *("--job", settings.job),
            *("--host-name", name),
            *("--address", site.address),
            *("--num-hosts", str(settings.num_hosts)),
            *("--run-dir", str(settings.run_directory)),
            *(["--spare"] if index >= settings.num_hosts else []),
            "--launched",
            *settings.agent_options,
            "--",
            *settings.command,
        ]
        own = settings.host_environments[index] if settings.host_environments else {}
        environment = {**settings.environment, **own, TOKEN_VARIABLE: self._credentials.token}
        connection = self._zygote.connect_agent() if self._zygote is not None else None
        if connection is None:
            return SpawnedProcess(command, env=environment, stderr=subprocess.STDOUT, answers_notices=True)
        with connection:
            descriptor = connection.fileno()
            environment[ZYGOTE_VARIABLE] = str(descriptor)
            return SpawnedProcess(
                command,
                env=environment,
                stderr=subprocess.STDOUT,
                pass_fds=(descriptor,),
                answers_notices=True,
            )

    async def _watch(self, store: Store) -> None:
        prefix = f"/{self._settings.job}/"
        while True:
            with contextlib.suppress(PeerError):  # an etcd cluster may be away for a while
                revision, found = await store.range(prefix)
                self.view.hosts.clear()
                for key_value in found:
                    self._absorb(PutEvent(key_value=key_value))
                async with contextlib.aclosing(store.watch(prefix, Revision(revision + 1))) as batches:
                    async for batch in batches:
                        for event in batch:
                            self._absorb(event)
                        self._on_change(self.view)
            await asyncio.sleep(WATCH_RETRY_INTERVAL_S)

    def _absorb(self, event: object) -> None:
        job = self._settings.job
        if isinstance(event, PutEvent) and event.key == make_generation_key(job):
            self.view.generation = decode_record(event.key_value, Generation)
            if self.view.outcome is not None:
                self._over.set()
        elif isinstance(event, PutEvent) and event.key.startswith(make_hosts_prefix(job)):
            self.view.update_host(decode_record(event.key_value, HostStatus))
        elif isinstance(event, PutEvent) and event.key == make_leader_key(job):
            self._leader_endpoint = decode_record(event.key_value, LeaderRecord).endpoint
        elif not isinstance(event, PutEvent):
            key = getattr(event, "key", "")
            self.view.hosts.pop(HostName(key.removeprefix(make_hosts_prefix(job))), None)

    async def _follow_progress(self) -> None:
        """Ask the leader how far the hosts are, a few times a second."""
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL_S)
            if not self._leader_endpoint:
                continue
            for progress in await read_progress(self._leader_endpoint, self._credentials):
                if (status := self.view.hosts.get(progress.host)) is not None:
                    self.view.update_host(add_progress(status, progress))
            self._on_change(self.view)

    async def _keep_folder(self, contact: JobContact) -> None:
        """Make the run folder again when somebody removes it: other commands find the job there, and logs go there."""
        directory, is_due, said = self._settings.run_directory, False, ""
        while True:
            await asyncio.sleep(FOLDER_CHECK_INTERVAL_S)
            try:
                if await asyncio.to_thread(self._restore_folder):
                    is_due = True
                    self._on_line(
                        f"the run folder {directory} was removed while the job runs, and is made again; what was in it "
                        "is lost: logs, compiled programs, and the job's copy of its script".encode()
                    )
                if is_due:
                    await asyncio.to_thread(write_contact, directory, contact)
                    is_due = False
            except ResilientJaxError as error:
                if str(error) != said:
                    said = str(error)
                    self._on_line(f"the run folder was removed while the job runs: {said}".encode())

    def _on_hangup(self) -> None:
        """Give all hosts the notice (SIGHUP), once: it comes from the kernel and from the shell."""
        if not self._interrupted:
            words = "got SIGHUP, as when a terminal is closed: the job ends at the next step boundary; `nohup` keeps it"
            self._on_line(words.encode())
            self._on_signal(signal.SIGHUP)

    def _end_refused(self) -> None:
        """End all agents: one was refused for what all were started with."""
        self._is_refused = True
        self._on_signal(signal.SIGINT)

    def _on_signal(self, number: signal.Signals) -> None:
        """Give all hosts the notice, once, or end them now (SIGINT)."""
        if number is not signal.SIGINT:
            if self._interrupted:
                return
            self._grace_s = self._settings.grace.find_s(number, time.time())
        self._interrupted += 1
        self._over.set()
        for keeper in self._keepers.values():
            if keeper.agent is not None:
                keeper.agent.send_signal(number)


def _outcome_kind_of(code: int) -> JobOutcomeKind:
    return {
        int(ExitCode.INTERRUPTED): JobOutcomeKind.INTERRUPTED,
        int(ExitCode.DRAINED): JobOutcomeKind.INTERRUPTED,
        int(ExitCode.TOO_FEW_HOSTS): JobOutcomeKind.TOO_FEW_HOSTS,
        int(ExitCode.RESTART_BUDGET_EXHAUSTED): JobOutcomeKind.TOO_FEW_HOSTS,
        int(ExitCode.JOIN_REFUSED): JobOutcomeKind.TOO_FEW_HOSTS,
        int(ExitCode.SCRIPT_DIFFERS): JobOutcomeKind.TOO_FEW_HOSTS,
    }.get(code, JobOutcomeKind.USER_ERROR)
