"""What the first hosts of a job wrote of it, which every other host must fit."""

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.protocol.records import Versions


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the first host wrote of the job; every other host must have the same versions."""

    versions: Versions
    first_host: HostName


class ScriptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The script that all hosts of a job must run, as the first host with a worker described it.

    Attributes:
        host: that host.
        agent_id: of its agent.
        items: values and digests, by name.
    """

    host: HostName
    agent_id: str
    items: dict[str, str]
