"""Which agent leads, as the store has it."""

import msgspec

from resilient_jax.ids import HostName


class LeaderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The leading agent. The key is bound to the leader's lease; its create revision is the fencing token.

    Attributes:
        agent_id: id that is new with each start of the agent.
        endpoint: host:port at which the leader listens.
    """

    host: HostName
    agent_id: str
    endpoint: str
