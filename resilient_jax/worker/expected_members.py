"""The members that a worker expects in its first generation, before it has joined one."""

from collections.abc import Sequence

from resilient_jax.protocol.generation import Generation, Member
from resilient_jax.protocol.worker_messages import TakeSeat
from resilient_jax.step.assignment import HeldRanks, ReplicaShape, list_holders, locate_replicas
from resilient_jax.worker.generation_info import find_held_ranks


def list_others(order: TakeSeat) -> tuple[Member, ...]:
    """Return the members that a worker joins from the seat that it is to take, which is the last.

    A standby comes in the place of its host's worker. A spare comes in the place of another host; of which, is not
    known, and programs depend on the number of hosts alone.
    """
    others = tuple(member for member in order.generation.membership.members if member.host != order.host)
    is_spare = order.host in order.generation.membership.spares and len(others) == len(
        order.generation.membership.members
    )
    return others[:-1] if is_spare and len(others) > 1 else others


def foresee_ranks(
    generation: Generation, others: Sequence[Member], num_devices: int, shape: ReplicaShape
) -> HeldRanks | None:
    """Return which of the others have which shards, and that this worker, the last, has none.

    Args:
        generation: the present one, whose record says how its members came by their shards.
        num_devices: devices that each member is taken to have, whatever this host has.
    """
    members = generation.membership.members
    if shape.hosts == 1 or len(members) < shape.hosts:
        return None
    seats = [member.seat for member in members]
    locations = locate_replicas(seats, shape, [num_devices] * len(members), find_held_ranks(generation))
    rank_of = {members[host]: rank for rank, hosts in enumerate(list_holders(locations)) for host in hosts}
    return HeldRanks(shape.hosts, (*(rank_of.get(member) for member in others), None))
