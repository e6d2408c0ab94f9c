"""Whether the agent that has a host's name in the store still lives: it is asked, for its lease alone does not tell.

A lease may last longer than its time to live: each new leader of an etcd cluster prolongs all of them. So an agent that
is started again may find the record of the one before it, its ghost, for any number of times to live.
"""

import enum
from collections.abc import Awaitable, Callable

from resilient_jax.cluster.dead_hosts import refuses_connections
from resilient_jax.cluster.progress_reader import read_progress
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.transport.credentials import Credentials


class NameHolder(enum.Enum):
    """What became of the agent that has a host's name."""

    ALIVE = enum.auto()
    """It answers."""
    GONE = enum.auto()
    """No process listens where it did, or another agent answers there."""
    SILENT = enum.auto()
    """Nothing answers: its machine is dead, cut off or slow, or the agent is stopped."""


AskHolder = Callable[[HostStatus], Awaitable[NameHolder]]


async def assume_alive(_: HostStatus) -> NameHolder:
    """Ask nobody."""
    return NameHolder.ALIVE


async def ask_name_holder(holder: HostStatus, credentials: Credentials) -> NameHolder:
    """Ask the agent that has written this status, at its endpoint.

    Raises:
        ConfigError: a TLS file cannot be read.
    """
    if not holder.agent.port:
        return NameHolder.SILENT
    if await refuses_connections(holder.agent.endpoint):
        return NameHolder.GONE
    answers = await read_progress(holder.agent.endpoint, credentials)
    if not answers:
        return NameHolder.SILENT
    is_there = any(answer.agent_id == holder.agent.id for answer in answers)
    return NameHolder.ALIVE if is_there else NameHolder.GONE
