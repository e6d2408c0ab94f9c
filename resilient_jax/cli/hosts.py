"""`resilient-jax hosts`: the hosts of a job that take no part for a while."""

import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from resilient_jax.cli.job_contact import JobOption, StoreOption, choose_job, find_contact
from resilient_jax.cli.options import StoreTlsOption, TlsOption
from resilient_jax.cluster.job_report import CONNECT_TIMEOUT_S, make_credentials
from resilient_jax.cluster.quarantine import clear_quarantine, read_quarantine, write_quarantine
from resilient_jax.cluster.run_directory import JobContact
from resilient_jax.errors import CallerError
from resilient_jax.ids import HostName, JobName
from resilient_jax.protocol.quarantine import QuarantineRecord
from resilient_jax.store.interface import Store
from resilient_jax.store.store_access import make_store_access

ACTIONS = ("list", "clear", "drain")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """What is to be done.

    Attributes:
        run_directory: of the job; None: the job is named by its store.
        action: one of `ACTIONS`.
        host: to which host; empty for `list`.
    """

    run_directory: Path | None
    action: str
    host: str


def hosts(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN_DIR] list|clear HOST|drain HOST",
            help="Run folder of a job on this machine, unless --store is given; then what to do: `list` the hosts in "
            "quarantine, `clear` one, or `drain` one, which then leaves at the next step boundary.",
            show_default=False,
        ),
    ],
    duration_s: Annotated[
        float, typer.Option("--for", help="Seconds for which a drained host takes no part.", min=1)
    ] = 3600.0,
    store: StoreOption = None,
    job: JobOption = None,
    tls: TlsOption = None,
    store_tls: StoreTlsOption = None,
) -> None:
    """Show hosts in quarantine, end a quarantine, or take a host out of a running job for a while.

    The worker of a drained host stays ready, and joins again when the time is over, or the quarantine is cleared.

    Example: resilient-jax hosts runs/first drain host-2 --for 600

    Example: resilient-jax hosts --store etcd://a:2379,b:2379,c:2379 --job lm list
    """
    order = parse_order(words, has_folder=store is None and job is None)
    chosen = choose_job(order.run_directory, store, job, tls, store_tls)
    contact = find_contact(chosen) if isinstance(chosen, Path) else chosen.make_contact(calls_agents=False)
    sys.stdout.write(asyncio.run(_carry_out(contact, order, duration_s)) + "\n")


def parse_order(words: Sequence[str], *, has_folder: bool) -> HostOrder:
    """Return what the arguments of `hosts` mean.

    Args:
        words: the run folder if `has_folder`, then the action, then its host.
        has_folder: whether the job is named by its run folder.

    Raises:
        CallerError: there are too few or too many, or there is no such action.
    """
    rest = list(words[1:] if has_folder else words)
    action = rest[0] if rest else ""
    num_expected = 1 if action == "list" else 2
    if action not in ACTIONS or len(rest) != num_expected:
        expected = "RUN_DIR and" if has_folder else "beside --store and --job"
        raise CallerError(
            f"hosts: found {' '.join(words)!r}, expected {expected} one of: list, clear HOST, drain HOST"
        )
    return HostOrder(
        run_directory=Path(words[0]) if has_folder else None,
        action=action,
        host=rest[1] if len(rest) > 1 else "",
    )


async def _carry_out(contact: JobContact, order: HostOrder, duration_s: float) -> str:
    """Return what to print.

    Raises:
        CallerError: the host is in no quarantine.
        StoreUnreachable: the store does not answer.
    """
    job, host = JobName(contact.job), HostName(order.host)
    store_tls = Path(contact.store_tls) if contact.store_tls else None
    access = make_store_access(contact.store, make_credentials(contact), store_tls)
    async with await access.connect(CONNECT_TIMEOUT_S) as store:
        if order.action == "list":
            return describe_quarantine(await read_quarantine(store, job), time.time())
        if order.action == "drain":
            return await _drain(store, job, host, duration_s)
        if not await clear_quarantine(store, job, host):
            listed = describe_quarantine(await read_quarantine(store, job), time.time())
            raise CallerError(
                f"hosts clear {host}: found no quarantine of this host, expected one of:\n{listed}"
            )
        return f"{host}: may take part again"


async def _drain(store: Store, job: JobName, host: HostName, duration_s: float) -> str:
    now_s = time.time()
    reason = "drained by `resilient-jax hosts`"
    record = QuarantineRecord(host=host, reason=reason, since_wall_s=now_s, until_wall_s=now_s + duration_s)
    await write_quarantine(store, job, record)
    return f"{host}: leaves at the next step boundary, and takes no part for {duration_s:g} s"


def describe_quarantine(records: Sequence[QuarantineRecord], now_s: float) -> str:
    """Return a line for each host in quarantine, such as "host-2: for 3540 s more: the worker died 6 times"."""
    if not records:
        return "no host is in quarantine"
    return "\n".join(
        f"{record.host}: for {max(record.until_wall_s - now_s, 0):.0f} s more: {record.reason}"
        for record in records
    )
