"""`resilient-jax hosts`: the hosts and devices of a job that take no part for a while."""

import asyncio
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from resilient_jax.cli.job_contact import JobOption, StoreOption, choose_job, read_live_contact
from resilient_jax.cli.options import StoreTlsOption, TlsOption
from resilient_jax.cluster.device_quarantine import (
    clear_device_quarantine,
    read_device_quarantine,
    write_device_quarantine,
)
from resilient_jax.cluster.host_devices import HOW_TO_KNOW
from resilient_jax.cluster.job_report import CONNECT_TIMEOUT_S, make_credentials
from resilient_jax.cluster.quarantine import clear_quarantine, read_quarantine, write_quarantine
from resilient_jax.cluster.run_directory import JobContact
from resilient_jax.cluster.stored_records import decode_record
from resilient_jax.errors import CallerError
from resilient_jax.ids import HostName, JobName
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord, QuarantineRecord
from resilient_jax.protocol.store_keys import make_host_key, make_hosts_prefix
from resilient_jax.store.interface import Store
from resilient_jax.store.store_access import make_store_access

DRAINED = "drained by `resilient-jax hosts`"
ACTIONS = ("list", "clear", "drain")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """What is to be done.

    Attributes:
        run_directory: folder of the job; None: the job is named by its store.
        action: `list`, `clear` or `drain`.
        host: host that the action is for; empty for `list`.
        device: number of the device that the action is for, from 0; None: the action is for the host itself.
    """

    run_directory: Path | None
    action: str
    host: str
    device: int | None = None


def hosts(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[RUN_DIR] list|clear HOST[:DEVICE]|drain HOST[:DEVICE]",
            help="Run folder of a job on this machine, unless --store is given; then what to do: `list` the hosts and "
            "devices in quarantine, `clear` one, or `drain` one. A drained host leaves between two steps; for "
            "a drained device, such as host-2:0, its host's worker is started again without it.",
            show_default=False,
        ),
    ],
    duration_s: Annotated[
        float, typer.Option("--for", help="Seconds for which a drained host or device takes no part.", min=1)
    ] = 3600.0,
    store: StoreOption = None,
    job: JobOption = None,
    tls: TlsOption = None,
    store_tls: StoreTlsOption = None,
) -> None:
    """Show hosts and devices in quarantine, end a quarantine, or take one out of a running job for a while.

    The worker of a drained host stays ready, and joins again when the time is over, or the quarantine is cleared. The
    host of a drained device stays a member: its worker is started again when the device goes, and when it is back; see
    `devices_after_loss`.

    Example: resilient-jax hosts runs/first drain host-2 --for 600

    Example: resilient-jax hosts runs/first drain host-2:0

    Example: resilient-jax hosts --store etcd://a:2379,b:2379,c:2379 --job lm list
    """
    order = parse_order(words, has_folder=store is None and job is None)
    chosen = choose_job(order.run_directory, store, job, tls, store_tls)
    contact = (
        read_live_contact(chosen) if isinstance(chosen, Path) else chosen.make_contact(calls_agents=False)
    )
    sys.stdout.write(asyncio.run(_carry_out(contact, order, duration_s)) + "\n")


def parse_order(words: Sequence[str], *, has_folder: bool) -> HostOrder:
    """Return what the arguments of `hosts` mean.

    Args:
        words: the run folder if `has_folder`, then the action, then its host.
        has_folder: whether the job is named by its run folder.

    Raises:
        CallerError: there are too few or too many words, or there is no such action.
    """
    rest = list(words[1:] if has_folder else words)
    action = rest[0] if rest else ""
    num_expected = 1 if action == "list" else 2
    if action not in ACTIONS or len(rest) != num_expected:
        expected = "RUN_DIR and" if has_folder else "beside --store and --job"
        raise CallerError(
            f"hosts: found {' '.join(words)!r}, expected {expected} one of: list, clear HOST[:DEVICE], drain "
            "HOST[:DEVICE]"
        )
    host, colon, device = (rest[1] if len(rest) > 1 else "").partition(":")
    if colon and not device.isdecimal():
        raise CallerError(
            f"hosts {action}: found {rest[1]!r}, expected HOST, or HOST:DEVICE with the number of a device, from 0"
        )
    return HostOrder(
        run_directory=Path(words[0]) if has_folder else None,
        action=action,
        host=host,
        device=int(device) if colon else None,
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
            return await _list(store, job)
        if order.action == "drain":
            if order.device is not None:
                return await _drain_device(store, job, host, order.device, duration_s)
            return await _drain(store, job, host, duration_s)
        if order.device is None:
            is_cleared, named = await clear_quarantine(store, job, host), f"{host}"
        else:
            is_cleared = await clear_device_quarantine(store, job, host, order.device)
            named = f"{host}:{order.device}"
        if not is_cleared:
            raise CallerError(
                f"hosts clear {named}: found no quarantine of it, expected one of:\n{await _list(store, job)}"
            )
        return f"{named}: may take part again"


async def _list(store: Store, job: JobName) -> str:
    hosts, devices = await read_quarantine(store, job), await read_device_quarantine(store, job)
    return describe_quarantine(hosts, time.time(), devices)


async def _drain_device(store: Store, job: JobName, host: HostName, device: int, duration_s: float) -> str:
    """Write that a device is out.

    Raises:
        CallerError: the job has no such host, the host no such device, or it does not know how many it has.
    """
    status = await _read_host(store, job, host)
    num_devices = status.devices.num_devices
    if device >= num_devices:
        raise CallerError(
            f"hosts drain {host}:{device}: found no such device, expected a number below {num_devices}: the devices "
            "of the host, from 0, as its worker sees them if none is out"
            if num_devices
            else f"hosts drain {host}:{device}: found a host of which only JAX knows its devices, expected one that "
            f"can start its worker without one of them. {HOW_TO_KNOW}"
        )
    now_s = time.time()
    record = DeviceQuarantineRecord(
        host=host,
        device=device,
        reason=DRAINED,
        since_wall_s=now_s,
        until_wall_s=now_s + duration_s,
        uuid=status.devices.gpu_uuids[device] if status.devices.gpu_uuids else "",
    )
    await write_device_quarantine(store, job, record)
    return (
        f"{record.label}: computes nothing for {duration_s:g} s; the worker of {host} is started again without it "
        "when others have all of the state"
    )


async def _read_host(store: Store, job: JobName, host: HostName) -> HostStatus:
    stored = await store.get(make_host_key(job, host))
    if stored is None:
        _, found = await store.range(make_hosts_prefix(job))
        known = ", ".join(sorted(decode_record(one, HostStatus).host for one in found)) or "none"
        raise CallerError(f"host {host}: found no such host in the job, expected one of: {known}")
    return decode_record(stored, HostStatus)


async def _drain(store: Store, job: JobName, host: HostName, duration_s: float) -> str:
    now_s = time.time()
    record = QuarantineRecord(host=host, reason=DRAINED, since_wall_s=now_s, until_wall_s=now_s + duration_s)
    await write_quarantine(store, job, record)
    return f"{host}: leaves between two steps, and takes no part for {duration_s:g} s"


def describe_quarantine(
    records: Sequence[QuarantineRecord], now_s: float, devices: Sequence[DeviceQuarantineRecord] = ()
) -> str:
    """Return a line for each host and device in quarantine, such as "host-2: for 3540 s more: the worker died 6 times".

    Args:
        records: hosts in quarantine.
        now_s: the wall clock, in seconds since 1970.
        devices: devices in quarantine, whose lines begin with a label such as host-2:0.
    """
    if not records and not devices:
        return "no host or device is in quarantine"
    named = [
        *((str(record.host), record) for record in records),
        *((record.label, record) for record in devices),
    ]
    return "\n".join(
        f"{name}: for {max(record.until_wall_s - now_s, 0):.0f} s more: {record.reason}"
        for name, record in named
    )
