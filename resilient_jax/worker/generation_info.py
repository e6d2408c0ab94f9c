"""The facts of one generation as this worker sees them, and meshes over its devices."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from resilient_jax.errors import CallerError
from resilient_jax.events import Event
from resilient_jax.ids import GenerationNumber, HostName, ProcessIndex
from resilient_jax.jax_runtime.jaxlib_types import Device
from resilient_jax.protocol.generation import Generation
from resilient_jax.protocol.plan_records import PlanAxes, PlanConstants
from resilient_jax.protocol.slow_hosts import HostSpeeds
from resilient_jax.protocol.state_records import StateLoss, UnitKind
from resilient_jax.protocol.worker_messages import FormWorld
from resilient_jax.step.assignment import HeldRanks

AxisSizes = str | Sequence[str] | Mapping[str, int]
"""One axis name; several, of which the first takes all devices; or names with sizes, of which one may be -1."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationInfo:
    """One generation's members, and how it came about.

    Attributes:
        number: number of the generation; the number only grows.
        hosts: the live hosts, in order of their process index.
        process_index: index of this host in `hosts`, the same as `jax.process_index()`.
        change: how the generation was formed: "shrink" or "grow" (in place), or "reform".
        reason: text for people: why the generation was formed.
        trusted_step: states of more steps may be wrong, because a host has computed wrongly; None: none.
        state_loss: what was lost, if no host's memory has the state any more; else None.
        layer_speeds: speeds of hosts that get fewer layers of a pipeline, as parts of the speed of their peers.
        stage_hosts: the hosts of a pipeline's replicas in their order, with those whose stages are kept for them.
        earlier_stage_hosts: the hosts of replicas before, oldest first: those of the first generation in their order.
            Each order follows from the one before it, so that the fewest blocks move. Empty: `stage_hosts` are in their
            order.
        plan_axes: names and sizes of the planned axes that every worker takes; in a rehearsal, those of the other
            workers. Empty: each worker finds the best plan.
        plan_constants: constants of the cost model by which every worker plans. Empty: the constants that the worker
            was given.
        is_joining: whether the generation is the rehearsal of a worker that takes part from the next generation on, and
            not when another has left.
        next_failure_s: in a rehearsal the expected time to the next failure, once this worker has joined.
        held_ranks: which hosts have which shards of the state, as it was before; None: it is not in shards of replicas.
        events: what this worker recorded on its way into this generation, oldest first.
        has_service: whether the world's coordination service runs; without it no clique can be formed.
    """

    number: GenerationNumber
    hosts: tuple[HostName, ...]
    process_index: ProcessIndex
    change: str
    reason: str
    trusted_step: int | None = None
    state_loss: StateLoss | None = None
    layer_speeds: HostSpeeds = ()
    stage_hosts: tuple[HostName, ...] = ()
    earlier_stage_hosts: tuple[tuple[HostName, ...], ...] = ()
    plan_axes: PlanAxes = ()
    plan_constants: PlanConstants = ()
    is_joining: bool = False
    next_failure_s: float = math.inf
    held_ranks: HeldRanks | None = None
    events: tuple[Event, ...] = ()
    has_service: bool = True

    @property
    def host(self) -> HostName:
        """The name of this host."""
        return self.hosts[self.process_index]

    def host_of_device(self, device: Device) -> HostName:
        """Return the host that a device of a live host belongs to."""
        return self.hosts[device.process_index]


def make_mesh(devices: Sequence[Device], axes: AxisSizes, owner: str) -> Mesh:
    """Return a mesh over the devices, in their order.

    Args:
        owner: owner of the devices, for the error message.

    Raises:
        CallerError: the sizes do not multiply to the number of devices.
    """
    sizes = dict(axes) if isinstance(axes, Mapping) else _assign_all_to_first(axes)
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) == 1 and fixed > 0 and len(devices) % fixed == 0:
        sizes[open_axes[0]] = len(devices) // fixed
    if int(np.prod(list(sizes.values()))) != len(devices) or min(sizes.values(), default=0) < 1:
        raise CallerError(
            f"mesh axes {dict(sizes)} do not fit the {len(devices)} devices of {owner}: the sizes must multiply "
            "to that number; write -1 for one of them to have it follow the devices"
        )
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes))


def _assign_all_to_first(axes: str | Sequence[str]) -> dict[str, int]:
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    return {name: -1 if position == 0 else 1 for position, name in enumerate(names)}


def describe_generation(order: FormWorld, events: tuple[Event, ...]) -> GenerationInfo:
    """Return what the script may know of the generation that a worker is ordered to form."""
    generation: Generation = order.generation
    member = generation.membership.find_member(order.host)
    assert member is not None, "an agent orders only members to form a world"
    return GenerationInfo(
        number=generation.number,
        hosts=tuple(m.host for m in generation.membership.members),
        process_index=ProcessIndex(generation.membership.members.index(member)),
        change=str(generation.membership.change),
        reason=generation.reason,
        trusted_step=generation.state.trusted_step,
        state_loss=generation.state.state_loss,
        layer_speeds=generation.record.slowness.speeds,
        stage_hosts=generation.shape.stage_hosts,
        earlier_stage_hosts=generation.shape.earlier_stage_hosts,
        plan_axes=generation.shape.plan_axes,
        plan_constants=generation.shape.plan_constants,
        held_ranks=find_held_ranks(generation),
        events=events,
        has_service=bool(generation.membership.service_address),
    )


def find_held_ranks(generation: Generation) -> HeldRanks | None:
    """Return which members have had which shards when a generation formed; None: none had any, by rank."""
    holders = {holder.host: holder.part for holder in generation.state.part_holders}
    if not holders or any(part.kind is not UnitKind.RANKS for part in holders.values()):
        return None
    (num_ranks,) = {part.num_units for part in holders.values()}
    parts = [holders.get(member.host) for member in generation.membership.members]
    return HeldRanks(num_ranks, tuple(part.runs[0][0] if part and part.runs else None for part in parts))
