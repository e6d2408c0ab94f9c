"""`resilient-jax agent`: the supervisor of one host of a pod."""

import asyncio
import contextlib
import dataclasses
import functools
import ipaddress
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from resilient_jax.cli.job_environment import make_job_environment
from resilient_jax.cli.options import (
    ConfigOption,
    DevicesOption,
    GraceOption,
    PlatformOption,
    RunDirectoryOption,
    ScriptArgument,
    StoreTlsOption,
    TlsOption,
    TopologyOption,
    VerboseOption,
    check_devices,
    check_platform,
    check_script,
    check_spares,
    list_options,
    load_job_config,
    note_misplaced_options,
    print_line,
    read_failure_domain,
    read_grace,
    read_versions,
)
from resilient_jax.cli.outcome_text import describe_for_agent
from resilient_jax.cluster.agent import END_RECORD_S, INTERRUPTED, LEFT, Agent, open_event_log
from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.notice_grace import DEFAULT_GRACE_S
from resilient_jax.cluster.run_directory import create_run_directory, forget_end
from resilient_jax.config import JobConfig
from resilient_jax.errors import (
    EXHAUSTION_ERRNOS,
    CallerError,
    ConfigError,
    ExitCode,
    OutOfResources,
    Unauthenticated,
)
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, JobName
from resilient_jax.jax_runtime.worker_environment import Platform
from resilient_jax.notices import list_handled_notices
from resilient_jax.protocol.generation import JobOutcome, JobOutcomeKind
from resilient_jax.protocol.store_keys import make_hosts_prefix
from resilient_jax.protocol.zygote_messages import ZYGOTE_VARIABLE
from resilient_jax.store.etcd_address import EXAMPLE, EtcdAddress, is_etcd_address
from resilient_jax.store.etcd_store import EtcdStore, check_lease_ttl
from resilient_jax.store.lease_renewals import RenewalServer
from resilient_jax.store.memory import MemoryStore
from resilient_jax.store.service import serve_store
from resilient_jax.store.state_machine import FIRST_REVISION
from resilient_jax.store.store_access import StoreAccess, make_store_access
from resilient_jax.telemetry.event_log import EventLog
from resilient_jax.telemetry.screen_output import unblocked_output
from resilient_jax.transport.credentials import (
    MISSING_TOKEN,
    TOKEN_VARIABLE,
    Credentials,
    TlsFiles,
    describe_exposure,
)
from resilient_jax.transport.server import Server
from resilient_jax.transport.server_address import check_bindable, parse_address

WAITING_MESSAGE_INTERVAL_S = 10.0
"""Time between two messages of an agent that waits for the store."""
SERVING_POLL_INTERVAL_S = 0.2
"""Time between two polls of an agent that has left the job, but serves the store while other hosts need it."""
HOST_NAME_PATTERN = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,64}", re.ASCII)
"""A host's name is part of file names, store keys and log lines; the kernel's host names have at most 64 characters."""

THIS_HOST = socket.gethostname()
StoreOption = Annotated[
    str,
    typer.Option(
        help="The job's store: host:port of the agent that serves it (--serve-store), or an etcd cluster: "
        "etcd://HOST:2379,HOST:2379,HOST:2379/NAMESPACE, whose user is read from RESILIENT_JAX_ETCD_USER and _PASSWORD."
    ),
]
JobOption = Annotated[str, typer.Option(help="Name of the job; the same on all its hosts.")]
NameOption = Annotated[
    str, typer.Option(help="This host's name, unique in the job.", show_default="this machine's name")
]
NumHostsOption = Annotated[int, typer.Option(help="Hosts to wait for before the first step.")]
AddressOption = Annotated[
    str | None,
    typer.Option(
        help="Address at which other hosts reach this one. Default: the address that reaches the store."
    ),
]
ServeOption = Annotated[
    bool, typer.Option("--serve-store", help="Serve the job's store from this agent, at --store.")
]
DomainOption = Annotated[
    str,
    typer.Option(
        help="Failure domain of this host, such as its rack; other domains keep its parity. Default: from --topology."
    ),
]
SpareOption = Annotated[
    bool,
    typer.Option(
        "--spare",
        help="Take part only in the place of another host: get ready, wait, and join when one is missing. Spares are "
        "not counted in --num-hosts.",
    ),
]
LaunchedOption = Annotated[
    bool, typer.Option("--launched", hidden=True, help="Started by `launch`, which prints how the job ended.")
]
ZygoteOption = Annotated[
    bool,
    typer.Option(
        help="Fork workers from a process that has imported JAX, so that they start sooner. Otherwise each worker "
        "imports JAX itself."
    ),
]


def agent(
    context: typer.Context,
    script: ScriptArgument,
    store: StoreOption,
    job: JobOption,
    host_name: NameOption = THIS_HOST,
    num_hosts: NumHostsOption = 1,
    address: AddressOption = None,
    serve_store_here: ServeOption = False,
    devices_per_host: DevicesOption = None,
    platform: PlatformOption = None,
    config: ConfigOption = None,
    tls: TlsOption = None,
    store_tls: StoreTlsOption = None,
    failure_domain: DomainOption = "",
    topology: TopologyOption = None,
    spare: SpareOption = False,
    grace_s: GraceOption = DEFAULT_GRACE_S,
    run_dir: RunDirectoryOption = Path("runs/agent"),
    zygote: ZygoteOption = True,
    verbose: VerboseOption = False,
    launched: LaunchedOption = False,
) -> None:
    """Supervise this host's worker in a job of many hosts.

    The job's token is read from the environment variable RESILIENT_JAX_TOKEN.

    SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are a notice: the host leaves between two steps, so no step is repeated; after
    --grace-s the host leaves anyway. If all hosts get one, the job saves a checkpoint and ends. Further notices change
    nothing. Ctrl-C ends the host within a second, pressed again at once; on all hosts it ends the job. With
    --serve-store the agent serves the store until all others have ended. The script's time after training has no limit.

    Exit codes: 0 done, the script's own for its error, 2 bad input, 75 out of memory, descriptors or threads, 80 store
    lost, 81 restart budget spent, 82 too few hosts, 83 refused, 84 left after a notice, 85 state lost, 89 a bug, 130
    interrupted.
    """
    token = _read_token()
    own_options = list_options(context)
    command = check_script(script, own_options)
    if not launched:
        note_misplaced_options(command, own_options)
    check_devices(devices_per_host)
    _check_host(host_name, num_hosts)
    credentials = Credentials(token, TlsFiles.in_folder(tls) if tls is not None else None)
    checked_platform = check_platform(platform)
    access = _choose_store(store, credentials, store_tls, serve_here=serve_store_here)
    own_address = _choose_address(store, address)
    job_config = load_job_config(config, num_hosts)
    check_spares("--spare", int(spare), num_hosts, job_config, checked_platform)
    failure_domain = failure_domain or (read_failure_domain(topology, host_name) if topology else "")
    directory = create_run_directory(run_dir)  # last: bad input leaves nothing behind
    settings = AgentSettings(
        job=JobName(job),
        host=HostName(host_name),
        address=own_address,
        command=command,
        environment=_make_environment(directory, checked_platform, devices_per_host, job_config, own_address),
        zygote=int(connected) if (connected := os.environ.pop(ZYGOTE_VARIABLE, "")) else None,
        forks_workers=zygote,
        devices_per_host=devices_per_host,
        num_hosts=num_hosts,
        versions=read_versions(),
        credentials=credentials,
        config=job_config,
        is_spare=spare,
        failure_domain=failure_domain,
        run_directory=directory,
        show_all_output=verbose,
        grace=read_grace(grace_s),
        is_launched=launched,
    )
    sys.exit(_run_to_end(settings, access, serve_here=serve_store_here))


def _run_to_end(settings: AgentSettings, access: StoreAccess, *, serve_here: bool) -> int:
    """Run the agent, and say what others can read of the job, and how it ended; return the exit code."""
    if settings.run_directory is not None and not settings.is_launched:
        forget_end(settings.run_directory, settings.host)
    with unblocked_output():
        if exposure := describe_exposure(settings.host, settings.address, settings.credentials):
            print_line(exposure)
        return _end(settings, asyncio.run(_run(settings, access, serve_here=serve_here)))


def _end(settings: AgentSettings, outcome: JobOutcome) -> int:
    """Print how the job or this host's part ended, unless that is told elsewhere or goes without saying.

    Returns:
        The exit code.
    """
    # `launch` shows the error of a script in its last lines, once for all hosts.
    is_own = outcome.host == settings.host and outcome.kind is not JobOutcomeKind.USER_ERROR
    is_plain = outcome.kind is JobOutcomeKind.DONE or outcome.message in (LEFT, INTERRUPTED)
    if (is_own or not settings.is_launched) and not is_plain:
        print_line(f"[{settings.host}] {describe_for_agent(outcome)}")
    return outcome.exit_code


def _read_token() -> str:
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise Unauthenticated(MISSING_TOKEN)
    return token


async def _run(settings: AgentSettings, access: StoreAccess, *, serve_here: bool) -> JobOutcome:
    if not serve_here:
        return await _supervise(settings, access)
    server = Server(access.address, credentials=settings.credentials)
    assert settings.run_directory is not None, "the command has made it"
    journal = settings.run_directory / f"store-{settings.job}.journal"
    with contextlib.closing(open_event_log(settings)) as log:
        report = functools.partial(_report_journal, settings.host, journal, log)
        async with MemoryStore.from_journal(journal, on_trouble=report) as store:
            if store.revision > FIRST_REVISION:
                print_line(
                    f"[{settings.host}] the store goes on from revision {store.revision} of {journal}: the agent that "
                    "served it was killed. Remove the file to begin anew"
                )
            renewals = RenewalServer(access.address, settings.credentials, store)
            serve_store(server, store, renewals)
            async with server, renewals:
                outcome = await _supervise(settings, dataclasses.replace(access, address=server.address))
                is_interrupted = outcome.exit_code == ExitCode.INTERRUPTED
                if outcome.message != INTERRUPTED:
                    # At Ctrl-C on all hosts only until they have read the end.
                    await _serve_other_hosts(settings, store, END_RECORD_S if is_interrupted else None)
                journal.unlink(missing_ok=True)
                return outcome


def _report_journal(host: HostName, journal: Path, log: EventLog, why: str) -> None:
    """Say that the store's journal cannot be written, or, without a reason, that it is written again."""
    if why:
        log.record(EventKind.STORE_JOURNAL_UNWRITTEN, path=str(journal), why=why)
        print_line(
            f"[{host}] the store's journal {journal} cannot be written: {why}. Until it can, no host joins or leaves: "
            "training goes on while all members live, and waits after a loss. Free space on the disk of "
            f"{journal.parent}: then the job goes on by itself, and nothing is lost"
        )
    else:
        log.record(EventKind.STORE_JOURNAL_WRITTEN, path=str(journal))
        print_line(f"[{host}] the store's journal {journal} is written again")


async def _serve_other_hosts(settings: AgentSettings, store: MemoryStore, limit_s: float | None) -> None:
    """Serve the store until the agents of all other hosts have ended, which need the store; or until Ctrl-C, or the
    end of the grace of a notice, which they may have got, too; or for `limit_s`, unless it is None.
    """
    loop, signaled = asyncio.get_running_loop(), asyncio.Event()

    def end_later(notice: signal.Signals) -> None:
        loop.call_later(settings.grace.find_s(notice, time.time()), signaled.set)

    loop.add_signal_handler(signal.SIGINT, signaled.set)
    if limit_s is not None:
        loop.call_later(limit_s, signaled.set)
    for number in list_handled_notices():
        loop.add_signal_handler(number, end_later, number)
    prefix = make_hosts_prefix(settings.job)
    before: list[str] = []
    while not signaled.is_set():
        _, found = await store.range(prefix)
        hosts = sorted(item.key.removeprefix(prefix) for item in found)
        if not hosts:
            return
        if hosts != before and limit_s is None:
            print_line(
                f"[{settings.host}] serving the store until these have ended: {', '.join(hosts)}; Ctrl-C ends it now"
            )
            before = hosts
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SERVING_POLL_INTERVAL_S):
                await signaled.wait()


async def _supervise(settings: AgentSettings, access: StoreAccess) -> JobOutcome:
    waiting = _WaitingForStore(f"[{settings.host}] waiting for the store at {access.address}")
    store = await access.connect(
        settings.config.store_timeout_s,
        lambda tried_s, _: waiting.update(tried_s),
        resume_timeout_s=settings.config.lease_ttl_s,
    )
    async with store:
        if isinstance(store, EtcdStore):
            check_lease_ttl(store, settings.config.lease_ttl_s)
        try:
            return await Agent(settings, store, print_line).run()
        except OSError as error:
            if error.errno not in EXHAUSTION_ERRNOS:
                raise
            raise OutOfResources(
                f"host {settings.host}: the machine refused this agent something: {error}; expected free descriptors "
                "(ulimit -n), processes (ulimit -u) and memory. This host leaves the job; raise the limit, and "
                "start its agent again"
            ) from error


class _WaitingForStore:
    """Prints every 10 s that the store does not answer yet; the agent tries several times a second."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._say_at_s = 0.0

    def update(self, tried_s: float) -> None:
        """Report a failed attempt, `tried_s` seconds after the first; at most one in 10 s is printed."""
        if tried_s >= self._say_at_s:
            print_line(f"{self._text} ({tried_s:.0f} s)")
            self._say_at_s = tried_s + WAITING_MESSAGE_INTERVAL_S


def _choose_store(
    store: str, credentials: Credentials, store_tls: Path | None, *, serve_here: bool
) -> StoreAccess:
    access = make_store_access(store, credentials, store_tls)
    if serve_here and access.is_etcd:
        raise CallerError(
            f"--serve-store: found it beside --store {access.address}, expected one of them: an etcd cluster serves "
            "the job's store itself"
        )
    return access


def _check_host(name: str, expected_hosts: int) -> None:
    if HOST_NAME_PATTERN.fullmatch(name) is None:
        raise CallerError(
            f"--host-name: found {name!r}, expected 1 to 64 letters, digits, '.', '-' or '_', and not only dots: files "
            "have this name. Choose another"
        )
    if expected_hosts < 1:
        raise CallerError(f"--num-hosts: found {expected_hosts}, expected at least 1")


def _choose_address(store: str, address: str | None) -> str:
    """Return the address of this host that was given, or else the one that reaches the store."""
    where = _parse_store(store)
    return _probe_address(where, store) if address is None else _check_address(address)


def _make_environment(
    directory: Path, platform: Platform | None, devices_per_host: int | None, config: JobConfig, address: str
) -> dict[str, str]:
    """Return the environment of workers; they reach their host at its address without a proxy."""
    numbers = socket.gethostbyname(address)
    return make_job_environment(
        os.environ,
        directory,
        platform,
        devices_per_host,
        config.collective_timeout_s,
        [] if ipaddress.ip_address(numbers).is_loopback else [numbers],
    )


def _check_address(address: str) -> str:
    """Return the given address of this host.

    Raises:
        CallerError: this host cannot listen there.
    """
    try:
        check_bindable(*parse_address(f"{address}:0"))
    except (OSError, UnicodeError, ConfigError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise CallerError(
            f"--address: found {address!r} ({reason}), expected an address of this host, such as 10.0.0.7. Without the "
            "option it is the one that reaches the store"
        ) from error
    return address


def _parse_store(store: str) -> tuple[str, int]:
    """Return host and port of the store, of a cluster of the member that is asked first."""
    try:
        return parse_address(EtcdAddress.parse(store).endpoints[0] if is_etcd_address(store) else store)
    except ConfigError as error:
        raise _unreachable(store, error) from error


def _probe_address(where: tuple[str, int], store: str) -> str:
    """Return the address of this host from which packets to the store would be sent; no packet is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(where)
            return probe.getsockname()[0]
    except (OSError, UnicodeError) as error:
        raise _unreachable(store, error) from error


def _unreachable(store: str, error: Exception) -> CallerError:
    return CallerError(
        f"--store {store}: found no address that can be reached ({error}), expected host:port, or {EXAMPLE}"
    )
