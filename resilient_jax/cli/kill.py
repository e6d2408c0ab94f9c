"""`resilient-jax kill`: kill a part of a running job on purpose."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from resilient_jax.cli.job_contact import JobOption, StoreOption, choose_job, read_live_contact
from resilient_jax.cli.log_sources import check_running, describe_silence
from resilient_jax.cli.options import StoreTlsOption, TlsOption
from resilient_jax.cluster.agent_calls import call_agents, send_signal
from resilient_jax.cluster.job_report import (
    JobComponent,
    find_hosts,
    find_pids,
    make_credentials,
    read_job_report,
)
from resilient_jax.cluster.run_directory import JobContact
from resilient_jax.errors import CallerError, OperatorError, PeerError
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.transport.channel import Channel

PARTS = ", ".join(component.value for component in JobComponent)


class KillTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be killed.

    Attributes:
        run_directory: folder of the job; None: the job is named by its store.
        component: the kind of processes.
        host: host of these processes; `leader`: the one that leads, and its service.
    """

    run_directory: Path | None
    component: JobComponent
    host: str


def kill(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN_DIR] PART [HOST]",
            help="Run folder of a job on this machine, unless --store is given; what to kill: worker, agent, service, "
            "snapshots or host; which host, by default `leader`: the one that leads, and its service.",
            show_default=False,
        ),
    ],
    store: StoreOption = None,
    job: JobOption = None,
    stop: Annotated[
        bool, typer.Option("--stop", help="Send SIGSTOP instead of SIGKILL: processes hang, and do not end.")
    ] = False,
    tls: TlsOption = None,
    store_tls: StoreTlsOption = None,
) -> None:
    """Kill a part of a running job, to see training continue.

    A job of agents on other machines is found by --store and --job, with their token in RESILIENT_JAX_TOKEN: the host's
    agent sends the signal. An agent that is stopped cannot.

    Example: resilient-jax kill runs/first worker host-1

    Example: resilient-jax kill --store etcd://a:2379,b:2379,c:2379 --job lm worker node-7
    """
    target = parse_target(words, has_folder=store is None and job is None)
    chosen = choose_job(target.run_directory, store, job, tls, store_tls)
    number = signal.SIGSTOP if stop else signal.SIGKILL
    if isinstance(chosen, Path):
        killed = _kill_here(read_live_contact(chosen), target, number)
        where = str(chosen)
    else:
        killed = asyncio.run(_kill_by_agents(chosen.make_contact(calls_agents=True), target, number))
        where = f"--store {chosen.store} --job {chosen.job}"
    if not killed:
        raise CallerError(
            f"kill: found no {target.component} on host {target.host} now, expected one that runs. See "
            f"`resilient-jax status {where}`"
        )
    pids = ", ".join(map(str, killed))
    sys.stdout.write(f"{number.name} to {target.component} on {target.host}: process {pids}\n")


def parse_target(words: Sequence[str], *, has_folder: bool) -> KillTarget:
    """Return what the arguments of `kill` mean.

    Args:
        words: the run folder if `has_folder`, then the part, then perhaps the host.
        has_folder: whether the job is named by its run folder.

    Raises:
        CallerError: there are too few or too many words, or there is no such part.
    """
    expected = "RUN_DIR PART [HOST]" if has_folder else "PART [HOST] beside --store and --job"
    rest = list(words[1:] if has_folder else words)
    if not 1 <= len(rest) <= 2:
        raise CallerError(f"kill: found {' '.join(words)!r}, expected {expected}, with PART one of {PARTS}")
    if has_folder and words[0] in set(JobComponent) and rest[0] not in set(JobComponent):
        raise CallerError(
            f"kill: found {' '.join(words)!r}, expected {expected}: RUN_DIR is missing, the job's run folder, "
            "which `launch` prints first"
        )
    if rest[0] not in set(JobComponent):
        raise CallerError(f"PART: found {rest[0]!r}, expected one of {PARTS} in {expected}")
    return KillTarget(
        run_directory=Path(words[0]) if has_folder else None,
        component=JobComponent(rest[0]),
        host=rest[1] if len(rest) > 1 else "leader",
    )


def _kill_here(contact: JobContact, target: KillTarget, number: signal.Signals) -> list[int]:
    """Send the signal from this process; return the processes."""
    report = asyncio.run(read_job_report(contact))
    killed = list(find_pids(report, target.component, target.host))
    for pid in killed:
        # The store's records lag behind, so the process may be dead already.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return killed


async def _kill_by_agents(contact: JobContact, target: KillTarget, number: signal.Signals) -> list[int]:
    """Have the agents of the hosts send the signal; return the processes.

    Raises:
        OperatorError: an agent did not answer.
    """
    report = await read_job_report(contact)
    check_running(report, contact)
    hosts = find_hosts(report, target.component, target.host)

    async def order(channel: Channel, host: HostStatus) -> tuple[int, ...]:
        return await send_signal(channel, host, target.component, is_stop=number is signal.SIGSTOP)

    answers = await call_agents(hosts, make_credentials(contact), order)
    silent = [
        describe_silence(host, answer)
        for host in hosts
        if isinstance(answer := answers[host.host], PeerError)
    ]
    killed = [pid for answer in answers.values() if not isinstance(answer, PeerError) for pid in answer]
    if silent:
        done = f"; {number.name} to {', '.join(map(str, killed))} on the others" if killed else ""
        raise OperatorError(
            f"{'; '.join(silent)}. On it `kill -{number.name.removeprefix('SIG')} PROCESS` does the same{done}"
        )
    return killed
