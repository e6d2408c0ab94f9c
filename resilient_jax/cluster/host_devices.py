"""The devices of an agent's host: how many there are, which of them are out, and what its workers see of them."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Final

from resilient_jax.cluster.agent_settings import AgentSettings
from resilient_jax.cluster.device_selection import count_devices, list_named_gpus, restrict_environment
from resilient_jax.ids import Incarnation
from resilient_jax.policy.devices_after_loss import select_devices
from resilient_jax.protocol.host_status import DevicesStatus
from resilient_jax.protocol.quarantine import DeviceQuarantineRecord

UUID_PREFIX: Final = "GPU-"
HOW_TO_KNOW: Final = (
    "Drain the host, or install resilient-jax[gpu-health] and name whole GPUs, not parts of them, in "
    "CUDA_VISIBLE_DEVICES"
)
"""What an operator can do who wants to leave out a device of a host whose devices are not known."""


class HostDevices:
    """What the agent knows of its host's devices. Workers that start from now on see what it says.

    Attributes:
        settings: settings of the agent for a worker that starts now, with the environment and the number of the devices
            left.
        records: why devices are out, by number.
        ended_for_return: last worker that was ended because a device was back, while none of the worker's own was out;
            0: no worker.
        requires_all: whether the worker needs all devices, whatever `devices_after_loss` says.
        gpu_names: names of the GPUs that workers see, as `CUDA_VISIBLE_DEVICES` has them; (): there are no GPUs, or
            names are not known.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self._all = settings
        self.settings = settings
        self.requires_all = False
        self.ended_for_return = Incarnation(0)
        self.records: dict[int, DeviceQuarantineRecord] = {}
        self.gpu_names: tuple[str, ...] = list_named_gpus(settings.environment)

    @property
    def num_devices(self) -> int | None:
        """All devices of this host; None: only JAX knows."""
        settings = self._all
        return count_devices(settings.environment, settings.devices_per_host, self.gpu_names)

    @property
    def used(self) -> tuple[int, ...]:
        """The devices that workers use which start now; (): all, or none is left.

        Those that were used before stay, if as many are to be used and none of them is out.
        """
        found, before = self.select(self.records), self.settings.devices
        is_sound = self.records.keys().isdisjoint(before)
        return before if is_sound and len(before) == len(found) else found

    @property
    def num_standby(self) -> int:
        """How many devices are sound, and not used by workers that start now."""
        used, num_devices = self.used, self.num_devices
        return (num_devices or 0) - len(self.records) - len(used) if used else 0

    @property
    def uuids(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs, in order of their numbers; (): they are not known."""
        names = self.gpu_names
        return names if names and all(name.startswith(UUID_PREFIX) for name in names) else ()

    def locate(self, record: DeviceQuarantineRecord) -> int | None:
        """Return the number that the device of a record has now; None: there is no such device, or it is not known.

        A GPU is found by its UUID: without one that is gone, the others have other numbers.
        """
        if record.uuid and self.uuids:
            return self.uuids.index(record.uuid) if record.uuid in self.uuids else None
        num_devices = self.num_devices
        return record.device if num_devices is not None and record.device < num_devices else None

    def select(self, lost: Collection[int]) -> tuple[int, ...]:
        """Return the devices that workers use if these are out; () if the host cannot do without them."""
        if self.num_devices is None:
            return ()
        after_loss = "host" if self.requires_all else self._all.config.devices_after_loss
        return select_devices(self.num_devices, lost, after_loss)

    def find_return_s(self, records: Mapping[int, DeviceQuarantineRecord]) -> float:
        """Return when, by the wall clock, so few of these devices are out that the host can do without them."""
        for end_s in sorted({record.until_wall_s for record in records.values()}):
            lost = [device for device, record in records.items() if record.until_wall_s > end_s]
            if not lost or self.select(lost):
                return end_s
        return 0.0

    def take_out(self, records: Mapping[int, DeviceQuarantineRecord]) -> bool:
        """Have these devices out, and no others; return whether workers that run use others than those that start now.

        Nothing changes for workers if the host cannot do without the devices: then it must take no part.
        """
        before, self.records = self.settings, dict(records)
        used = self.used
        if records and not used:
            return False
        if not records or len(used) == self.num_devices:
            self.settings = self._all
        else:
            environment = restrict_environment(self._all.environment, used, self.gpu_names)
            self.settings = dataclasses.replace(
                self._all, environment=environment, devices_per_host=len(used), devices=used
            )
        return self.settings != before

    @property
    def num_used(self) -> int:
        """How many devices workers use that start now; 0: all, or none is left."""
        num_used = len(self.used)
        return num_used if num_used != self.num_devices else 0

    def describe(self, gpu_notes: tuple[str, ...]) -> DevicesStatus:
        """Return what the host's status says of its devices, with what is wrong with GPUs."""
        return DevicesStatus(
            num_devices=self.num_devices or 0,
            num_used=self.num_used,
            num_standby=self.num_standby,
            ended_for_return=self.ended_for_return,
            gpus=gpu_notes,
            gpu_uuids=self.uuids,
        )
