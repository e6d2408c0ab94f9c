"""What the first hosts of a job wrote of it, which every other host must fit."""

import msgspec

from resilient_jax.ids import HostName
from resilient_jax.protocol.versions import Versions


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the first host wrote of the job; every other host must have the same versions."""

    versions: Versions
    first_host: HostName


class ScriptRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The program that all hosts of a job must run.

    Attributes:
        host: the first host with a worker, which has described the script; before that, the host that began the
            program.
        agent_id: id of that host's agent.
        program: id of the program, under which each host keeps the program's files.
        items: values and digests that describe the script, by name; empty: no worker has been let in yet.
    """

    host: HostName
    agent_id: str
    program: str
    items: dict[str, str]
