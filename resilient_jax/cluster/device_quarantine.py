"""The records of devices in quarantine: they end with their leases, or when an operator clears them."""

import contextlib
from collections.abc import AsyncGenerator

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.stored_records import ENCODER, decode_device_quarantine
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName, JobName, Revision
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord
from resilient_jax.protocol.store_keys import make_device_key, make_devices_prefix
from resilient_jax.store.interface import DeleteOp, PutOp, Store


async def quarantine_device(context: AgentContext, record: DeviceQuarantineRecord) -> Revision:
    """Write that a device of this host is out, and record it; return the store's revision that has it.

    Raises:
        PeerError: the store did not answer.
    """
    revision = await write_device_quarantine(context.store, context.settings.job, record)
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
    return revision


async def write_device_quarantine(store: Store, job: JobName, record: DeviceQuarantineRecord) -> Revision:
    """Write a record that ends with a lease, and return its revision; the host's agent carries it out."""
    lease = await store.grant(max(record.until_wall_s - record.since_wall_s, 1.0))
    key = make_device_key(job, record.host, record.device)
    return (await store.transaction([], [PutOp(key, ENCODER.encode(record), lease)])).revision


async def read_device_quarantine(
    store: Store, job: JobName, host: HostName | None = None
) -> tuple[DeviceQuarantineRecord, ...]:
    """Return the records of all devices of a host that are in quarantine; None: of all hosts."""
    _, found = await store.range(make_devices_prefix(job, host))
    return tuple(decode_device_quarantine(record) for record in found)


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
    yield revision, tuple(decode_device_quarantine(record) for record in found)
    async with contextlib.aclosing(store.watch(prefix, Revision(revision + 1))) as batches:
        async for _ in batches:
            now, found = await store.range(prefix)
            yield now, tuple(decode_device_quarantine(record) for record in found)
