"""Carries out the records of this host's devices in quarantine: the worker is started again without, or with, a device.

Whoever finds that a device must not compute writes a record: the watch of GPUs, an operator, a chaos campaign. A host
that cannot do without the device is quarantined itself, until the device is back. A worker whose device failed is ended
at once; else `worker_replacement` says when.
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
from resilient_jax.cluster.host_devices import HOW_TO_KNOW
from resilient_jax.cluster.quarantine import clear_quarantine, quarantine_host, read_quarantine
from resilient_jax.cluster.worker_replacement import WorkerReplacement, end_if_outdated
from resilient_jax.cluster.worker_supervisor import WorkerSupervisor
from resilient_jax.errors import JoinRefused, PeerError, ScriptRefused
from resilient_jax.events import Event, EventKind
from resilient_jax.ids import Revision
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord

RETRY_INTERVAL_S = 1.0
"""How soon to follow the records again when the store did not answer."""
STORE_TIMEOUT_S = 3.0
"""For a record; it is tried again, and the device is out meanwhile."""
RETURN_GRACE_S = 30.0
"""How much longer than a device its host is in quarantine, which ends sooner once its worker sees the device."""


class DeviceWatch:
    """Follows the records of this host's devices."""

    def __init__(self, context: AgentContext, supervisor: WorkerSupervisor) -> None:
        self._context = context
        self._supervisor = supervisor
        self._unwritten: dict[int, DeviceQuarantineRecord] = {}
        """Records of this host's own that the store does not have yet: they count."""
        self._revisions: dict[int, Revision] = {}
        """Of the store, with those that have been written since; they count until they are read."""
        self._is_unwritten = asyncio.Event()
        self._found: tuple[DeviceQuarantineRecord, ...] = ()
        """What was read last."""
        self._host_reason, self._host_until_s = "", 0.0
        """Of the quarantine of the host, if this watch has written one."""
        self._is_judged_again = asyncio.Event()
        self._replacement = WorkerReplacement(context, supervisor)
        supervisor.on_event = self._hear
        self._refused: set[DeviceQuarantineRecord] = set()
        """Of devices that this host does not have."""

    def make_record(self, device: int, reason: str) -> DeviceQuarantineRecord:
        """Return the record of a device of this host that is out from now on, for `quarantine_s`."""
        now_s, settings = self._context.clock.wall_s(), self._context.settings
        until_s = now_s + settings.config.quarantine_s
        uuids = self._context.devices.uuids
        return DeviceQuarantineRecord(
            host=settings.host,
            device=device,
            reason=reason,
            since_wall_s=now_s,
            until_wall_s=until_s,
            uuid=uuids[device] if uuids else "",
        )

    def can_spare(self, device: int) -> bool:
        """Return whether this host can do without one more device."""
        devices = self._context.devices
        num_devices = devices.num_devices
        if num_devices is None or not 0 <= device < num_devices:
            return False
        return bool(devices.select({*devices.records, *self._unwritten, device}))

    def leave_out(self, record: DeviceQuarantineRecord, *, at_once: bool) -> None:
        """Leave a device out of workers that start from now on; `run` writes that in the store.

        Args:
            at_once: True: end the worker now, because what the device computes is lost or wrong; False: when others
                have all of the state.
        """
        self._unwritten[record.device] = record
        self._revisions.pop(record.device, None)
        self._is_unwritten.set()
        self._apply({**self._context.devices.records, **self._unwritten})
        if at_once:
            why = f"device {record.device} is out: {record.reason}"
            end_if_outdated(self._context, self._supervisor, why)

    def _hear(self, event: Event) -> JoinRefused | None:
        """Have the host take no part while it lacks devices, if the worker needs all; for good if it has no more."""
        if event.kind is not EventKind.DEVICES_REQUIRED:
            return None
        devices = self._context.devices
        devices.requires_all = True
        self._is_judged_again.set()
        why = event.detail["why"]
        if why and not devices.records:
            return ScriptRefused(f"host {self._context.settings.host} leaves the job. {why}")
        if why:
            self._supervisor.kill(str(why), costs_restart=False)
        return None

    async def begin(self) -> None:
        """Leave out, before the first worker starts, what is in quarantine since an earlier agent."""
        with contextlib.suppress(PeerError):  # `run` reads them again
            settings = self._context.settings
            found = await read_device_quarantine(self._context.store, settings.job, settings.host)
            await self._carry_out(found)

    async def run(self) -> None:
        """Carry out each change of the records, and write those of this host's own, until cancelled.

        Raises:
            JoinRefused: a record in the store is no record of a device.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow())
                tasks.create_task(self._write())
                tasks.create_task(self._judge_again())
                tasks.create_task(self._replacement.run())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _follow(self) -> None:
        settings, store = self._context.settings, self._context.store
        while True:
            with contextlib.suppress(PeerError):
                following = follow_device_quarantine(store, settings.job, settings.host)
                async with contextlib.aclosing(following) as changes:
                    async for revision, records in changes:
                        self._drop_written(revision)
                        await self._carry_out(records)
            await asyncio.sleep(RETRY_INTERVAL_S)

    async def _write(self) -> None:
        """Write what was left out without the store, however long that takes."""
        while True:
            self._is_unwritten.clear()
            for record in [one for one in self._unwritten.values() if one.device not in self._revisions]:
                with contextlib.suppress(PeerError, TimeoutError):
                    async with asyncio.timeout(STORE_TIMEOUT_S):
                        revision = await quarantine_device(self._context, record)
                    if self._unwritten.get(record.device) is record:
                        self._revisions[record.device] = revision
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_INTERVAL_S):
                    await self._is_unwritten.wait()

    def _drop_written(self, revision: Revision) -> None:
        """Forget records that were in the store before this revision: what was read there counts from now on."""
        for device in [one for one, written in self._revisions.items() if written <= revision]:
            del self._revisions[device], self._unwritten[device]

    async def _judge_again(self) -> None:
        """Look at the records again when the worker has said that it needs all devices."""
        while True:
            await self._is_judged_again.wait()
            self._is_judged_again.clear()
            self._host_until_s = 0.0
            while True:
                with contextlib.suppress(PeerError):
                    await self._carry_out(self._found)
                    break
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _carry_out(self, found: tuple[DeviceQuarantineRecord, ...]) -> None:
        """Have the worker use other devices, or quarantine the host.

        Raises:
            PeerError: the store did not answer; to be called again.
        """
        self._found = found
        devices = self._context.devices
        located = {self._locate(record): record for record in found}
        records = {
            number: record for number, record in located.items() if number is not None
        } | self._unwritten
        if records and not devices.select(records):
            await self._quarantine_host(records)
            devices.records = records
            return
        self._apply(records)
        await self._end_quarantine()

    async def _quarantine_host(self, records: Mapping[int, DeviceQuarantineRecord]) -> None:
        """Quarantine the host until it can do without the devices that are out then."""
        devices, context = self._context.devices, self._context
        until_s = devices.find_return_s(records) + RETURN_GRACE_S
        if until_s == self._host_until_s:
            return
        new = [record for device, record in records.items() if devices.records.get(device) != record]
        reason = self._explain((new or list(records.values()))[0])
        await quarantine_host(context, context.settings.host, reason, until_wall_s=until_s)
        self._host_until_s, self._host_reason = until_s, reason

    async def _end_quarantine(self) -> None:
        """End the quarantine that this watch has written, and no other's."""
        if not self._host_reason:
            return
        # Before the host may join: the worker sees too few devices, and a leader may form a generation with it until
        # its end is known.
        worker = self._supervisor.worker
        end_if_outdated(self._context, self._supervisor, "a device is back")
        if worker is not None and worker.is_outdated(self._context.devices.settings):
            await worker.child.wait_exited()
        settings, store = self._context.settings, self._context.store
        reasons = {one.host: one.reason for one in await read_quarantine(store, settings.job)}
        if reasons.get(settings.host) == self._host_reason:
            await clear_quarantine(store, settings.job, settings.host)
        self._host_reason, self._host_until_s = "", 0.0

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
        number = f"{devices.num_used} of {devices.num_devices}" if devices.num_used else "all"
        context.print_line(f"{context.settings.host}: trains on {number} devices: {why}")
        self._supervisor.standby.fail(why, is_retried=True)
        self._replacement.begin(why)

    def _locate(self, record: DeviceQuarantineRecord) -> int | None:
        """Return the number of a record's device; None, which is printed once, if there is none or it is not known."""
        devices = self._context.devices
        number = devices.locate(record)
        if number is None and record not in self._refused:
            self._refused.add(record)
            why = f"there is no such device: this host has {devices.num_devices}"
            if devices.num_devices is None:
                why = f"it is not left out: how many devices this host has is not known. {HOW_TO_KNOW}"
            elif record.uuid:
                why = f"GPU {record.uuid} is not there any more"
            self._context.print_line(f"{record.label}: {why}")
        return number

    def _explain(self, record: DeviceQuarantineRecord) -> str:
        num_devices = self._context.devices.num_devices
        return f"device {record.device} of {num_devices} is out, and the host cannot do without it: {record.reason}"
