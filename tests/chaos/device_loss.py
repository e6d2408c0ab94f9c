"""Takes a device of a host out, by the record that a host's own watch of its GPUs writes."""

import time
from collections.abc import Callable
from pathlib import Path

from resilient_jax.cluster.device_quarantine import clear_device_quarantine, write_device_quarantine
from resilient_jax.cluster.job_report import CONNECT_TIMEOUT_S, make_credentials
from resilient_jax.cluster.run_directory import JobContact, read_contact
from resilient_jax.errors import ResilientJaxError
from resilient_jax.ids import HostName, JobName
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord
from resilient_jax.store.store_access import make_store_access
from resilient_jax.transport.event_loop_thread import share_event_loop

REASON = "taken out by the chaos campaign"


def lose_device(run_directory: Path, host: str, device: int, duration_s: float) -> Callable[[], None]:
    """Take a device out for a while; return the function that brings it back sooner.

    Args:
        run_directory: of the job, in which the device's host is.
        host: the host.
        device: its number on that host, from 0.
        duration_s: after which the record ends by itself.

    Raises:
        CallerError: no job runs there.
        OSError: the store does not answer.
    """
    contact = read_contact(run_directory)
    now_s = time.time()
    record = DeviceQuarantineRecord(
        host=HostName(host),
        device=device,
        reason=REASON,
        since_wall_s=now_s,
        until_wall_s=now_s + duration_s,
    )
    try:
        share_event_loop().run(_write(contact, record))
    except ResilientJaxError as error:
        raise OSError(str(error)) from error

    def bring_back() -> None:
        # The job may be over; and the record ends by itself.
        try:
            share_event_loop().run(_clear(contact, record))
        except ResilientJaxError:
            return

    return bring_back


async def _write(contact: JobContact, record: DeviceQuarantineRecord) -> None:
    store_tls = Path(contact.store_tls) if contact.store_tls else None
    access = make_store_access(contact.store, make_credentials(contact), store_tls)
    async with await access.connect(CONNECT_TIMEOUT_S) as store:
        await write_device_quarantine(store, JobName(contact.job), record)


async def _clear(contact: JobContact, record: DeviceQuarantineRecord) -> None:
    store_tls = Path(contact.store_tls) if contact.store_tls else None
    access = make_store_access(contact.store, make_credentials(contact), store_tls)
    async with await access.connect(CONNECT_TIMEOUT_S) as store:
        await clear_device_quarantine(store, JobName(contact.job), record.host, record.device)
