"""How far the hosts of a job are, asked of the agent that leads."""

from resilient_jax.cluster.progress_messages import READ, SERVICE, HostProgress, ReadProgress
from resilient_jax.errors import PeerError, Unauthenticated
from resilient_jax.protocol.host_status import HostStatus
from resilient_jax.protocol.record_parts import change_fields
from resilient_jax.transport.channel import Channel
from resilient_jax.transport.credentials import Credentials

ANSWER_TIMEOUT_S = 1.0


async def read_progress(endpoint: str, credentials: Credentials) -> tuple[HostProgress, ...]:
    """Return what the agent at `endpoint` knows; nothing if it does not answer, or not us.

    A command without the job's token still shows what the store of an etcd cluster has.

    Raises:
        ConfigError: a TLS file cannot be read.
    """
    async with Channel(endpoint, credentials) as channel:
        try:
            answer = await channel.call(SERVICE, READ, ReadProgress(), timeout_s=ANSWER_TIMEOUT_S)
        except (PeerError, Unauthenticated):
            return ()
    return answer.hosts


def add_progress(status: HostStatus, progress: HostProgress | None) -> HostStatus:
    """Return a host's status with what its agent has reported beside the store since."""
    if (
        progress is None
        or progress.agent_id != status.agent.id
        or progress.progress.step < status.progress.step
    ):
        return status
    return change_fields(
        status,
        progress=progress.progress,
        snapshots=progress.snapshots,
    )
