"""The records of devices in quarantine: they end with their leases, or when an operator clears them."""

import contextlib
from collections.abc import AsyncGenerator

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.quarantine import require_leader
from resilient_jax.cluster.stored_records import ENCODER, decode_record
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, JobName, Revision
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord
from resilient_jax.protocol.store_keys import make_device_key, make_devices_prefix
from resilient_jax.store.interface import Compare, DeleteOp, PutOp, Store, TransactionResult


async def quarantine_device(
    context: AgentContext, record: DeviceQuarantineRecord, *, leader_token: Revision | None = None
) -> Revision:
    """Write that a device is out, and record it; return the store's revision that has it.

    Args:
        record: record of a device of this host, or of any host if the agent leads.
        leader_token: token of the leader that decides; nothing is written if another leads by now. None: the agent of
            the device's host decides.

    Raises:
        PeerError: the store did not answer.
    """
    settings = context.settings
    written = await _write(context.store, settings.job, record, require_leader(settings.job, leader_token))
    if not written.succeeded:
        return written.revision
    seconds = record.until_wall_s - record.since_wall_s
    context.log.record(
        EventKind.DEVICE_QUARANTINED,
        quarantined=record.host,
        device=record.device,
        seconds=seconds,
        reason=record.reason,
    )
    context.print_line(
        f"{record.host}: device {record.device} is in quarantine for {seconds:g} s: {record.reason}"
    )
    return written.revision


async def write_device_quarantine(store: Store, job: JobName, record: DeviceQuarantineRecord) -> Revision:
    """Write a record that ends with a lease, and return its revision; the host's agent carries it out."""
    return (await _write(store, job, record, [])).revision


async def _write(
    store: Store, job: JobName, record: DeviceQuarantineRecord, compares: list[Compare]
) -> TransactionResult:
    lease = await store.grant(max(record.until_wall_s - record.since_wall_s, 1.0))
    key = make_device_key(job, record.host, record.device)
    return await store.transaction(compares, [PutOp(key, ENCODER.encode(record), lease)])


async def read_device_quarantine(
    store: Store, job: JobName, host: HostName | None = None
) -> tuple[DeviceQuarantineRecord, ...]:
    """Return the records of all devices of a host that are in quarantine; None: of all hosts."""
    _, found = await store.range(make_devices_prefix(job, host))
    return tuple(decode_record(record, DeviceQuarantineRecord) for record in found)


async def clear_device_quarantine(store: Store, job: JobName, host: HostName, device: int) -> bool:
    """End a device's quarantine; return whether it was in one."""
    key = make_device_key(job, host, device)
    if await store.get(key) is None:
        return False
    await store.transaction([], [DeleteOp(key)])
    return True


async def follow_device_quarantine(
    store: Store, job: JobName, host: HostName
) -> AsyncGenerator[tuple[Revision, tuple[DeviceQuarantineRecord, ...]], None]:
    """Yield the records of a host's devices, and the revision, now and after each change, until the watch fails."""
    prefix = make_devices_prefix(job, host)
    revision, found = await store.range(prefix)
    yield revision, tuple(decode_record(record, DeviceQuarantineRecord) for record in found)
    async with contextlib.aclosing(store.watch(prefix, Revision(revision + 1))) as batches:
        async for _ in batches:
            now, found = await store.range(prefix)
            yield now, tuple(decode_record(record, DeviceQuarantineRecord) for record in found)
