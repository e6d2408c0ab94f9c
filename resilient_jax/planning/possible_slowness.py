"""The hosts and devices that may become slow, one of each kind, and what each action would make of it."""

import collections
import dataclasses
from typing import Final

import msgspec

from resilient_jax.ids import GenerationNumber
from resilient_jax.planning.axes import Axis
from resilient_jax.planning.errors import PlanError
from resilient_jax.planning.plan import Plan
from resilient_jax.planning.plan_request import NO_FIXED_AXES, PlanConstraints
from resilient_jax.planning.replanning import search_again, try_keep, try_stay
from resilient_jax.protocol.slow_hosts import Slowdown
from resilient_jax.topology import Host, Topology

SLOW_SPEEDS: Final = (0.8, 0.5, 0.25)
"""As parts of the speed of its peers: a little slow, half, and as slow as what is throttled by heat."""
ALL_DEVICES: Final = "what a stage of a pipeline would do with fewer devices is not estimated"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PossibleSlowness:
    """One host or device that is slow, for all that are like it.

    Attributes:
        device: number of the device on the host; None: the host with all its devices.
        speed: speed as a part of the speed before.
        num_alike: how many hosts or devices of this kind there are.
    """

    host: Host
    device: int | None
    speed: float
    num_alike: int

    @property
    def name(self) -> str:
        """What is slow, as `Topology.slowed` takes it."""
        return self.host.name if self.device is None else f"{self.host.name}/{self.device}"

    def describe(self) -> str:
        """Return a text such as "a device at 0.5: host-7/3"."""
        return f"{'a host' if self.device is None else 'a device'} at {self.speed:g}: {self.name}"


def list_possible_slowness(topology: Topology) -> list[PossibleSlowness]:
    """Return a host of each kind, and a device of it if it has several, at each of `SLOW_SPEEDS`.

    Hosts of one accelerator with as many devices of the same speeds are alike; the last of them stands for all.
    """
    alike: dict[object, list[Host]] = collections.defaultdict(list)
    for host in topology.hosts:
        alike[host.accelerator, host.devices, host.device_speeds, host.speed].append(host)
    found: list[PossibleSlowness] = []
    for hosts in alike.values():
        last = hosts[-1]
        kinds: list[tuple[int | None, int]] = [(None, len(hosts))]
        if last.devices > 1:
            kinds.append((last.living_devices[-1], len(hosts) * last.devices))
        found += [
            PossibleSlowness(host=last, device=device, speed=speed, num_alike=number)
            for device, number in kinds
            for speed in SLOW_SPEEDS
        ]
    return found


def estimate_possible_slowdown(
    plan: Plan, topology: Topology, slow: PossibleSlowness, used: tuple[int, ...], *, min_replicas: int = 1
) -> Slowdown:
    """Return what a slow host or device costs, and what each action would make of it, by the cost model.

    Args:
        used: the devices on which the host would go on without the slow one; (): the host cannot do without that
            device.
        min_replicas: as in `replan`.
    """
    now = topology.slowed(slow.name, slow.speed)
    is_pipeline = plan.axis_sizes.get(Axis.PIPELINE, 1) > 1
    kept = try_keep(plan, now, min_replicas)
    stayed = try_stay(plan, now, 1.0, min_replicas)
    kept_s = min(
        [one.step_time_s for one in (kept, stayed) if one is not None],
        default=plan.step_time_s / slow.speed,
    )
    slowdown = Slowdown(
        generation=GenerationNumber(0),
        host=slow.host.name,
        kept=plan.step_time_s / kept_s,
        replaced=1.0,
        without=_find_speed(plan, topology, (slow.host.name,), min_replicas),
        redivided=_find_redivided_speed(plan, now, min_replicas) if is_pipeline else 0.0,
    )
    if slow.device is None:
        why = (
            "no device of it is slower than its other ones" if slow.host.devices > 1 else "it has one device"
        )
        return msgspec.structs.replace(slowdown, why_all_devices=why)
    slowdown = msgspec.structs.replace(slowdown, devices=(slow.device,))
    if is_pipeline or not used:
        why = ALL_DEVICES if is_pipeline else "it cannot do without a device"
        return msgspec.structs.replace(slowdown, why_all_devices=why)
    out = tuple(f"{slow.host.name}/{device}" for device in slow.host.living_devices if device not in used)
    return msgspec.structs.replace(slowdown, fewer_devices=_find_speed(plan, topology, out, min_replicas))


def _find_speed(plan: Plan, topology: Topology, lost: tuple[str, ...], min_replicas: int) -> float:
    """Return the speed of the fastest plan without hosts or devices; 0: there is none."""
    if len(topology.hosts) == 1 and lost == (topology.hosts[0].name,):
        return 0.0
    try:
        found = search_again(
            plan, topology.without(*lost), PlanConstraints(NO_FIXED_AXES, min_replicas=min_replicas)
        )
    except PlanError:
        return 0.0
    return plan.step_time_s / found.step_time_s


def _find_redivided_speed(plan: Plan, now: Topology, min_replicas: int) -> float:
    """Return the speed with other layers on the stages of the same pipeline; 0: there is none."""
    replica_axes = plan.layout.axes
    axes = {axis: size for axis, size in plan.axis_sizes.items() if axis.value in replica_axes._fields}
    try:
        found = search_again(plan, now, PlanConstraints(axes, plan.microbatch, min_replicas))
    except PlanError:
        return 0.0
    return plan.step_time_s / found.step_time_s
