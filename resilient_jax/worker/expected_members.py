"""The members that a worker expects in its first generation, before it has joined one."""

from resilient_jax.protocol.generation import Member
from resilient_jax.protocol.worker_messages import TakeSeat


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
