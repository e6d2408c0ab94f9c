"""Finds a dead agent before its lease ends: the machine answers for it that no process listens at its port.

A lease must be some seconds long, or a pause of an agent would cost its host the membership. Where a process died and
its machine lives, these seconds are not needed. A machine that is dead itself, or cut off, answers nothing: then only
the end of the lease says so. If an agent is wrongly taken for dead (a firewall that refuses connections), it loses its
lease as in any other loss of the store: its worker holds, and it registers again. That shows what such a refusal is
worth: of this agent only the end of its lease counts from then on.
"""

import asyncio
import contextlib
from collections.abc import Iterable

from resilient_jax.cluster.agent_context import AgentContext
from resilient_jax.cluster.port_probe import PortAnswer, ProbeLimits, probe_port
from resilient_jax.cluster.stored_records import decode_record
from resilient_jax.errors import LeaseExpired, PeerError
from resilient_jax.events import EventKind
from resilient_jax.ids import HostName
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.store_keys import make_host_key

MAX_CONNECTIONS = 32
"""At a time."""
INTERVAL_S = 0.25
"""Time between two looks at one host."""
LIMITS = ProbeLimits(num_tries=2, timeout_s=0.5, interval_s=0.05)


class DeadHostFinder:
    """Looks at agents that others wait for, and ends the lease of those that are dead."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._looks: dict[HostName, asyncio.Task[None]] = {}
        """A task lasts until the host may be looked at again."""
        self._ended: set[str] = set()
        """Ids of the agents whose leases were ended. One that is in the store again was alive."""

    def look_at(self, agents: Iterable[tuple[HostName, str, str]]) -> None:
        """Look at some agents, beside the caller: the host, the id and the endpoint of each."""
        for host, agent_id, endpoint in agents:
            if len(self._looks) >= MAX_CONNECTIONS:
                return
            if agent_id in self._ended:
                continue
            if host not in self._looks and host != self._context.settings.host:
                task = asyncio.get_running_loop().create_task(self._look(host, agent_id, endpoint))
                self._looks[host] = task
                task.add_done_callback(lambda _, host=host: self._looks.pop(host))

    async def close(self) -> None:
        """Look at no agent any more."""
        tasks = list(self._looks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, host: HostName, agent_id: str, endpoint: str) -> None:
        with contextlib.suppress(PeerError, LeaseExpired):  # then the lease ends by itself, or has ended
            if await refuses_connections(endpoint):
                await self._end_lease(host, agent_id)
        await asyncio.sleep(INTERVAL_S)

    async def _end_lease(self, host: HostName, agent_id: str) -> None:
        record = await self._context.store.get(make_host_key(self._context.settings.job, host))
        if record is None or decode_record(record, HostStatus).agent.id != agent_id:
            return  # another agent of that host, which has another port
        self._ended.add(agent_id)
        self._context.log.record(EventKind.HOST_FOUND_DEAD, dead=host)
        await self._context.store.revoke(record.lease)


async def refuses_connections(endpoint: str) -> bool:
    """Return whether a machine answers, each time, that no process listens there."""
    return await probe_port(endpoint, LIMITS, {PortAnswer.REFUSED}) is PortAnswer.REFUSED
