"""Carries out the records of this host's devices in quarantine: the worker is started again without, or with, a device.

Whoever finds that a device must not compute writes a record: the watch of GPUs, an operator, a chaos campaign. A host
that cannot do without the device is quarantined itself.
"""

import asyncio
import contextlib
from collections.abc import Mapping

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.device_quarantine import (
    follow_device_quarantine,
    quarantine_device,
    read_device_quarantine,
)
from resilient_jax.cluster.quarantine import quarantine_host
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.errors import PeerError
from resilient_jax.events import EventKind
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord

RETRY_INTERVAL_S = 1.0
"""How soon to follow the records again when the store did not answer."""
STORE_TIMEOUT_S = 3.0
"""For a record; it is tried again, and the device is out meanwhile."""


class DeviceWatch:
    """Follows the records of this host's devices.

    Args:
        context: of the agent.
        supervisor: of the worker.
    """

    def __init__(self, context: AgentContext, supervisor: WorkerSupervisor) -> None:
        self._context = context
        self._supervisor = supervisor
        self._unwritten: dict[int, DeviceQuarantineRecord] = {}
        """Records of this host's own that the store does not have yet: they count."""
        self._refused: set[DeviceQuarantineRecord] = set()
        """Of devices that this host does not have."""

    def make_record(self, device: int, reason: str) -> DeviceQuarantineRecord:
        """Return the record of a device of this host that is out from now on, for `quarantine_s`."""
        now_s, settings = self._context.clock.wall_s(), self._context.settings
        until_s = now_s + settings.config.quarantine_s
        return DeviceQuarantineRecord(
            host=settings.host, device=device, reason=reason, since_wall_s=now_s, until_wall_s=until_s
        )

    def can_spare(self, device: int) -> bool:
        """Return whether this host can do without one more device."""
        devices = self._context.devices
        num_devices = devices.num_devices
        if num_devices is None or not 0 <= device < num_devices:
            return False
        return bool(devices.select({*devices.records, *self._unwritten, device}))

    def leave_out(self, record: DeviceQuarantineRecord) -> None:
        """Leave a device out, at once: the worker that uses it is ended. The store is told by `take_out`."""
        self._unwritten[record.device] = record
        self._apply({**self._context.devices.records, **self._unwritten})

    async def take_out(self, record: DeviceQuarantineRecord) -> None:
        """Leave a device out, and write that in the store, however long that takes."""
        self.leave_out(record)
        while True:
            with contextlib.suppress(PeerError, TimeoutError):
                async with asyncio.timeout(STORE_TIMEOUT_S):
                    await quarantine_device(self._context, record)
                    return
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def begin(self) -> None:
        """Leave out, before the first worker starts, what is in quarantine since an earlier agent."""
        with contextlib.suppress(PeerError):  # `run` reads them again
            settings = self._context.settings
            found = await read_device_quarantine(self._context.store, settings.job, settings.host)
            await self._carry_out(found)

    async def run(self) -> None:
        """Carry out each change of the records, until cancelled."""
        settings, store = self._context.settings, self._context.store
        while True:
            with contextlib.suppress(PeerError):
                following = follow_device_quarantine(store, settings.job, settings.host)
                async with contextlib.aclosing(following) as changes:
                    async for records in changes:
                        await self._carry_out(records)
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _carry_out(self, found: tuple[DeviceQuarantineRecord, ...]) -> None:
        """Have the worker use other devices, or quarantine the host.

        Raises:
            PeerError: the store did not answer.
        """
        devices = self._context.devices
        written = {record.device: record for record in found if self._is_there(record)}
        self._unwritten = {
            device: record for device, record in self._unwritten.items() if written.get(device) != record
        }
        records = {**written, **self._unwritten}
        new = [record for device, record in records.items() if devices.records.get(device) != record]
        if devices.select(records) or not records:
            self._apply(records)
            return
        devices.records = records
        if new:
            await quarantine_host(self._context, self._context.settings.host, self._explain(new[0]))

    def _apply(self, records: Mapping[int, DeviceQuarantineRecord]) -> None:
        devices, context = self._context.devices, self._context
        before = devices.records
        if not devices.take_out(records):
            return
        out = [record for device, record in records.items() if device not in before]
        why = f"device {out[0].device} is out: {out[0].reason}" if out else "a device is back"
        context.log.record(
            EventKind.DEVICES_CHANGED,
            devices=", ".join(map(str, devices.used)),
            num_devices=devices.num_devices or 0,
            why=why,
        )
        context.print_line(f"{context.settings.host}: trains on {devices.describe() or 'all devices'}: {why}")
        self._supervisor.seat_standby.fail(why, is_retried=True)
        worker = self._supervisor.worker
        if worker is not None and not worker.report.is_done:
            self._supervisor.kill(why, costs_restart=False)

    def _is_there(self, record: DeviceQuarantineRecord) -> bool:
        """Return whether this host may have such a device; print it once if not."""
        num_devices = self._context.devices.num_devices
        if num_devices is None or record.device < num_devices:
            return True
        if record not in self._refused:
            self._refused.add(record)
            self._context.print_line(f"{record.label}: there is no such device: this host has {num_devices}")
        return False

    def _explain(self, record: DeviceQuarantineRecord) -> str:
        num_devices = self._context.devices.num_devices
        of = "" if num_devices is None else f" of {num_devices}"
        return f"device {record.device}{of} is out, and the host cannot do without it: {record.reason}"
